"""Checks of ``benchmarks.first_contact``: each way to attend against float64, NaN and leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax

DIM, NUM_FEATURES, HEADS = 64, 128, 2
BANDWIDTH = 16
MODES = ("bidirectional", "causal", "packed", "exact band", "causal, exact band")
DTYPES = ("float32", "bfloat16")
# Relative errors against float64 that are right; float32 has room for products on other hardware.
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
GRADIENT_LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}
# Kernels compute a tile with a NaN in another way, which rounds in another way.
ROUNDING = {"float32": 3e-6, "bfloat16": 2e-2}


def segments(length):
    """Returns the ids of three packed segments of unlike lengths."""
    return np.searchsorted([length // 3, length // 2], np.arange(length), side="right")


def options_of(mode, length):
    """Returns the keywords of a mode."""
    options = {"is_causal": True} if "causal" in mode else {}
    if mode == "packed":
        options["segment_ids"] = segments(length)[None]
    return options | ({"exact_bandwidth": BANDWIDTH} if "band" in mode else {})


def visible(mode, length):
    """Returns which keys each query sees, ``[T, T]``."""
    seen = np.tri(length, dtype=bool) if "causal" in mode else np.ones((length, length), bool)
    ids = segments(length)
    return seen & (ids[:, None] == ids) if mode == "packed" else seen


def reference(query, key, value, w, *, mode):
    """Returns attention in float64, ``[T, N, D]``, by every pair of tokens."""
    query, key, value, w = (np.asarray(x, np.float64) for x in (query, key, value, w))
    length, heads, dim = query.shape
    near = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) <= BANDWIDTH
    out = np.empty_like(value)
    for head in range(heads):
        q, k = query[:, head] * dim**-0.25, key[:, head] * dim**-0.25
        of_query, of_key = (
            np.exp(x @ w.T - np.sum(x * x, axis=-1, keepdims=True) / 2) for x in (q, k)
        )
        weights = of_query @ of_key.T / len(w)
        if "band" in mode:
            weights = np.where(near, np.exp(q @ k.T), weights)
        weights = np.where(visible(mode, length), weights, 0)
        out[:, head] = weights @ value[:, head] / weights.sum(axis=-1, keepdims=True)
    return out


@functools.cache
def tokens(length, dtype):
    """Returns queries, keys and values ``[1, T, N, H]``, and W."""
    arrays = jax.random.normal(jax.random.key(0), (3, 1, length, HEADS, DIM))
    w = simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM)
    return *(x.astype(dtype) for x in arrays), w


@functools.cache
def program(mode, length, implementation):
    """Returns a function of queries, keys, values, W and the gradient of the output.

    It returns the output and the gradients of queries, keys and values.
    """
    attend = functools.partial(
        simrf_jax.random_feature_attention,
        implementation=implementation,
        **options_of(mode, length),
    )

    @jax.jit
    def with_gradients(query, key, value, w, cotangent):
        out, pull_back = jax.vjp(lambda *x: attend(*x, w), query, key, value)
        return out, pull_back(cotangent)

    return with_gradients


def check(mode, implementation, dtype, length):
    """Returns errors of one way to attend, and what was found wrong, as a row."""
    *arrays, w = tokens(length, dtype)
    cotangent = np.sin(np.arange(arrays[2].size)).reshape(arrays[2].shape).astype(dtype)
    run = program(mode, length, implementation)
    out, gradients = jax.device_get(run(*arrays, w, cotangent))
    exact = functools.partial(reference, w=w, mode=mode)
    wide = [np.asarray(x[0], np.float64) for x in arrays]
    error = distance(out[0], exact(*wide))
    gradient_error = max(
        slope_error(exact, wide, place, gradient[0], cotangent[0])
        for place, gradient in enumerate(gradients)
    )
    faults = []
    if not error <= LIMITS[dtype]:
        faults.append("the output differs from float64")
    if not gradient_error <= GRADIENT_LIMITS[dtype]:
        faults.append("a gradient differs from float64")
    *others, value = arrays
    faults += leaks(
        lambda value, cotangent: run(*others, value, w, cotangent),
        value,
        cotangent,
        visible(mode, length),
    )
    return {"error": error, "gradient_error": gradient_error, "faults": faults}


def slope_error(exact, arrays, place, gradient, cotangent, step=1e-6):
    """Returns the error of a gradient along a random direction, relative to its norm.

    Args:
      exact: Function of queries, keys and values, in float64.
      arrays: Queries, keys and values ``[T, N, H]``.
      place: Number of the array that the gradient is of.
      gradient: The gradient.
      cotangent: The gradient of the output.
      step: Half the distance of the two points of the difference.
    """
    direction = np.random.default_rng(place).normal(size=gradient.shape)
    ahead, behind = (
        exact(*arrays[:place], arrays[place] + move * direction, *arrays[place + 1 :])
        for move in (step, -step)
    )
    slope = np.sum(cotangent.astype(np.float64) * (ahead - behind)) / (2 * step)
    gradient = gradient.astype(np.float64)
    return float(abs(np.sum(gradient * direction) - slope) / np.linalg.norm(gradient))


def leaks(run, value, cotangent, seen):
    """Returns sentences about a NaN that reaches more or less than the queries that see it.

    Args:
      run: Function of the values and the gradient of the output; returns outputs and gradients.
      value: Values ``[1, T, N, D]``.
      cotangent: Gradient of the output.
      seen: ``[T, T]``, True where a query sees a key.
    """
    place = len(seen) // 2 + 1
    sees = seen[:, place]
    cotangent = np.where(sees[None, :, None, None], 0, cotangent).astype(cotangent.dtype)
    clean, clean_gradients = jax.device_get(run(value, cotangent))
    out, gradients = jax.device_get(run(value.at[:, place].set(jnp.nan), cotangent))
    most = ROUNDING[value.dtype.name]

    def same(actual, expected):
        apart = np.abs(actual.astype(np.float32) - expected.astype(np.float32))
        return bool(np.all(apart <= most * max(1.0, np.abs(expected).max(initial=0))))

    found = []
    if not np.isnan(out[0, sees].astype(np.float32)).all():
        found.append("a NaN does not reach a query that sees it")
    if not same(out[0, ~sees], clean[0, ~sees]):
        found.append("a NaN reaches an output that does not see it")
    if not all(map(same, gradients, clean_gradients)):
        found.append("a NaN reaches a gradient of outputs that do not see it")
    return found


def distance(actual, expected):
    """Returns the relative Frobenius error."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
