"""Time and memory of banded attention (the near field) against exact attention, by length.

The setting is one sequence, 4 heads of dimension 64 and bandwidth 32. ``banded_attention`` and
``jax.nn.dot_product_attention`` over all keys alternate in one process. Memory is the memory that
XLA allocates in addition to inputs and outputs. With --blocks the program times the forward and
backward pass at T = 4,096 by the size of the query blocks instead.

Run: python -m benchmarks.near_field [--blocks]
"""

import functools

import jax
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing

LENGTHS = [256, 512, 1024, 2048, 4096, 16384, 65536]
LONGEST_EXACT = 4096  # Longer sequences would need gigabytes of logits.
HEADS, DIM, BANDWIDTH = 4, 64, 32
BANDWIDTHS, BLOCKS = (8, 32, 128), (16, 32, 64, 128, 256)
ROUNDS, SECONDS = 15, 20


def attentions(length):
    banded = functools.partial(simrf_jax.banded_attention, bandwidth=BANDWIDTH)
    exact = {"exact": jax.nn.dot_product_attention} if length <= LONGEST_EXACT else {}
    return exact | {"banded": banded}


def temporary_mib(compiled):
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def by_length():
    print("| T | exact ms | banded ms | exact / banded, quartiles | exact MiB | banded MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in LENGTHS:
        qkv = jax.random.normal(jax.random.key(0), (3, length, HEADS, DIM))
        compiled = {
            name: jax.jit(attention).lower(*qkv).compile()
            for name, attention in attentions(length).items()
        }
        calls = {name: lambda _, f=f, qkv=qkv: f(*qkv) for name, f in compiled.items()}
        times = timing.alternate(calls, ROUNDS, seconds=SECONDS)
        ms = {name: f"{np.median(times[name]):.1f}" for name in times}
        mib = {name: f"{temporary_mib(f):,.0f}" for name, f in compiled.items()}
        ratio = "-"
        if "exact" in times:
            quartiles = np.percentile(times["exact"] / times["banded"], [25, 50, 75])
            ratio = "{1:.1f} ({0:.1f} to {2:.1f})".format(*quartiles)
        print(
            f"| {length:,} | {ms.get('exact', '-')} | {ms['banded']} | {ratio} "
            f"| {mib.get('exact', '-')} | {mib['banded']} |",
            flush=True,
        )


def by_block():
    qkv = jax.random.normal(jax.random.key(0), (3, 4096, HEADS, DIM))
    print("| bandwidth | " + " | ".join(f"query blocks of {size}" for size in BLOCKS) + " |")
    print("| --- |" + " --- |" * len(BLOCKS))
    for bandwidth in BANDWIDTHS:
        calls = {}
        for size in BLOCKS:
            banded = functools.partial(
                simrf_jax.banded_attention, bandwidth=bandwidth, block_size=size
            )
            gradient = jax.jit(jax.grad(lambda qkv, f=banded: f(*qkv).sum()))
            calls[size] = lambda _, f=gradient: f(qkv)
        times = timing.alternate(calls, ROUNDS, seconds=SECONDS)
        cells = [f"{np.median(ms):.0f}" for ms in times.values()]
        print(f"| {bandwidth} | {' | '.join(cells)} |", flush=True)


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--blocks", action="store_true", help="by size of the query blocks")
    measure = by_block if parser.parse_args().blocks else by_length
    jax.config.update("jax_platforms", "cpu")
    measure()


if __name__ == "__main__":
    main()
