"""The attention weights that random features imply, and their error."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex, TypeAlias, Unpack

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Float64

from simrf_jax._src.attention.estimator import Estimator, ExactKeysLike, compiled
from simrf_jax._src.attention.inputs.call import Call, Options
from simrf_jax._src.attention.inspection.all_pairs import log_kernels, normalized
from simrf_jax._src.attention.random_feature_attention import RandomFeatureMechanism
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.projections import ProjectionLike

Rows: TypeAlias = Float64[np.ndarray, "*batch N T 1"]


class AttentionReport(NamedTuple):
    """The error of random-feature attention; ``attention_report`` documents the fields."""

    relative_error: Float64[np.ndarray, "*batch N"]
    row_sum_mean: Float64[np.ndarray, "*batch N"]
    row_sum_error: Float64[np.ndarray, "*batch N"]
    effective_rank: Float64[np.ndarray, "*batch N"]
    softmax_effective_rank: Float64[np.ndarray, "*batch N"]
    output_error: Float64[np.ndarray, "*batch N"] | None = None


def attention_matrix(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    projection: ProjectionLike | None,
    *,
    feature_map: FeatureMapLike = "positive",
    exact_bandwidth: SupportsIndex | None = None,
    exact_keys: ExactKeysLike | None = None,
    **options: Unpack[Options],
) -> Float[Array, "*batch N T S"]:
    r"""Returns the attention weights that ``random_feature_attention`` implies and never forms.

    .. math:: \hat A_{ts} = \frac{\phi(q_t)^\top \phi(k_s)}{\sum_r \phi(q_t)^\top \phi(k_r)}

    Multiplied by the values, they are its output. They are exact at any scale of the inputs. Use
    this on short sequences: it takes time O(T S num_features) and memory O(S (T + num_features)).

    Args:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      projection: W, ``[num_features, H]`` or ``[K, num_features, H]``; None for a map that needs
        none.
      feature_map: A name, an object of ``simrf_jax.feature_maps``, or a function.
      exact_bandwidth: None, or a distance; keys that are no farther from a query have exact
        weights, as in ``random_feature_attention``.
      exact_keys: None, a number of keys or their positions; these keys have exact weights too, as
        in ``random_feature_attention``.
      **options: ``mask``, ``bias``, ``scale``, ``is_causal``, ``query_seq_lengths``,
        ``key_value_seq_lengths`` and ``segment_ids``, as in ``random_feature_attention``; rows
        beyond the lengths of queries are zeros.

    Returns:
      ``[..., N, T, S]`` in float32 at least. Rows sum to one, or are zeros where a query sees no
      key. Weights may be negative if features may.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not match, a name is unknown, the scale is not finite, the mask or
        the bias may differ between queries, or explicit mesh axes shard the length.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 2, 16))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 34, 16)
      >>> weights = simrf_jax.attention_matrix(q, k, w)
      >>> weights.shape
      (2, 10, 10)
      >>> out = jax.numpy.einsum("nts,snd->tnd", weights, v)
      >>> bool(abs(out - simrf_jax.random_feature_attention(q, k, v, w)).max() < 1e-5)
      True

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Sec. 2.2.
    """
    mechanism = RandomFeatureMechanism(
        projection, feature_map, exact_bandwidth=exact_bandwidth, exact_keys=exact_keys
    )
    call = Call.of(query, key, key, **options)
    return compiled(_weights, mechanism.feature_map)(mechanism, call)


def _weights(estimator: Estimator, call: Call) -> Float[Array, "*batch N T S"]:
    estimated, _, sign, _ = log_kernels(estimator, call, pair_by_pair=True)
    return normalized(estimated, sign)[0]


def attention_report(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    projection: ProjectionLike | None,
    *,
    value: Float[ArrayLike, "*batch S K D"] | None = None,
    feature_map: FeatureMapLike = "positive",
    exact_bandwidth: SupportsIndex | None = None,
    exact_keys: ExactKeysLike | None = None,
    **options: Unpack[Options],
) -> AttentionReport:
    r"""Compares the weights that random features imply with those of softmax attention.

    .. math::
        \hat Z_t = \sum_s \phi(q_t)^\top \phi(k_s), \quad \hat A_{ts} = \phi(q_t)^\top \phi(k_s) /
        \hat Z_t, \qquad Z_t = \sum_s e^{q_t \cdot k_s}, \quad A_{ts} = e^{q_t \cdot k_s} / Z_t

    with queries and keys scaled as by ``random_feature_attention`` and sums over the visible keys.
    The row sums should agree for feature maps of the softmax kernel; ReLU and ELU features
    estimate another kernel. Use it on short sequences: like ``attention_matrix``, it takes time and
    memory quadratic in the length.

    Args:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      projection: W, ``[num_features, H]`` or ``[K, num_features, H]``. With one W for each head,
        the heads can be different draws for the same queries and keys.
      value: ``[..., S, K, D]``, for the error of the output.
      feature_map: A name, an object or a function; see ``random_feature_attention``.
      exact_bandwidth: None, or a distance; keys that are no farther from a query have exact
        weights, as in ``random_feature_attention``.
      exact_keys: None, a number of keys or their positions; these keys have exact weights too, as
        in ``random_feature_attention``.
      **options: ``mask``, ``bias``, ``scale``, ``is_causal``, ``query_seq_lengths``,
        ``key_value_seq_lengths`` and ``segment_ids``, as in ``random_feature_attention``; queries
        beyond their lengths do not count.

    Returns:
      A named tuple of NumPy's arrays ``[..., N]`` in float64, with one number for each head.

      - ``relative_error``: Relative error of the weights, :math:`\|\hat A - A\|_F / \|A\|_F`.
      - ``row_sum_mean``: Mean of :math:`\hat Z_t / Z_t` over the queries that see a key. An
        unbiased estimate of the softmax kernel has 1 on average over projections; less is typical
        where the variance is large, and balanced by a rare projection with much more.
      - ``row_sum_error``: Worst :math:`|\hat Z_t / Z_t - 1|`.
      - ``effective_rank``: :math:`\exp(-\sum_i p_i \log p_i)` of :math:`\hat A`, with p the
        singular values divided by their sum (Roy and Vetterli, 2007). At most the number of
        features if attention is not causal.
      - ``softmax_effective_rank``: The same for A.
      - ``output_error``: Relative error of the outputs, :math:`\|\hat A V - A V\|_F / \|A V\|_F`;
        None without values.

      A head in which no query sees a key has no error.

    Raises:
      TypeError: If a dtype is wrong, or under ``jit`` or ``vmap``: NumPy computes the singular
        values.
      ValueError: If shapes do not match, a name is unknown, the scale is not finite, the mask or
        the bias may differ between queries, or explicit mesh axes shard the length.

    Example:
      >>> import jax, simrf_jax
      >>> q, k = 0.5 * jax.random.normal(jax.random.key(0), (2, 32, 4, 16))
      >>> for num_features in (17, 1700):
      ...     w = simrf_jax.draw_projection(jax.random.key(1), num_features, 16)
      ...     report = simrf_jax.attention_report(q, k, w)
      ...     print(report.relative_error.shape, report.relative_error.mean() < 0.1)
      (4,) False
      (4,) True

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Sec. 4.2; Roy and
      Vetterli, The Effective Rank: A Measure of Effective Dimensionality (EUSIPCO 2007).
    """
    mechanism = RandomFeatureMechanism(
        projection, feature_map, exact_bandwidth=exact_bandwidth, exact_keys=exact_keys
    )
    call = Call.of(query, key, key if value is None else value, **options)
    return report_of(mechanism, call, has_value=value is not None)


def report_of(
    estimator: Estimator,
    call: Call,
    *,
    has_value: bool = True,
    real: Bool[Array, "*#batch #N T"] | None = None,
) -> AttentionReport:
    """Returns the report of a call.

    Args:
      estimator: W, the feature map and the bandwidth.
      call: Queries, keys and values, with masks, lengths and segments.
      has_value: False leaves out the error of the output.
      real: False at queries to ignore; None to count all.
    """
    program = compiled(log_kernels, estimator.feature_map, "pair_by_pair")
    estimated, exact, sign, log_scale = program(estimator, call, pair_by_pair=True)
    if real is not None:
        estimated, exact = (jnp.where(real[..., None], x, -jnp.inf) for x in (estimated, exact))
    ours, theirs = (
        [np.asarray(x, np.float64) for x in normalized(*logs)]
        for logs in ((estimated, sign), (exact,))
    )
    implied, softmax = ours[0], theirs[0]
    ours[2] += np.asarray(log_scale, np.float64)
    row_sum_mean, row_sum_error = _compare_row_sums(*ours[1:], *theirs[1:])
    return AttentionReport(
        _relative_error(implied, softmax),
        row_sum_mean,
        row_sum_error,
        _effective_rank(implied),
        _effective_rank(softmax),
        _output_error(implied, softmax, call.value) if has_value else None,
    )


def _relative_error(
    actual: Float64[np.ndarray, "*batch rows columns"],
    expected: Float64[np.ndarray, "*batch rows columns"],
) -> Float64[np.ndarray, "*batch"]:
    """Returns the relative error in Frobenius norm; zero where both matrices are zeros."""
    error, norm = (np.linalg.norm(x, axis=(-2, -1)) for x in (actual - expected, expected))
    return error / np.where(norm == 0, 1, norm)


def _compare_row_sums(
    total: Rows, shift: Rows, exact_total: Rows, exact_shift: Rows
) -> tuple[Float64[np.ndarray, "*batch N"], Float64[np.ndarray, "*batch N"]]:
    """Returns the mean ratio of the row sums, and its worst deviation from one."""
    seen = exact_total != 0
    with np.errstate(over="ignore"):
        ratio = total / np.where(seen, exact_total, 1) * np.exp(shift - exact_shift)
    count = seen.sum(axis=(-2, -1))
    mean = np.where(seen, ratio, 0).sum(axis=(-2, -1)) / np.maximum(count, 1)
    worst = np.abs(np.where(seen, ratio - 1, 0)).max(axis=(-2, -1), initial=0)
    return np.where(count == 0, 1, mean), worst


def _effective_rank(
    matrix: Float64[np.ndarray, "*batch rows columns"],
) -> Float64[np.ndarray, "*batch"]:
    """Returns the exponential of the entropy of the normalized singular values; 0 for zeros."""
    finite = np.isfinite(matrix).all(axis=(-2, -1))
    # LAPACK raises on NaN.
    singular = np.linalg.svd(np.where(finite[..., None, None], matrix, 0), compute_uv=False)
    total = singular.sum(axis=-1, keepdims=True)
    p = singular / np.where(total == 0, 1, total)
    entropy = -np.sum(p * np.log(np.where(p == 0, 1, p)), axis=-1)
    rank = np.where(total[..., 0] == 0, 0, np.exp(entropy))
    return np.where(finite, rank, np.nan)


def _output_error(
    implied: Float64[np.ndarray, "*batch N T S"],
    softmax: Float64[np.ndarray, "*batch N T S"],
    value: Float[ArrayLike, "*batch S K D"],
) -> Float64[np.ndarray, "*batch N"]:
    value = np.swapaxes(np.asarray(value, np.float64), -3, -2)
    value = np.repeat(value, implied.shape[-3] // value.shape[-3], axis=-3)
    # Padding may hold anything, even NaN, and 0 * NaN is not 0.
    weighed = ((implied != 0) | (softmax != 0)).any(axis=-2)
    value = np.where(weighed[..., None], value, 0)
    return _relative_error(implied @ value, softmax @ value)
