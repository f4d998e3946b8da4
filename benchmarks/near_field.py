"""What the near field costs against exact attention, by the length.

One sequence, 4 heads of dimension 64, bandwidth 32; banded_attention and
jax.nn.dot_product_attention (without its band) alternate in one process. Memory is what XLA
allocates beside inputs and outputs.

Run: python -m benchmarks.near_field
"""

import functools

import jax
import numpy as np

import simrf_jax
from experiments import timing

LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
HEADS, DIM, BANDWIDTH = 4, 64, 32
ROUNDS, SECONDS = 15, 20


def main():
    jax.config.update("jax_platforms", "cpu")
    attentions = {
        "exact": jax.nn.dot_product_attention,
        "banded": functools.partial(simrf_jax.banded_attention, bandwidth=BANDWIDTH),
    }
    print("| T | exact ms | banded ms | exact / banded, quartiles | exact MiB | banded MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in LENGTHS:
        qkv = jax.random.normal(jax.random.key(0), (3, length, HEADS, DIM))
        compiled = {name: jax.jit(f).lower(*qkv).compile() for name, f in attentions.items()}
        calls = {name: lambda _, f=f, qkv=qkv: f(*qkv) for name, f in compiled.items()}
        times = timing.alternate(calls, ROUNDS, seconds=SECONDS)
        exact, banded = times["exact"], times["banded"]
        low, median, high = np.percentile(exact / banded, [25, 50, 75])
        memory = (f.memory_analysis().temp_size_in_bytes / 2**20 for f in compiled.values())
        print(
            f"| {length:,} | {np.median(exact):.1f} | {np.median(banded):.1f} "
            f"| {median:.2f} ({low:.2f} to {high:.2f}) "
            f"| {' | '.join(f'{mib:,.1f}' for mib in memory)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
