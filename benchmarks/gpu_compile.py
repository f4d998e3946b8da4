"""Attention compiled for GPUs but not run: launches, memory traffic, registers and spills.

Attention in bfloat16 is compiled in the fused kernels for an H200, and by XLA for an H200, an A100
and a T4. With --check, the numbers must be those of ``results/gpu_compile.json``, or better; with
--write, they become those. CONTRIBUTING says what has to be installed.

Run: python -m benchmarks.gpu_compile
"""

import functools
import json
import os
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp

from benchmarks import command_line, gpu
from simrf_jax import RandomFeatureMechanism
from simrf_jax._src.attention.estimator import CHUNK_SIZE_ON_GPUS
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import backend

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu_compile.json"
MIB = 2**20
# Batch, length, heads, their width, features.
USUAL = (8, 1024, 12, 64, 128)
SIZES = {
    "": USUAL,
    ", T = 197": (8, 197, 12, 64, 128),
    ", T = 16,384": (1, 16384, 12, 64, 128),
    ", d = 128": (4, 1024, 12, 128, 128),
}
# Keywords of the kernels where the order of tokens matters.
BANDWIDTH, SEGMENTS = 64, 4
ORDERED = {
    "causal": {"is_causal": True},
    "causal band": {"is_causal": True, "bandwidth": BANDWIDTH},
    "band": {"bandwidth": BANDWIDTH},
    "causal and packed": {"is_causal": True, "is_packed": True},
    "packed": {"is_packed": True},
}
# Numbers that must not grow.
COUNTS = ("launches", "MiB", "spilled", "shared")
SLACK = 1.02


def segment_ids(tokens):
    """Returns the ids of segments of one length."""
    length = tokens.shape[1]
    return jnp.broadcast_to(jnp.arange(length) * SEGMENTS // length, tokens.shape[:2])


def in_kernels(q, k, v, w, is_causal=False, bandwidth=None, is_packed=False):
    """Attends in the fused kernels, which without a GPU refuse a call from outside."""
    estimator = RandomFeatureMechanism(w, exact_bandwidth=bandwidth)
    ids = segment_ids(q) if is_packed else None
    call = Call.of(q, k, v, is_causal=is_causal, segment_ids=ids)
    return backend.attend_compiled(estimator, call, interpret=None)


def by_xla(q, k, v, w, is_causal=False, bandwidth=None, is_packed=False):
    """Attends by XLA, with the chunks that are the default where there is a GPU."""
    mechanism = RandomFeatureMechanism(
        w, exact_bandwidth=bandwidth, chunk_size=CHUNK_SIZE_ON_GPUS, implementation="xla"
    )
    ids = segment_ids(q) if is_packed else None
    return mechanism.attend(q, k, v, is_causal=is_causal, segment_ids=ids)


def with_gradient(attend, places=(0, 1, 2, 3)):
    """Returns a function that computes the gradients of everything, or of some arrays."""

    def loss(q, k, v, w):
        return jnp.sum(jnp.square(attend(q, k, v, w).astype(jnp.float32)))

    return jax.grad(loss, places)


def measure(name, attend, size):
    """Compiles a program for a GPU, and returns its numbers and those of its Mosaic kernels."""
    batch, length, heads, dim, num_features = size
    tokens = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((num_features, dim), jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        compiled = gpu.compile_for(name, attend, tokens, tokens, tokens, w)
        kernels = gpu.kernels(pathlib.Path(folder))
    cost = gpu.cost_of(compiled.as_text())
    memory = compiled.memory_analysis().temp_size_in_bytes
    row = {"launches": cost.launches, "MiB": cost.bytes / MIB, "temporary MiB": memory / MIB}
    return {name: round(value, 1) for name, value in row.items()}, kernels


def programs():
    """Yields the name of each program, and the GPU, the function and the size to compile it for."""
    of_xla = {name: functools.partial(by_xla, **options) for name, options in ORDERED.items()}
    cases = [(f"kernels{name}", "H200", in_kernels, size) for name, size in SIZES.items()]
    cases += [(f"XLA{name}", "H200", by_xla, size) for name, size in SIZES.items()]
    cases += [(f"XLA, {name}", name, by_xla, USUAL) for name in ("A100", "T4")]
    cases += [(f"XLA, {name}", "H200", attend, USUAL) for name, attend in of_xla.items()]
    cases += [("XLA, causal, T4", "T4", of_xla["causal"], USUAL)]
    for name, options in ORDERED.items():
        attend = functools.partial(in_kernels, **options)
        yield f"kernels, {name}", "H200", attend, USUAL
        # No kernel has the gradient of W.
        yield f"kernels, {name}, gradient", "H200", with_gradient(attend, (0, 1, 2)), USUAL
    for name, device, attend, size in cases:
        yield name, device, attend, size
        yield f"{name}, gradient", device, with_gradient(attend), size


def worse(got, recorded):
    """Returns a line for each number that grew, and for each product off the tensor cores."""
    lines = []
    for name, program in got.items():
        before = recorded[name]
        rows = [(name, program, before)]
        rows += [
            (f"{name}, kernel {place}", *pair)
            for place, pair in enumerate(zip(program["kernels"], before["kernels"], strict=True))
        ]
        for row, new, old in rows:
            lines += [
                f"{row}: {count} is {new[count]}, {old[count]} is recorded"
                for count in COUNTS
                if count in new and new[count] > SLACK * old[count]
            ]
            if new.get("products") == 0:
                lines.append(f"{row}: no HGMMA")
    return lines


def main():
    """Compiles all programs and prints their tables."""
    parser = command_line.parser(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail if a number has grown")
    action.add_argument("--write", action="store_true", help="record the numbers")
    options = parser.parse_args()
    for what in ("PTX", "PTXAS", "SASS"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    got = {}
    print("| program | launches | HBM MiB | temporary MiB |\n| --- | --- | --- | --- |")
    for name, device, attend, size in programs():
        row, kernels = measure(device, attend, size)
        got[name] = row | {"kernels": kernels}
        command_line.show(f"| {name} | {' | '.join(f'{value:,}' for value in row.values())} |")
    print("\n| program | kernel | registers | spilled bytes | shared memory | HGMMA |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, program in got.items():
        for kernel in program["kernels"]:
            print(f"| {name} | {' | '.join(map(str, kernel.values()))} |")
    if options.write:
        RESULTS.write_text(json.dumps(got, indent=1) + "\n")
    if options.check and (lines := worse(got, json.loads(RESULTS.read_text()))):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
