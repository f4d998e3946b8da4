"""Cost of exact keys, relative to as many features.

The setting is 2 sequences of 4 heads, d = 64, and 128 features, or 112 features and 16 exact keys:
those with the largest estimated mass, in causal attention those with the largest scores, or the
first 16. The program prints the time over that of 128 features, round by round with quartiles, for
the forward pass and for the forward and backward pass (the gradient with respect to queries, keys
and values), with and without an exact band of 16. The second table is for causal attention.

Run: python -m benchmarks.exact_keys
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing

BATCH, HEADS, DIM, NUM_FEATURES, NUM_KEYS = 2, 4, 64, 128, 16
BANDWIDTH = 16
LENGTHS = (1024, 4096)
ROUNDS = 20
GIVEN = {"given": np.arange(NUM_KEYS)}
# By whether attention is causal.
KEYS = {
    False: {"estimated": NUM_KEYS, **GIVEN},
    True: {"by score": simrf_jax.ExactKeys(NUM_KEYS, by="score"), **GIVEN},
}


def attentions(bandwidth, is_causal):
    """Returns functions of queries, keys and values, by name."""
    few, many = (
        simrf_jax.draw_projection(jax.random.key(1), m, DIM)
        for m in (NUM_FEATURES - NUM_KEYS, NUM_FEATURES)
    )

    def attend(*tokens, projection, exact_keys=None):
        return simrf_jax.random_feature_attention(
            *tokens,
            projection,
            exact_bandwidth=bandwidth,
            exact_keys=exact_keys,
            is_causal=is_causal,
        )

    return {"features": functools.partial(attend, projection=many)} | {
        name: functools.partial(attend, projection=few, exact_keys=keys)
        for name, keys in KEYS[is_causal].items()
    }


def gradient(attend):
    def loss(*tokens):
        return jnp.sum(jnp.square(attend(*tokens)))

    return jax.grad(loss, argnums=(0, 1, 2))


def cells(programs, tokens, rounds):
    """Returns the time of each kind of keys over that of features, with quartiles."""

    def call(program):
        return lambda _: program(*tokens)

    times = timing.alternate({name: call(program) for name, program in programs.items()}, rounds)
    for name in list(programs)[1:]:
        low, median, high = np.percentile(times[name] / times["features"], [25, 50, 75])
        yield f"{median:.2f} ({low:.2f} to {high:.2f})"


def main():
    command_line.parser(__doc__).parse_args()
    for is_causal in KEYS:
        measure(is_causal)


def measure(is_causal):
    """Prints the table of bidirectional or of causal attention."""
    kinds = KEYS[is_causal]
    names = [f"{keys}, {which}" for which in ("forward", "with backward") for keys in kinds]
    print(f"| | {' | '.join(names)} |\n" + "| --- " * (len(names) + 1) + "|")
    settings = [(length, bandwidth) for length in LENGTHS for bandwidth in (None, BANDWIDTH)]
    for length, bandwidth in command_line.bar(settings, "settings"):
        tokens = jax.random.normal(jax.random.key(0), (3, BATCH, length, HEADS, DIM))
        functions, row = attentions(bandwidth, is_causal), []
        for change in (lambda attend: attend, gradient):
            programs = {name: jax.jit(change(attend)) for name, attend in functions.items()}
            row += cells(programs, tokens, ROUNDS)
        beside = "" if bandwidth is None else ", beside a band"
        command_line.show(f"| T = {length:,}{beside} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
