"""The picture of virtual tokens: attention to all keys, and to one token for each feature.

Run: python -m benchmarks.virtual_tokens [FIGURE.png]
"""

import pathlib

import jax
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import style

FIGURE = pathlib.Path(__file__).parent / "figures" / "virtual_tokens.png"
NUM_KEYS, REACH, SIDE = 60, 2.6, 81


def tokens():
    """Returns keys in three clusters, ``[1, S, 1, 2]``, and their values, ``[1, S, 1, 1]``."""
    rng = np.random.default_rng(3)
    centers = 1.1 * np.array([[np.cos(angle), np.sin(angle)] for angle in (0.4, 2.4, 4.6)])
    which = np.arange(NUM_KEYS) % 3
    key = centers[which] + 0.3 * rng.normal(size=(NUM_KEYS, 2))
    value = np.array([1.0, 0.0, -1.0])[which] + 0.1 * rng.normal(size=NUM_KEYS)
    return tuple(x.astype(np.float32).reshape(1, NUM_KEYS, 1, -1) for x in (key, value))


def answers(query, key, value, bias):
    """Returns what softmax attention gives queries ``[T, 2]``, for logits q . k + bias."""
    logits = query @ key[0, :, 0].T + bias
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ value[0, :, 0, 0] / weights.sum(axis=-1)


def virtual(key, value, num_features):
    """Returns the virtual tokens of some features: keys, values and biases."""
    w = simrf_jax.draw_projection(jax.random.key(num_features), num_features, 2)
    mechanism = simrf_jax.RandomFeatureMechanism(w)
    empty = mechanism.init(batch=(1,), num_key_heads=1, head_dim=2, value_dim=1)
    state = mechanism.append(empty, key, value, scale=1.0)
    found = mechanism.virtual_tokens(state, scale=1.0)
    return np.asarray(found.key), np.asarray(found.value), np.asarray(found.bias)[0, 0, 0]


def draw():
    """Draws the answer to each query of the plane, and the tokens that give it."""
    key, value = tokens()
    panels = {f"{NUM_KEYS} keys": (key, value, np.zeros(NUM_KEYS))}
    for m in (9, 60):
        panels[f"{m} virtual tokens"] = virtual(key, value, m)
    places = np.linspace(-REACH, REACH, SIDE, dtype=np.float32)
    plane = np.stack(np.meshgrid(places, places), axis=-1).reshape(-1, 2)
    figure, row = style.subplots(10, 3.4, 1, 3, sharex=True, sharey=True)
    for axes, (title, (keys, values, bias)) in zip(row, panels.items(), strict=True):
        answer = answers(plane, keys, values, bias).reshape(SIDE, SIDE)
        look = {"cmap": "RdBu_r", "vmin": -1.2, "vmax": 1.2}
        edges = (-REACH, REACH, -REACH, REACH)
        shown = axes.imshow(answer, origin="lower", extent=edges, alpha=0.6, **look)
        sizes = 30 * len(bias) * np.exp(bias) / np.exp(bias).sum()
        axes.scatter(
            *keys[0, :, 0].T, s=sizes, c=values[0, :, 0, 0], edgecolors="black", lw=0.6, **look
        )
        axes.set(title=title, xlim=(-REACH, REACH), ylim=(-REACH, REACH), xlabel="$q_1$, $k_1$")
    row[0].set(ylabel="$q_2$, $k_2$")
    figure.colorbar(shown, ax=row, label="value of a token, answer to a query")
    return figure


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("figure", type=pathlib.Path, nargs="?", default=FIGURE)
    draw().savefig(parser.parse_args().figure, dpi=160)


if __name__ == "__main__":
    main()
