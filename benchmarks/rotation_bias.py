"""Bias of kernel estimates with rotations that are not exactly Haar: Hadamard and Givens.

The tables show the relative bias of estimates by positive features, with its standard error, for
|x + y| = v along an axis and m = d. The average over norms is exact, so only directions are drawn.
All axes are equivalent, so each draw counts for all of them.

Run: python -m benchmarks.rotation_bias
"""

import functools

import jax
import numpy as np
import scipy.integrate
import scipy.stats

import simrf_jax
from benchmarks import command_line

DIMS = {4: 800_000, 8: 400_000, 16: 200_000, 64: 40_000}  # {d: number of draws}.
DISTANCES = (0.5, 1.0, 2.0, 3.0)
CASES = [
    ("hadamard", "orthogonal"),
    ("hadamard", "simplex"),
    ("givens", "orthogonal"),
    ("givens", "simplex"),
]
BATCH = 1_000


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def cosines_with_axes(key, dim, coupling, rotation):
    """Returns the cosines between the rows and the axes, ``[BATCH, dim * dim]``."""

    def draw(key):
        w = simrf_jax.draw_projection(
            key, dim, dim, coupling=coupling, rotation=rotation, norms="sqrt_dim", block="square"
        )
        return w.ravel() / dim**0.5

    return jax.vmap(draw)(jax.random.split(key, BATCH))


def mean_over_norms(v, dim):
    """Returns cosines c, and E[e^{a v c}] over chi_d norms a, by quadrature.

    The expectation is divided by its mean over uniform directions, e^{v^2 / 2}.
    """
    norms = np.linspace(0, dim**0.5 + v + 12, 2_001)
    density = scipy.stats.chi.pdf(norms, dim)
    cosines = np.linspace(-1, 1, 4_001)
    mean = scipy.integrate.simpson(np.exp(v * np.outer(cosines, norms)) * density, x=norms)
    return cosines, mean / np.exp(v**2 / 2)


def main():
    command_line.parser(__doc__).parse_args()
    print(f"| d | rotation | coupling | {' | '.join(f'v = {v}' for v in DISTANCES)} |")
    print("| --- | --- | --- |" + " --- |" * len(DISTANCES))
    for dim, num_draws in DIMS.items():
        tables = [mean_over_norms(v, dim) for v in DISTANCES]
        for rotation, coupling in CASES:
            samples = []
            batches = range(num_draws // BATCH)
            for batch in command_line.bar(batches, f"d = {dim}, {rotation}, {coupling}"):
                key = jax.random.fold_in(jax.random.key(dim), batch)
                cosines = np.asarray(cosines_with_axes(key, dim, coupling, rotation), np.float64)
                samples.append([np.interp(cosines, *table).mean(axis=1) - 1 for table in tables])
            samples = np.concatenate(samples, axis=1)
            errors = samples.std(axis=1) / samples.shape[1] ** 0.5
            cells = [
                f"{b:.1e} ({e:.0e})" for b, e in zip(samples.mean(axis=1), errors, strict=True)
            ]
            print(f"| {dim} | {rotation} | {coupling} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
