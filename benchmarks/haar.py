"""Five ways to draw a Haar rotation, timed on a CPU and compiled for a TPU.

They are Householder reflections one by one (the library's choice up to 64 dimensions, and up to 32
on a TPU) and in blocks (beyond them), LAPACK's QR, Cholesky-QR and the polar factor. They alternate
on the CPU, for the rotations of a ViT-B/16 (288 of 64 x 64) and for other sizes. With --tpu the
program compiles each for a TPU v5e instead (pip install libtpu) and prints static cycles.

Run: python -m benchmarks.haar [--tpu]
"""

from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import command_line
from experiments.harness import timing
from simrf_jax._src.projections import rotations

SIZES = [(16, 288), (64, 288), (128, 64), (512, 8), (2048, 1)]  # (dim, number of rotations).
POLAR_STEPS = 30
HIGHEST = jax.lax.Precision.HIGHEST


def in_blocks_beyond(dim):
    """Sets the number of reflections up to which they are applied one by one on all platforms."""
    return mock.patch.multiple(rotations, LARGEST_ONE_BY_ONE=dim, LARGEST_ONE_BY_ONE_ON_TPU=dim)


def one_by_one(key, dim):
    with in_blocks_beyond(dim):
        return rotations.haar_rotation(key, jnp.eye(dim), dim)


def in_blocks(key, dim):
    with in_blocks_beyond(0):
        return rotations.haar_rotation(key, jnp.eye(dim), dim)


def lapack_qr(key, dim):
    return jax.random.orthogonal(key, dim)


def cholesky_qr_twice(key, dim):
    x = jax.random.normal(key, (dim, dim))
    for _ in range(2):  # The second pass repairs the orthogonality that the first one loses.
        factor = jnp.linalg.cholesky(jnp.matmul(x, x.mT, precision=HIGHEST))
        x = jax.lax.linalg.triangular_solve(factor, x, left_side=True, lower=True)
    return x


def polar(key, dim):
    """Returns the polar factor, by Newton-Schulz steps, which are matrix products only."""
    x = jax.random.normal(key, (dim, dim)) / (2 * dim**0.5 + 1)

    def step(_, x):
        gram = jnp.matmul(x, x.mT, precision=HIGHEST)
        return 1.5 * x - 0.5 * jnp.matmul(gram, x, precision=HIGHEST)

    return jax.lax.fori_loop(0, POLAR_STEPS, step, x)


METHODS = [one_by_one, in_blocks, lapack_qr, cholesky_qr_twice, polar]


def defect(q):
    return float(jnp.abs(jnp.matmul(q, q.mT, precision=HIGHEST) - jnp.eye(q.shape[-1])).max())


def on_cpu(dim, count):
    def sampler(method):
        draw = jax.jit(jax.vmap(lambda key: method(key, dim)))
        return lambda round_: draw(jax.random.split(jax.random.key(round_), count))

    samplers = {method.__name__: sampler(method) for method in METHODS}
    timing.print_table(timing.alternate(samplers, rounds=10))
    for name, draw in samplers.items():
        print(f"{name}: largest entry of Q Q^T - I {defect(draw(0)):.0e}")


def on_tpu(dim, count):
    from benchmarks import tpu

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    print("| | static cycles, thousands | custom calls, not counted |\n| --- | --- | --- |")
    for method in command_line.bar(METHODS, "compiled"):
        compiled = tpu.compile_for(jax.vmap(lambda key, f=method: f(key, dim)), keys)
        cycles, custom_calls = tpu.static_cycles(compiled)
        listed = ", ".join(custom_calls)
        command_line.show(f"| {method.__name__} | {cycles / 1e3:,.0f} | {listed} |")


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--tpu", action="store_true", help="count cycles of a TPU v5e")
    measure = on_tpu if parser.parse_args().tpu else on_cpu
    jax.config.update("jax_platforms", "cpu")
    for dim, count in SIZES:
        print(f"\n{count} rotations in {dim} dimensions\n")
        measure(dim, count)


if __name__ == "__main__":
    main()
