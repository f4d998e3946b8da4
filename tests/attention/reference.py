"""Random-feature attention written out: float64, every pair of tokens, no algebra."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import formulas


def attention(
    query,
    key,
    value,
    projection,
    *,
    scale=None,
    log_weights=None,
    visible=None,
    formula=formulas.positive,
):
    """The estimator for ``[T, N, H]``, ``[S, K, H]``, ``[S, K, D]``.

    Log weights are ``[N, S]``; ``visible`` is ``[T, S]``.
    """
    query, key, value, projection = (
        None if x is None else np.asarray(x, np.float64) for x in (query, key, value, projection)
    )
    num_heads, num_key_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    scale = dim**-0.5 if scale is None else scale
    root = np.sqrt(abs(scale))
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for n in range(num_heads):
        k = n // (num_heads // num_key_heads)
        w = projection if projection is None or projection.ndim == 2 else projection[k]
        of_queries, of_keys = _of_sides(formula, k)
        log_q, sign_q = of_queries(query[:, n] * np.sign(scale) * root, w, "softmax")
        log_k, sign_k = of_keys(key[:, k] * root, w, "softmax")
        if log_weights is not None:
            log_k = log_k + log_weights[n][:, None]
        for t in range(len(log_q)):
            log_a = log_q[t] + log_k  # [S, m]
            if visible is not None:
                log_a = np.where(visible[t][:, None], log_a, -np.inf)
            if not len(log_a) or log_a.max() == -np.inf:
                continue
            weights = (sign_q[t] * sign_k * np.exp(log_a - log_a.max())).sum(axis=-1)
            out[t, n] = weights / weights.sum() @ value[:, k]
    return out


def _of_sides(formula, head):
    """Returns the formulas of queries and of keys of one key head."""
    of_one = formulas.of_head(formula, head)
    return formulas.of_side(of_one, "query"), formulas.of_side(of_one, "key")


def kernel_attention(kernel, value):
    """Attention by a matrix of kernel estimates ``[T, S]``, which may be negative."""
    return kernel @ value / kernel.sum(axis=-1, keepdims=True)


def naive(query, key, value, projection, dim):
    """The estimator for one head in whatever type it is given, for autodiff in float64."""
    query, key = query * dim**-0.25, key * dim**-0.25
    log_q = query @ projection.T
    log_k = key @ projection.T - jnp.sum(key**2, axis=-1, keepdims=True) / 2
    logits = jax.nn.logsumexp(log_q[:, None, :] + log_k[None, :, :], axis=-1)
    return jax.nn.softmax(logits, axis=-1) @ value


def relative_error(actual, expected):
    """Relative Frobenius error."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def banded(
    query, key, value, bandwidth, *, is_causal=False, scale=None, log_weights=None, segment_ids=None
):
    """Exact attention to the keys nearby, for ``[T, N, H]``, ``[S, K, H]``, ``[S, K, D]``."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for t, n in np.ndindex(query.shape[:2]):
        nearby = [s for s in range(len(key)) if abs(t - s) <= bandwidth]
        if is_causal:
            nearby = [s for s in nearby if s <= t]
        if segment_ids is not None:
            nearby = [s for s in nearby if segment_ids[s] == segment_ids[t]]
        if log_weights is not None:
            nearby = [s for s in nearby if log_weights[n, s] > -np.inf]
        if not nearby:
            continue
        logits = scale * key[nearby, n // groups] @ query[t, n]
        if log_weights is not None:
            logits += log_weights[n, nearby]
        weights = np.exp(logits - logits.max())
        out[t, n] = weights / weights.sum() @ value[nearby, n // groups]
    return out


def beside_band(
    query,
    key,
    value,
    projection,
    bandwidth,
    *,
    scale=None,
    log_weights=None,
    visible=None,
    formula=formulas.positive,
):
    """Attention with exact weights up to a bandwidth and estimates beyond, under one normaliser.

    Shapes are those of ``attention``.
    """
    query, key, value, projection = (
        np.asarray(x, np.float64) for x in (query, key, value, projection)
    )
    groups, dim = query.shape[1] // key.shape[1], query.shape[2]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for t, n in np.ndindex(query.shape[:2]):
        w = projection if projection.ndim == 2 else projection[n // groups]
        x = query[t, n] * np.sign(scale) * np.sqrt(abs(scale))
        of_queries, of_keys = _of_sides(formula, n // groups)
        (log_q,), (sign_q,) = of_queries(x[None], w, "softmax")
        logs, signs, values = [], [], []
        for s in range(len(key)):
            if visible is not None and not visible[t, s]:
                continue
            y = key[s, n // groups]
            if abs(t - s) <= bandwidth:
                log, sign = np.array([scale * query[t, n] @ y]), np.ones(1)
            else:
                (log_k,), (sign_k,) = of_keys(y[None] * np.sqrt(abs(scale)), w, "softmax")
                log, sign = log_q + log_k, sign_q * sign_k
            logs.append(log + (0 if log_weights is None else log_weights[n, s]))
            signs.append(sign)
            values.append(value[s, n // groups])
        most = max((log.max() for log in logs), default=-np.inf)
        if most == -np.inf:
            continue
        weights = [sign @ np.exp(log - most) for log, sign in zip(logs, signs, strict=True)]
        out[t, n] = weights @ np.array(values) / np.sum(weights)
    return out
