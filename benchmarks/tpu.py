"""Compiling for a TPU that is not there, with the compiler in the `libtpu` wheel.

Static cycles are the compiler's own model of its schedule, for one device, with no wait for memory
in it. They compare ways to do the same thing; they are not measured times.
"""

import os
import re

# No metadata server to ask.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")

import jax
from jax.experimental import topologies


def devices(topology="v5e:2x4"):
    """The devices of a TPU topology, to compile for."""
    return topologies.get_topology_desc(topology, platform="tpu").devices


def compile_for(function, *arguments, topology="v5e:2x4"):
    """Compiles a function of abstract arguments for one device of a TPU topology."""
    sharding = jax.sharding.SingleDeviceSharding(devices(topology)[0])

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function).lower(*jax.tree.map(on_device, arguments)).compile()


def static_cycles(compiled):
    """Estimated cycles of a compiled program, bodies of counted loops times their trips.

    Returns:
      The cycles, and the sorted names of the custom calls, which have no estimate.
    """
    text = compiled.as_text()
    computations, name, entry = {}, None, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name:
            computations[name].append(line)

    def cycles(name):
        total = 0
        for line in computations[name]:
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
            total += int(estimate[1]) if estimate else 0
            if " while(" in line:
                body = re.search(r"body=%?([\w.\-]+)", line)[1]
                condition = re.search(r"condition=%?([\w.\-]+)", line)[1]
                total += _trips(line, computations[condition]) * cycles(body)
            elif called := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
                total += cycles(called[1])
        return total

    custom_calls = set(re.findall(r'custom_call_target="(\w+)"', text))
    return cycles(entry), sorted(custom_calls)


def _trips(line, condition):
    """How often a loop runs: annotated, or the only number that its condition compares with."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    [bound] = {int(n) for n in re.findall(r"constant\((\d+)\)", "\n".join(condition))}
    return bound
