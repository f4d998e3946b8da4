"""Compilation for a TPU that this machine need not have, by the compiler in the `libtpu` wheel.

Static cycles are XLA's own estimates (``estimated_cycles``) for one device, with waits for memory
and a fixed cost of about two thousand cycles for each operation. They are not measured times, and
not the unit of the schedules that ``benchmarks.schedule`` counts: for the batched products of
attention they are two to five times as many as bundles.
"""

import collections
import math
import os
import re

import jax
from jax.experimental import topologies

# libtpu would ask a metadata server for these, and outside a TPU VM there is none.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


def devices(topology="v5e:2x4"):
    """Returns the devices of a TPU topology, to compile for."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # On v4, JAX sees the two cores of a chip as one device.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    return topologies.get_topology_desc(topology, platform="tpu", **options).devices


def compile_for(function, *arguments, topology="v5e:2x4"):
    """Compiles a function of abstract arguments for one device of a TPU topology."""
    sharding = jax.sharding.SingleDeviceSharding(devices(topology)[0])

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function).lower(*jax.tree.map(on_device, arguments)).compile()


def executed(program):
    """Returns the lines of a compiled program, each with the number of times that it runs.

    The body of a counted loop runs as often as the loop iterates. The inside of a fusion belongs to
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
    """Returns the estimated cycles of a compiled program, counting every iteration of its loops.

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
    """Counts the collectives of a compiled program, and the bytes that they bring.

    Args:
      lines: Pairs of a line and the number of times that it runs, as ``executed`` returns them.
        Pair each line of the text with 1 to count the body of a loop once.

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
        # The result of an asynchronous collective is a tuple of its input, its output and flags.
        total += times * (max(sizes) if start else sum(sizes))
    return counts, total


def _trips(line, condition):
    """Returns how often a loop iterates.

    The number is annotated, or the only one that the condition of the loop compares with.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    [bound] = {int(n) for n in re.findall(r"constant\((\d+)\)", "\n".join(condition))}
    return bound
