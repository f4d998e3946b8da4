"""What a token costs when many came before it: from the state of linear attention, and by softmax.

8 sequences, 8 heads, d = 64, m = 130, float32: one jitted step after 10 to 10,000 tokens, and exact
attention of one query to a cache of as many keys, with the writing of its own, kept as the products
read it, ``[batch, heads, length, dim]``. All alternate in one
process; ratios are taken round by round. States are donated, as in a decoding loop.

Run: python -m benchmarks.decoding
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from experiments import timing
from simrf_jax import decoding

BATCH, HEADS, DIM, NUM_FEATURES = 8, 8, 64, 130
LENGTHS = (10, 100, 1000, 10_000)
ROUNDS, STEPS = 20, 10  # Steps in one call, so that it takes milliseconds.


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), (BATCH, *shape, HEADS, DIM))


@functools.partial(jax.jit, donate_argnums=0)
def linear_step(state, query, key, value, projection):
    return decoding.step(state, query, key, value, projection)


@functools.partial(jax.jit, donate_argnums=0)
def softmax_step(cache, query, key, value):
    """Writes to the last place of a full cache and attends to all of it."""
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
    """Some steps, each of which replaces what is remembered."""

    def call(_):
        nonlocal memory
        for _ in range(STEPS):
            out, memory = step(memory, *inputs)
        return out

    return call


def mib(memory):
    return sum(x.nbytes for x in jax.tree.leaves(memory)) / 2**20


def candidates():
    """What to time, and the MiB that it remembers."""
    w = simrf_jax.draw_projection(jax.random.key(0), NUM_FEATURES, DIM)
    token = [normal(seed, 1) for seed in (1, 2, 3)]
    append = jax.jit(decoding.append)
    calls, sizes = {}, {}
    for length in LENGTHS:
        cache = normal(4, length), normal(5, length)
        empty = decoding.init_state(w, batch=(BATCH,), num_key_heads=HEADS, value_dim=DIM)
        state = append(empty, *cache, w)
        sizes["linear", length], sizes["softmax", length] = mib(state), mib(cache)
        calls["linear", length] = repeated(linear_step, state, *token, w)
        by_head = tuple(jnp.swapaxes(x, 1, 2) for x in cache)
        calls["softmax", length] = repeated(softmax_step, by_head, *token)
    return calls, sizes


def ratio(ms, base):
    low, median, high = np.percentile(ms / base, [25, 50, 75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main():
    calls, sizes = candidates()
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
