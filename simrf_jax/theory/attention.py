r"""Error of attention, which is not that of its kernel: what all keys of a query share cancels.

To first order in the relative errors :math:`\hat f_j - 1` of the kernel estimates between a query
and its keys j, with the attention weights p, the values V and the exact output o,

.. math::
    \hat o - o \approx \sum_j p_j (\hat f_j - 1) (V_j - o), \qquad
    E |\hat o - o|^2 \approx \sum_{j, l} p_j p_l\, (V_j - o) \cdot (V_l - o)\,
    E (\hat f_j - 1)(\hat f_l - 1),

and ``theory.harmonics`` has the last factor in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.projections import Norms
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.fixed_norms import num_weighted_rows
from simrf_jax.theory.harmonics import SAME_ROW, RowCovariances, gegenbauer, is_parallel
from simrf_jax.theory.pairs import NormRelation, Pairs, coupled_pairs, with_antipodes

AttentionFeatures: TypeAlias = Literal["positive", "hyperbolic"]
ATTENTION_FEATURES = get_args(AttentionFeatures)


def attention_error(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    num_features: int,
    *,
    coupling: ClosedFormCoupling,
    features: AttentionFeatures = "positive",
    norms: Norms = "chi",
    parameter: float = 0.0,
    block: BlockMode = "regular",
    scale: float | None = None,
    is_causal: bool = False,
) -> Float64[np.ndarray, "*batch heads"]:
    r"""Returns the expected relative squared error of the output of random-feature attention.

    .. math::
        \frac{E \sum_t |\hat o_t - o_t|^2}{\sum_t |o_t|^2}

    for each head, by the delta method: the error is expanded to first order in the relative errors
    of the kernel estimates. The expansion holds where these are small. For vectors
    :math:`x = q \sqrt{\text{scale}}` and y in 64 dimensions, with 128 features, it is within 3 % of
    trials at :math:`|x| = |y| = 0.5`, 5 to 20 % too high at 1, and three times at 1.5. There
    the law of the estimates has heavy tails: a few rare draws make up the variance, the output is
    bounded as an average of values, and the prediction is far above what most draws show. A
    prediction above about 0.3 only says that the error is large.

    A factor that all keys of a query share cancels, because :math:`\sum_j p_j (V_j - o) = 0`. This
    is why ``norms="shared"``, which raises the error of the kernel, lowers that of attention.

    The time grows like the number of queries times the square of the number of keys. For
    antithetic and shared norms it is ten times that for chi norms.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``. N is a multiple of K.
      value: Values ``[..., S, K, V]``.
      num_features: Number of rows m of the projection. Hyperbolic features have 2m entries.
      coupling: Coupling of the rows; see ``kernel_mse``.
      features: Feature map: ``"positive"`` or ``"hyperbolic"``.
      norms: Law of the row norms; see ``kernel_mse``.
      parameter: Parameter A of optimal positive features, one number; see ``kernel_mse``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      scale: Scale of the logits, at least 0. The default is :math:`1 / \sqrt H`.
      is_causal: If true, query t sees the keys 0 to t.

    Returns:
      float64 array of the leading shape and N.

    Raises:
      TypeError: If ``num_features`` is not an integer, or an array is not real.
      ValueError: If a name is unknown, arguments do not fit each other, a shape does not match, or
        a number is out of range.

    Example:
      >>> import numpy as np
      >>> query, key, value = np.random.default_rng(0).normal(size=(3, 16, 1, 8))
      >>> for coupling in ("iid", "orthogonal", "simplex", "cross_polytope"):
      ...     error = attention_error(query / 4, key / 4, value, 16, coupling=coupling)
      ...     print(coupling, error.round(4))
      iid [0.083]
      orthogonal [0.0696]
      simplex [0.0194]
      cross_polytope [0.0152]

    References:
      Reid et al., Variance-Reducing Couplings for Random Features (ICLR 2025), found that couplings
      that raise the kernel's variance may lower the error of attention,
      https://arxiv.org/abs/2405.16541
    """
    inputs = attention_inputs(query, key, value, scale)
    num_features = checks.positive_int("num_features", num_features)
    is_causal = checks.boolean("is_causal", is_causal)
    arguments.coupling("coupling", coupling, inputs.dim)
    checks.one_of("features", features, ATTENTION_FEATURES)
    arguments.norm_law(norms, coupling)
    checks.one_of("block", block, BLOCK_MODES)
    number = arguments.one_parameter(parameter, norms)
    num_rows = num_weighted_rows(num_features, norms)
    pairs = coupled_pairs(num_rows, inputs.dim, coupling, block, norms)
    if features == "hyperbolic":
        num_rows, pairs = 2 * num_rows, with_antipodes(pairs)
    result = np.empty(inputs.heads_shape)
    for head in np.ndindex(result.shape):
        points = inputs.queries(head, is_causal=is_causal)
        result[head] = error_terms(points, number, norms, pairs).relative_error(num_rows, pairs)
    return result


class QueryPoint(NamedTuple):
    """One query of one head with the keys that it sees.

    Attributes:
      sums: Sums x + y of the query and each key, ``[n, dim]``.
      weights: Factors of the covariances in the squared error, ``[n, n]``.
      squared_output: Squared norm of the exact output.
    """

    sums: Float64[np.ndarray, "n dim"]
    weights: Float64[np.ndarray, "n n"]
    squared_output: float


class AttentionInputs(NamedTuple):
    """Checked queries, keys and values of attention, in float64.

    Attributes:
      x: Queries times the root of the scale, ``[..., N, T, H]``.
      y: Keys times the root of the scale, ``[..., N, S, H]``.
      value: Values ``[..., N, S, V]``, or None for uncorrelated values of variance 1.
    """

    x: Float64[np.ndarray, "*heads queries dim"]
    y: Float64[np.ndarray, "*heads keys dim"]
    value: Float64[np.ndarray, "*heads keys value_dim"] | None

    @property
    def dim(self) -> int:
        """Dimension H of queries and keys."""
        return self.x.shape[-1]

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """Leading shape and number of heads."""
        return self.x.shape[:-2]

    def queries(self, head: tuple[int, ...], *, is_causal: bool = False) -> Iterator[QueryPoint]:
        """Yields the queries of one head.

        Args:
          head: Index into ``heads_shape``.
          is_causal: If true, query t sees the keys 0 to t.
        """
        for t, x in enumerate(self.x[head]):
            visible = slice(t + 1 if is_causal else None)
            y = self.y[head][visible]
            value = None if self.value is None else self.value[head][visible]
            yield QueryPoint(x + y, *_squared_error_weights(special.softmax(y @ x), value))


def _squared_error_weights(
    p: Float64[np.ndarray, " n"], value: Float64[np.ndarray, "n value_dim"] | None
) -> tuple[Float64[np.ndarray, "n n"], float]:
    """Returns p_j p_l (V_j - o) . (V_l - o) and the squared norm of o."""
    if value is not None:
        output = p @ value
        deviations = p[:, None] * (value - output)
        return deviations @ deviations.T, float(output @ output)
    squares = p @ p
    products = np.diag(np.ones(p.size)) - p[:, None] - p + squares
    return np.outer(p, p) * products, float(squares)


class ErrorTerms(NamedTuple):
    """Sums over queries that determine the squared error for any coupled pairs of rows.

    Attributes:
      dim: Dimension of queries and keys.
      norms: Law of the norms.
      weight: Total weight of the rows other than a row of zeros.
      parallel: Sums for the rows w and w, and for w and -w, by their cosine. Empty for fixed norms.
      spectra: Sums for each degree of the harmonics, by the relation of norms.
      squared_bias: Squared error of the mean estimate.
      squared_output: Squared norms of the exact outputs.
    """

    dim: int
    norms: Norms
    weight: float
    parallel: dict[float, float]
    spectra: dict[NormRelation, Float64[np.ndarray, " degrees"]]
    squared_bias: float
    squared_output: float

    def relative_error(self, num_rows: int, pairs: tuple[Pairs, ...]) -> float:
        """Returns the expected squared error divided by the squared norm of the outputs.

        Args:
          num_rows: Number of rows, without a row of zeros.
          pairs: Coupled pairs of these rows.
        """
        total = self._of(SAME_ROW) + sum(pair.weight * self._of(pair) for pair in pairs)
        return (self.weight**2 / num_rows * total + self.squared_bias) / self.squared_output

    def _of(self, pair: Pairs) -> float:
        if is_parallel(pair, self.norms):
            return self.parallel[pair.cosine]
        spectrum = self.spectra[pair.norms]
        return float(gegenbauer(np.array(pair.cosine), self.dim, len(spectrum) - 1) @ spectrum)


def error_terms(
    points: Iterable[QueryPoint],
    parameter: float,
    norms: Norms,
    pairs: tuple[Pairs, ...],
) -> ErrorTerms:
    """Returns the terms that the given kinds of pairs need.

    Args:
      points: Queries of one head, at least one.
      parameter: Parameter A of the features.
      norms: Law of the row norms.
      pairs: Kinds of pairs, whatever their weights and angles.
    """
    kinds = (SAME_ROW, *pairs)
    relations = {pair.norms for pair in kinds if not is_parallel(pair, norms)}
    parallel = {pair.cosine: 0.0 for pair in kinds if is_parallel(pair, norms)}
    spectra = {relation: np.zeros(1) for relation in relations}
    squared_bias = squared_output = 0.0
    for point in points:
        moments = RowCovariances(point.sums, parameter, norms)
        for cosine in parallel:
            parallel[cosine] += np.sum(point.weights * moments.of_parallel_rows(cosine))
        for relation in relations:
            harmonics = moments.of_degrees(relation)
            spectrum = np.tensordot(harmonics, point.weights, axes=2)
            spectra[relation] = _padded_sum(spectra[relation], spectrum)
        squared_bias += np.sum(point.weights * moments.bias_product)
        squared_output += point.squared_output
    weight, dim = moments.weight, moments.dim
    return ErrorTerms(dim, norms, weight, parallel, spectra, squared_bias, squared_output)


def mean_terms(heads: Sequence[ErrorTerms]) -> ErrorTerms:
    """Returns the terms whose relative error is the mean of those of heads.

    Args:
      heads: Terms of each head, for the same kinds of pairs.
    """
    shares = [1 / (len(heads) * head.squared_output) for head in heads]
    first = heads[0]
    parallel = dict.fromkeys(first.parallel, 0.0)
    spectra = dict.fromkeys(first.spectra, np.zeros(1))
    for share, head in zip(shares, heads, strict=True):
        for cosine in parallel:
            parallel[cosine] += share * head.parallel[cosine]
        for relation in spectra:
            spectra[relation] = _padded_sum(spectra[relation], share * head.spectra[relation])
    squared_bias = sum(s * head.squared_bias for s, head in zip(shares, heads, strict=True))
    return first._replace(
        parallel=parallel, spectra=spectra, squared_bias=squared_bias, squared_output=1.0
    )


def _padded_sum(
    x: Float64[np.ndarray, " n"], y: Float64[np.ndarray, " m"]
) -> Float64[np.ndarray, " max"]:
    size = max(x.size, y.size)
    return np.pad(x, (0, size - x.size)) + np.pad(y, (0, size - y.size))


def attention_inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike | None, scale: float | None
) -> AttentionInputs:
    """Returns checked arrays of attention, with the heads before the lengths.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``.
      value: Values ``[..., S, K, V]`` or None.
      scale: Scale of the logits, or None for the default.
    """
    query, key = arguments.real("query", query), arguments.real("key", key)
    for name, array in {"query": query, "key": key}.items():
        if array.ndim < 3 or 0 in array.shape:
            raise ValueError(f"{name} must be [..., length, heads, dim], got shape {array.shape}.")
    dim = query.shape[-1]
    if dim < 2 or key.shape[-1] != dim or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            "query and key must have one leading shape and one dim of at least 2, "
            f"got {query.shape} and {key.shape}."
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "query must have a multiple of the heads of key, "
            f"got {query.shape[-2]} and {key.shape[-2]}."
        )
    if scale is None:
        scale = dim**-0.5
    checks.scalar("scale", scale, sign="at least 0")
    groups = query.shape[-2] // key.shape[-2]
    x = np.swapaxes(query, -2, -3) * scale**0.5
    y = _with_heads_first(key, groups) * scale**0.5
    if value is None:
        return AttentionInputs(x, y, None)
    array = arguments.real("value", value)
    if array.ndim < 3 or array.shape[:-1] != key.shape[:-1] or not array.shape[-1]:
        raise ValueError(
            f"value must be [..., S, K, V] with key of shape {key.shape}, got {array.shape}."
        )
    return AttentionInputs(x, y, _with_heads_first(array, groups))


def _with_heads_first(
    array: Float64[np.ndarray, "*batch length heads dim"], groups: int
) -> Float64[np.ndarray, "*batch repeated_heads length dim"]:
    return np.repeat(np.swapaxes(array, -2, -3), groups, axis=-3)
