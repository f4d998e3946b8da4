"""Compilation for a TPU that this machine need not have, by the compiler in the `libtpu` wheel.

Static cycles are XLA's own estimates (``estimated_cycles``) for one device, with waits for memory
and a fixed cost of about two thousand cycles for each operation. They are not measured times, and
not the unit of the schedules that ``benchmarks.schedule`` counts: for the batched products of
attention they are two to five times the number of bundles.
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
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
# An array in a program: its type, sizes, axes from the fastest on, and tiles and memory.
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\{([\d,]*):?([^}]*)\}")
# Operations that move nothing. Custom calls that are no Pallas kernels name buffers.
IMMEDIATE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "custom-call")


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


def bytes_moved(program):
    """Returns the bytes, padding included, that operations move to and from the device's memory.

    Each operation and kernel reads each of its operands once and writes its results once; kernels
    that read a block again move more. What XLA keeps in the memory of the core does not count.

    Args:
      program: The text of a scheduled HLO module.

    Returns:
      The bytes, or None if there is a loop, whose operations read unknown parts of their operands.
    """
    types, total = {}, 0
    for line, _ in executed(program):
        found = re.match(
            r" *(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, |$)", line
        )
        if not found:
            continue
        name, result, operation, operands = found.groups()
        types[name] = result
        if operation == "while":
            return None
        if operation.endswith("-start"):
            # The result has both ends and a handle. One end is the device's memory.
            ends = ARRAY.findall(re.sub(r"S\(\d+\)", "", result))
            total += min(_padded_bytes(*end) for end in ends if end[1])
        elif operation.endswith("-done"):
            continue
        elif operation not in IMMEDIATE or "tpu_custom_call" in line:
            for array in (name, *re.findall(r"%([\w.\-]+)", operands)):
                total += sum(_padded_bytes(*part) for part in ARRAY.findall(types[array]))
    return total


def _padded_bytes(dtype, dims, order, layout):
    """Returns the bytes of an array in the device's memory: zero if it is in the core's."""
    if re.search(r"S\(\d+\)", layout):
        return 0
    sizes = [int(n) for n in dims.split(",") if n]
    sizes = [sizes[int(axis)] for axis in order.split(",") if axis]  # From the fastest on.
    if tile := re.match(r"T\(([\d,]+)\)", layout):
        for axis, multiple in enumerate(reversed([int(n) for n in tile[1].split(",")])):
            if axis < len(sizes):
                sizes[axis] = -(-sizes[axis] // multiple) * multiple
    return BYTES[dtype] * math.prod(sizes)


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
