"""Random-feature attention written out: float64, every pair of tokens, no algebra."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import formulas


def attention(query, key, value, projection, **options):
    """The estimator for ``[T, N, H]``, ``[S, K, H]``, ``[S, K, D]``; options as in beside_band."""
    return beside_band(query, key, value, projection, -1, **options)


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


class Gaussian(NamedTuple):
    """Means and covariances of the scaled queries and keys of each key head."""

    query_mean: np.ndarray
    query_covariance: np.ndarray
    key_mean: np.ndarray
    key_covariance: np.ndarray

    @classmethod
    def standard(cls, heads, dim):
        zeros, eyes = np.zeros((heads, dim)), np.stack([np.eye(dim)] * heads)
        return cls(zeros, eyes, zeros, eyes)

    def scores(self, key, head):
        """Returns the log mean weights of keys ``[S, H]``, less a number, by completing a square.

        The mean over queries x of exp(x . y - x . key_mean - x^T key_covariance x / 2).
        """
        inverse = np.linalg.inv(self.query_covariance[head])
        precision = inverse + self.key_covariance[head]
        linear = inverse @ self.query_mean[head] + key - self.key_mean[head]
        return np.einsum("sh,hj,sj->s", linear, np.linalg.inv(precision), linear) / 2


def best_keys(key, count, *, visible, delay=0, log_weights=None, gaussian=None):
    """Returns ``[K, T, S]``, True at the ``count`` best of the visible keys up to t - ``delay``.

    Log weights are ``[N, S]``, the same for the query heads of a key head.
    """
    heads, dim = key.shape[1:]
    gaussian = Gaussian.standard(heads, dim) if gaussian is None else gaussian
    best = np.zeros((heads, *visible.shape), bool)
    for k, t in np.ndindex(best.shape[:2]):
        score = gaussian.scores(np.asarray(key[:, k], np.float64) * dim**-0.25, k)
        if log_weights is not None:
            score = score + log_weights[k * len(log_weights) // heads]
        seen = visible[t] & (np.arange(len(key)) <= t - delay) & (score > -np.inf)
        order = np.argsort(np.where(seen, -score, np.inf), kind="stable")[:count]
        best[k, t, order] = seen[order]
    return best


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
    exact_keys=(),
    formula=formulas.positive,
):
    """Attention with exact weights up to a bandwidth and estimates beyond, under one normalizer.

    Shapes are those of ``attention``; log weights are ``[N, S]``, and ``visible`` is ``[T, S]``.
    Keys at the positions ``exact_keys``, ``[g]`` or ``[K, g]``, have exact weights for all queries,
    or ``exact_keys`` is ``[K, T, S]``, True at pairs with exact weights.
    """
    query, key, value, projection = (
        None if x is None else np.asarray(x, np.float64) for x in (query, key, value, projection)
    )
    groups, dim = query.shape[1] // key.shape[1], query.shape[2]
    scale = dim**-0.5 if scale is None else scale
    root = np.sqrt(abs(scale))
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    is_in_band = np.abs(np.arange(len(query))[:, None] - np.arange(len(key))) <= bandwidth
    is_visible = np.ones_like(is_in_band) if visible is None else visible
    for n in range(query.shape[1]):
        k = n // groups
        w = projection if projection is None or projection.ndim == 2 else projection[k]
        of_queries, of_keys = _of_sides(formula, k)
        log_q, sign_q = of_queries(query[:, n] * np.sign(scale) * root, w, "softmax")
        log_k, sign_k = of_keys(key[:, k] * root, w, "softmax")
        logits = scale * query[:, n] @ key[:, k].T
        of_head = exact_keys[k] if np.ndim(exact_keys) > 1 else exact_keys
        is_exact = of_head if np.ndim(of_head) == 2 else np.isin(np.arange(len(key)), of_head)
        is_near = is_in_band | is_exact
        for begin in range(0, len(query), 16):  # All queries together would fill the memory.
            t = slice(begin, begin + 16)
            # One more feature, 1 in size, has the exact weights of the keys nearby: [t, S, m + 1].
            log = np.where(is_near[t][..., None], -np.inf, log_q[t, None] + log_k)
            exact = np.where(is_near[t], logits[t], -np.inf)
            log = np.concatenate([log, exact[..., None]], axis=-1)
            if log_weights is not None:
                log = log + log_weights[n][:, None]
            log = np.where(is_visible[t][..., None], log, -np.inf)
            most = log.max(axis=(1, 2), initial=-np.inf, keepdims=True)
            sizes = np.exp(log - np.where(most > -np.inf, most, 0))
            weights = (sign_q[t, None] * sign_k * sizes[..., :-1]).sum(axis=-1) + sizes[..., -1]
            for row, weight in enumerate(weights, begin):
                if most[row - begin] > -np.inf:
                    out[row, n] = weight / weight.sum() @ value[:, k]
    return out
