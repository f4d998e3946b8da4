"""Time to draw all projections of a ViT-B/16: 12 layers x 12 heads, 130 x 64 each.

The couplings and rotations alternate in one process. For comparison, the last row is the time of
the rotations alone, two of 64 x 64 for each head, by JAX's LAPACK-based sampler.

Run: python -m benchmarks.draw
"""

import functools

import jax
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing

HEADS, NUM_FEATURES, DIM, ROUNDS = 144, 130, 64, 30
DRAWS = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex_plus": {"coupling": "simplex_plus"},
    "simplex, Hadamard rotation": {"coupling": "simplex", "rotation": "hadamard"},
    "simplex, Givens rotation": {"coupling": "simplex", "rotation": "givens"},
}


def main():
    command_line.parser(__doc__).parse_args()

    def sampler(options):
        draw = functools.partial(
            simrf_jax.draw_projection, num_features=NUM_FEATURES, dim=DIM, **options
        )
        draw_all = jax.jit(lambda key: jax.vmap(draw)(jax.random.split(key, HEADS)))
        return lambda round_: draw_all(jax.random.key(round_))

    candidates = {name: sampler(options) for name, options in DRAWS.items()}
    rotations = jax.jit(lambda key: jax.random.orthogonal(key, DIM, (2 * HEADS,)))
    candidates["the rotations alone, by `jax.random.orthogonal`"] = lambda round_: rotations(
        jax.random.key(round_)
    )
    times = timing.alternate(candidates, ROUNDS)
    timing.print_table(times)
    ratio = times["simplex"] / times["orthogonal"]
    print(f"simplex / orthogonal, round by round: median {np.median(ratio):.2f}")


if __name__ == "__main__":
    main()
