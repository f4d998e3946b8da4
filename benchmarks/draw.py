"""What it costs to draw the projections of a whole ViT-B/16: 12 layers x 12 heads, 130 x 64.

Alternates the couplings in one process. Beside them, the rotations alone by the library's
LAPACK-based sampler, two of 64 x 64 for each head.

Run: python -m benchmarks.draw
"""

import time

import jax
import numpy as np

import simrf_jax

HEADS, NUM_FEATURES, DIM, ROUNDS = 144, 130, 64, 30


def main():
    def sampler(coupling):
        def draw(key):
            return simrf_jax.draw_projection(key, NUM_FEATURES, DIM, coupling=coupling)

        return jax.jit(lambda key: jax.vmap(draw)(jax.random.split(key, HEADS)))

    samplers = {coupling: sampler(coupling) for coupling in ("iid", "orthogonal", "simplex")}
    samplers["jax.random.orthogonal"] = jax.jit(
        lambda key: jax.random.orthogonal(key, DIM, (2 * HEADS,))
    )
    times = {name: [] for name in samplers}
    for round_ in range(ROUNDS + 1):
        for name, draw in samplers.items():
            start = time.perf_counter()
            draw(jax.random.key(round_)).block_until_ready()
            if round_:  # The first compiles.
                times[name].append(1e3 * (time.perf_counter() - start))
    print("| | median ms | quartiles |\n| --- | --- | --- |")
    for name, ms in times.items():
        low, median, high = np.percentile(ms, [25, 50, 75])
        print(f"| {name} | {median:.1f} | {low:.1f} to {high:.1f} |")
    ratio = np.array(times["simplex"]) / np.array(times["orthogonal"])
    print(f"simplex / orthogonal, run by run: median {np.median(ratio):.2f}")


if __name__ == "__main__":
    main()
