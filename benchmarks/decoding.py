"""Time and memory of one decoding step after 10 to 10,000 tokens, linear and softmax attention.

The setting is 8 sequences of 8 heads, or those of ``--sequences`` and ``--heads``, d = 64, m = 130
and float32. Linear attention takes one jitted step from its state. Softmax attention attends from
one query to a cache of as many keys as there were tokens before, after writing its own key and
value to the cache. The cache has the layout that the matrix products read, ``[batch, heads, length,
dim]``. All cases alternate in one process, and ratios are taken round by round. States and caches
are donated, as in a decoding loop.

Run: python -m benchmarks.decoding [--sequences 2 --heads 4]
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing
from simrf_jax import RandomFeatureMechanism

DIM, NUM_FEATURES = 64, 130
LENGTHS = (10, 100, 200, 500, 1000, 10_000)
ROUNDS, STEPS = 20, 10  # Ten steps make one call, so that a call takes milliseconds.


@functools.partial(jax.jit, donate_argnums=0)
def linear_step(state, query, key, value, projection):
    return RandomFeatureMechanism(projection).step(state, query, key, value)


@functools.partial(jax.jit, donate_argnums=0)
def softmax_step(cache, query, key, value):
    """Writes to the last position of a full cache and attends to all of it."""
    last = cache[0].shape[2] - 1
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new, last, 2)
        for old, new in zip(cache, (key, value), strict=True)
    )
    weights = jax.nn.softmax(DIM**-0.5 * jnp.einsum("bhtd,bhsd->bhts", query, keys))
    out = jnp.einsum("bhts,bhsd->bhtd", weights, values)
    return jnp.swapaxes(out, 1, 2), (keys, values)


def repeated(step, memory, *inputs):
    """Returns a call that takes ``STEPS`` steps, each of which replaces the state or cache."""

    def call(_):
        nonlocal memory
        for _ in range(STEPS):
            out, memory = step(memory, *inputs)
        return out

    return call


def mib(memory):
    return sum(x.nbytes for x in jax.tree.leaves(memory)) / 2**20


def candidates(sequences, heads, lengths=LENGTHS):
    """Returns the calls to time and the MiB of their states or caches, by (kind, tokens before)."""

    def normal(seed, length):
        return jax.random.normal(jax.random.key(seed), (sequences, length, heads, DIM))

    w = simrf_jax.draw_projection(jax.random.key(0), NUM_FEATURES, DIM)
    token = [normal(seed, 1) for seed in (1, 2, 3)]
    mechanism = RandomFeatureMechanism(w)
    append = jax.jit(RandomFeatureMechanism.append)
    calls, sizes = {}, {}
    for length in lengths:
        cache = normal(4, length), normal(5, length)
        empty = mechanism.init(batch=(sequences,), num_key_heads=heads, head_dim=DIM, value_dim=DIM)
        state = append(mechanism, empty, *cache)
        sizes["linear", length], sizes["softmax", length] = mib(state), mib(cache)
        calls["linear", length] = repeated(linear_step, state, *token, w)
        by_head = tuple(jnp.swapaxes(x, 1, 2) for x in cache)
        calls["softmax", length] = repeated(softmax_step, by_head, *token)
    return calls, sizes


def ratio(ms, base):
    low, median, high = np.percentile(ms / base, [25, 50, 75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    if min(options.sequences, options.heads) < 1:
        parser.error(
            "--sequences and --heads must be at least 1, got "
            f"{options.sequences} and {options.heads}."
        )
    calls, sizes = candidates(options.sequences, options.heads)
    times = timing.alternate(calls, ROUNDS)
    print("| tokens before | linear us | / after 10 | MiB | softmax us | / linear | MiB |")
    print("| --- |" + " --- |" * 6)
    first = times["linear", LENGTHS[0]]
    for length in LENGTHS:
        linear, softmax = times["linear", length], times["softmax", length]
        print(
            f"| {length:,} | {1e3 * np.median(linear) / STEPS:.0f} | {ratio(linear, first)} "
            f"| {sizes['linear', length]:.1f} | {1e3 * np.median(softmax) / STEPS:.0f} "
            f"| {ratio(softmax, linear)} | {sizes['softmax', length]:.1f} |"
        )


if __name__ == "__main__":
    main()
