"""Compiling for a TPU that is not there, with the compiler in the `libtpu` wheel.

Static cycles are the compiler's own model of its schedule, for one device, with no wait for memory
in it. They compare ways to do the same thing; they are not measured times.
"""

import collections
import math
import os
import re

import jax
from jax.experimental import topologies

# What libtpu would ask a metadata server for, which is not there.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


def devices(topology="v5e:2x4"):
    """The devices of a TPU topology, to compile for."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # On a v4 JAX takes the two cores of a chip for one device.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    return topologies.get_topology_desc(topology, platform="tpu", **options).devices


def compile_for(function, *arguments, topology="v5e:2x4"):
    """Compiles a function of abstract arguments for one device of a TPU topology."""
    sharding = jax.sharding.SingleDeviceSharding(devices(topology)[0])

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function).lower(*jax.tree.map(on_device, arguments)).compile()


def executed(program):
    """The lines of a compiled program, each with how often it runs.

    Those of counted loops run as often as the loops go round. What is inside a fusion belongs to
    the line of the fusion.

    Args:
      program: The text of a scheduled HLO module.
    """
    computations, name, entry = {}, None, None
    for line in program.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name:
            computations[name].append(line)

    def lines(name, times):
        for line in computations[name]:
            yield line, times
            if " while(" in line:
                body = re.search(r"body=%?([\w.\-]+)", line)[1]
                condition = re.search(r"condition=%?([\w.\-]+)", line)[1]
                yield from lines(body, times * _trips(line, computations[condition]))
            elif called := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
                yield from lines(called[1], times)

    return lines(entry, 1)


def static_cycles(compiled):
    """Estimated cycles of a compiled program, bodies of counted loops times their trips.

    Returns:
      The cycles, and the sorted names of the custom calls, which have no estimate.
    """
    text = compiled.as_text()
    cycles = 0
    for line, times in executed(text):
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        cycles += times * int(estimate[1]) if estimate else 0
    return cycles, sorted(set(re.findall(r'custom_call_target="(\w+)"', text)))


def collectives(lines):
    """What the devices of a compiled program send each other.

    Args:
      lines: As ``executed`` returns them; with a 1 beside each line of the text, what is in a loop
        counts once.

    Returns:
      The count of each collective, and the bytes of their results on each device.
    """
    counts, total = collections.Counter(), 0
    for line, times in lines:
        found = re.search(rf"= (\S+|\(.*?\)) ({COLLECTIVES})(-start)?\(", line)
        if not found:
            continue
        result, name, start = found.groups()
        counts[name] += times
        shapes = re.findall(rf"({'|'.join(BYTES)})\[([\d,]*)\]", result)
        sizes = [
            BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in shapes
        ]
        # An asynchronous one names what it reads, what it writes, and flags.
        total += times * (max(sizes) if start else sum(sizes))
    return counts, total


def _trips(line, condition):
    """How often a loop runs: annotated, or the only number that its condition compares with."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    [bound] = {int(n) for n in re.findall(r"constant\((\d+)\)", "\n".join(condition))}
    return bound
