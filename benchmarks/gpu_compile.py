"""Attention compiled for an H200 but not run: launches, memory traffic, registers and spills.

The fused kernels and XLA's programs are compiled for bidirectional attention in bfloat16. With
--check, the numbers must be those of ``results/gpu_compile.json``, or better; with --write, they
become those. CONTRIBUTING says what has to be installed.

Run: python -m benchmarks.gpu_compile
"""

import json
import os
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp

from benchmarks import command_line, gpu
from simrf_jax import RandomFeatureMechanism, random_feature_attention
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import backend

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu_compile.json"
MIB = 2**20
# Batch, length, heads, their width, features.
SIZES = {"T = 1,024": (8, 1024, 12, 64, 128), "T = 16,384": (1, 16384, 12, 64, 128)}
WIDE = {"d = 128": (4, 1024, 12, 128, 128)}
# Numbers that must not grow.
COUNTS = ("launches", "MiB", "spilled", "shared")
SLACK = 1.02


def in_kernels(q, k, v, w):
    """Attends in the fused kernels, which without a GPU refuse a call from outside."""
    estimator = RandomFeatureMechanism(w).estimator()
    return backend.attend_compiled(estimator, Call.of(q, k, v), interpret=None)


def by_xla(q, k, v, w):
    """Attends by XLA."""
    return random_feature_attention(q, k, v, w, implementation="xla")


def with_gradient(attend):
    """Returns a function that computes the gradients of everything."""

    def loss(q, k, v, w):
        return jnp.sum(jnp.square(attend(q, k, v, w).astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2, 3))


def measure(attend, size):
    """Compiles a program and returns its numbers, and a row for each of its Mosaic kernels."""
    batch, length, heads, dim, num_features = size
    tokens = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((num_features, dim), jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        compiled = gpu.compile_for_h200(attend, tokens, tokens, tokens, w)
        kernels = gpu.kernels(pathlib.Path(folder))
    cost = gpu.cost_of(compiled.as_text())
    memory = compiled.memory_analysis().temp_size_in_bytes
    row = {"launches": cost.launches, "MiB": cost.bytes / MIB, "temporary MiB": memory / MIB}
    return {name: round(value, 1) for name, value in row.items()}, kernels


def programs():
    """Yields the name of each program, its function and its size."""
    for name, size in (SIZES | WIDE).items():
        for attention, attend in (("kernels", in_kernels), ("XLA", by_xla)):
            yield f"{name}, {attention}", attend, size
            yield f"{name}, {attention}, gradient", with_gradient(attend), size


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
    for name, attend, size in programs():
        row, kernels = measure(attend, size)
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
