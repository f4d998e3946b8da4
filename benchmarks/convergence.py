"""Convergence of random-feature attention to softmax attention in the number of features.

The error is the relative Frobenius error of one head on 256 tokens. Queries and keys are normal
with standard deviation s, and values are standard normal. Each trial has its own inputs and its own
PRNG key, which all couplings share. The program prints the errors, the slope of log error against
log m, and paired comparisons, all with standard errors over the trials. It draws
benchmarks/figures/convergence.png.

Run: python -m benchmarks.convergence
"""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import style
from simrf_jax import theory

LENGTH, TRIALS = 256, 64
SETTINGS = ((64, 0.25), (16, 0.5), (64, 0.5))  # (d, s).
NUM_FEATURES = (16, 64, 256, 1024, 4096)
# The slope is fitted from here on, where row blocks are whole and the bias of the ratio is small.
FIRST = 256
COUPLINGS = ("iid", "orthogonal", "simplex", "simplex_plus")
FIGURE = pathlib.Path(__file__).parent / "figures" / "convergence.png"


@functools.partial(jax.jit, static_argnames=("dim", "num_features", "coupling"))
def relative_errors(keys, *, dim, scale, num_features, coupling):
    """Returns one relative error for each PRNG key.

    From the same key, all couplings have the same inputs and the same row norms.
    """

    def trial(key):
        data_key, draw_key = jax.random.split(key)
        q, k, v = jax.random.normal(data_key, (3, LENGTH, 1, dim))
        q, k = scale * q, scale * k
        w = simrf_jax.draw_projection(draw_key, num_features, dim, coupling=coupling)
        exact = jax.nn.dot_product_attention(q, k, v)
        error = simrf_jax.random_feature_attention(q, k, v, w) - exact
        return jnp.linalg.norm(error) / jnp.linalg.norm(exact)

    return jax.lax.map(trial, keys)


def mean_and_error(samples):
    return np.mean(samples), np.std(samples, ddof=1) / len(samples) ** 0.5


def slopes(errors, num_features):
    """Returns the slope of log error against log m, ``[trials]``, of errors ``[sizes, trials]``."""
    return np.polyfit(np.log(num_features), np.log(errors), 1)[0]


def predicted_ratio(coupling, dim, scale):
    """Returns the root mean squared error of one kernel estimate relative to iid rows.

    It is that of vectors with the typical |x + y| of queries and keys of this scale.
    """
    distance = scale * (2 * dim**0.5) ** 0.5  # |x + y|, x = q / dim^(1/4), y = k / dim^(1/4).
    return theory.mse_ratio(distance, NUM_FEATURES[-1], dim, coupling=coupling) ** 0.5


def measure(dim, scale):
    """Returns ``{coupling: errors [sizes, trials]}``."""
    keys = jax.random.split(jax.random.key(0), TRIALS)
    run = functools.partial(relative_errors, keys, dim=dim, scale=scale)
    runs = command_line.bar(
        [*itertools.product(COUPLINGS, NUM_FEATURES)], f"d = {dim}, s = {scale}"
    )
    errors = {(c, m): np.asarray(run(num_features=m, coupling=c)) for c, m in runs}
    return {c: np.array([errors[c, m] for m in NUM_FEATURES]) for c in COUPLINGS}


def print_setting(dim, scale, errors):
    print(f"\nd = {dim}, s = {scale}\n\n| m | {' | '.join(COUPLINGS)} |")
    print("| --- |" + " --- |" * len(COUPLINGS))
    for row, m in enumerate(NUM_FEATURES):
        cells = ["{:.3g} ({:.1g})".format(*mean_and_error(errors[name][row])) for name in COUPLINGS]
        print(f"| {m:,} | {' | '.join(cells)} |")
    asymptotic = NUM_FEATURES.index(FIRST)
    cells = [
        "{:.3f} ({:.3f})".format(
            *mean_and_error(slopes(errors[name][asymptotic:], NUM_FEATURES[asymptotic:]))
        )
        for name in COUPLINGS
    ]
    print(f"| slope from {FIRST} on | {' | '.join(cells)} |")
    pairs = list(itertools.pairwise(COUPLINGS))
    print(f"\n| m | {' | '.join(f'{b} / {a}' for a, b in pairs)} |\n" + "| --- " * 4 + "|")
    for row, m in enumerate(NUM_FEATURES):
        cells = []
        for a, b in pairs:
            mean, error = mean_and_error(np.log(errors[b][row] / errors[a][row]))
            cells.append(f"{np.exp(mean):.3f} (z = {mean / error:+.1f})")
        print(f"| {m:,} | {' | '.join(cells)} |")
    kernel = [predicted_ratio(name, dim, scale) for name in COUPLINGS[:3]]
    ratios = [f"{b / a:.3f}" for a, b in itertools.pairwise(kernel)]
    print(f"| one kernel estimate, theory | {' | '.join(ratios)} | - |", flush=True)


def draw_figure(results):
    """Draws errors above, and below their ratios to those of iid rows, with standard errors."""
    figure, rows = style.subplots(
        3.4 * len(results), 5, 2, len(results), sharex=True, sharey="row", height_ratios=[3, 2]
    )
    for (above, below), ((dim, scale), errors) in zip(rows.T, results.items(), strict=True):
        for name in COUPLINGS:
            mean, error = np.transpose([mean_and_error(row) for row in errors[name]])
            look = style.STYLES[name]
            above.plot(NUM_FEATURES, mean, label=style.LABELS[name], **look)
            style.band(above, NUM_FEATURES, mean - error, mean + error, color=look["color"])
            logs = np.log(errors[name] / errors["iid"])
            mean, error = np.transpose([mean_and_error(row) for row in logs])
            below.plot(NUM_FEATURES, np.exp(mean), **look)
            low, high = np.exp(mean - error), np.exp(mean + error)
            style.band(below, NUM_FEATURES, low, high, color=look["color"])
        guide = errors["iid"][-1].mean() * (NUM_FEATURES[-1] / np.array(NUM_FEATURES)) ** 0.5
        above.plot(NUM_FEATURES, 1.6 * guide, color="0.6", linewidth=1)
        above.annotate("$m^{-1/2}$", (NUM_FEATURES[2], 1.8 * guide[2]), color="0.4")
        above.set(title=f"d = {dim}, s = {scale}", xscale="log", yscale="log")
        below.set(xlabel="number of features m", ylim=(0.4, 1.1))
        style.ticks(below, NUM_FEATURES, [f"{m:,}" for m in NUM_FEATURES])
        style.tidy(above)
        style.tidy(below)
    rows[0, 0].set_ylabel("relative error")
    rows[1, 0].set_ylabel("divided by that of IIDRFs")
    rows[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(FIGURE, dpi=160)


def main():
    command_line.parser(__doc__).parse_args()
    results = {}
    for dim, scale in SETTINGS:
        results[dim, scale] = measure(dim, scale)
        print_setting(dim, scale, results[dim, scale])
    draw_figure(results)


if __name__ == "__main__":
    main()
