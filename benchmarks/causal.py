"""Time and memory of causal attention by sequence length, or by chunk size with ``--chunks``.

The setting is 4 heads, d = 64 and m = 130, for the forward pass alone and with the backward pass,
on JAX's default device. Each measurement takes 65,536 tokens, in as many calls as that needs: a
single short call would pay for memory that the long call before it had released.

Run: python -m benchmarks.causal [--chunks]
"""

import functools
import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing

HEADS, DIM, NUM_FEATURES = 4, 64, 130
LENGTHS = (4096, 16_384, 65_536)
CHUNKS = (16, 32, 64, 128, 256)


def inputs(length):
    w = simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM)
    return *jax.random.normal(jax.random.key(0), (3, length, HEADS, DIM)), w


def compiled(name, length, chunk_size=None):
    """Compiles the forward pass, or the gradient with respect to queries, keys and values."""
    attend = functools.partial(
        simrf_jax.random_feature_attention, is_causal=True, chunk_size=chunk_size
    )
    gradient = jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), argnums=(0, 1, 2))
    return jax.jit(attend if name == "forward" else gradient).lower(*inputs(length)).compile()


def repeated(program, arguments, times):
    def call(_):
        for _ in range(times):
            jax.block_until_ready(program(*arguments))

    return call


def measure(cases, rounds):
    """Returns milliseconds for 65,536 tokens, and MiB of temporary buffers, by (case, pass).

    All cases alternate; the milliseconds of a case are one array over the rounds.
    """
    wanted = [*itertools.product(cases, ("forward", "backward"))]
    programs = {
        (case, name): (compiled(name, *case), inputs(case[0]))
        for case, name in command_line.bar(wanted, "compiled")
    }
    calls = {
        (case, name): repeated(*called, LENGTHS[-1] // case[0])
        for (case, name), called in programs.items()
    }
    times = timing.alternate(calls, rounds)
    sizes = {
        key: program.memory_analysis().temp_size_in_bytes / 2**20
        for key, (program, _) in programs.items()
    }
    return times, sizes


def cells(case, times, sizes):
    """Yields the cells of one row: for each pass microseconds per token, their ratio, and MiB.

    The ratio to the last case is taken round by round.
    """
    last, _ = list(times)[-1]
    for name in ("forward", "backward"):
        ratio = times[case, name] / times[last, name]
        yield quartiles(times[case, name] * 1e3 / LENGTHS[-1], digits=1)
        yield quartiles(ratio, digits=2)
        yield f"{sizes[case, name]:.0f}"


def quartiles(x, digits):
    low, median, high = np.percentile(x, [25, 50, 75])
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--chunks", action="store_true", help="by chunk size, not by length")
    options = parser.parse_args()
    header = "us per token, forward | / last row | MiB | with backward | / last row | MiB |"
    if options.chunks:
        cases, first = [(LENGTHS[0], chunk_size) for chunk_size in CHUNKS], "chunk"
    else:
        cases, first = [(length, None) for length in LENGTHS], "length"
    times, sizes = measure(cases, rounds=9)
    print(f"| {first} | {header}\n|" + " --- |" * 7)
    for case in cases:
        label = case[0] if case[1] is None else case[1]
        print(f"| {label:,} | {' | '.join(cells(case, times, sizes))} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nPeak memory of the process: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
