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

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features.maps import Calibrated
from simrf_jax.projections import FIXED_NORMS, Norms
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.selection.inputs import AttentionInputs, QueryPoint, attention_inputs
from simrf_jax.selection.trials import error_of_iid_rows, head_variances, in_coordinates_of
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.fixed_norms import num_weighted_rows
from simrf_jax.theory.harmonics import SAME_ROW, RowCovariances, gegenbauer, is_parallel
from simrf_jax.theory.pairs import NormRelation, Pairs, coupled_pairs, with_antipodes

AttentionFeatures: TypeAlias = Literal["positive", "hyperbolic"]
ATTENTION_FEATURES = get_args(AttentionFeatures)
# Largest error that the first order predicts; see ``attention_error``.
FIRST_ORDER_LIMIT = 0.3


def attention_error(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    num_features: int,
    *,
    coupling: ClosedFormCoupling,
    features: AttentionFeatures | Calibrated = "positive",
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
    trials at :math:`|x| = |y| = 0.5` in random directions, 5 to 20 % too high at 1, and three times
    at 1.5. If a few axes are long, it is too high earlier: by 8 to 15 % at a root-mean-square
    length of 0.5 for standard deviations of 1/i along 32 axes, and three times at 0.75. Beyond,
    the law of the estimates has heavy tails: a few rare draws make up the variance, the output is
    bounded as an average of values, and the prediction is far above what most draws show. A
    prediction above ``FIRST_ORDER_LIMIT``, 0.3, only says that the error is large;
    ``choose_num_features`` measures the error of calibrated features instead.

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
      features: Feature map: ``"positive"``, ``"hyperbolic"``, or a ``Calibrated`` that was fitted
        with the same scale. If its tilt differs between axes, there is a closed form for iid rows
        with chi norms only.
      norms: Law of the row norms; see ``kernel_mse``.
      parameter: Parameter A of optimal positive features, one number; see ``kernel_mse``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      scale: Scale of the logits, at least 0. The default is :math:`1 / \sqrt H`.
      is_causal: If true, query t sees the keys 0 to t.

    Returns:
      float64 array of the leading shape and N.

    Raises:
      TypeError: If ``num_features`` is not an integer, or an array is not real.
      ValueError: If a name is unknown, arguments do not fit each other, a shape does not match, a
        number is out of range, or there is no closed form.

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
    arguments.norm_law(norms, coupling)
    checks.one_of("block", block, BLOCK_MODES)
    parameters = np.full(inputs.heads_shape[-1], arguments.one_parameter(parameter, norms))
    if isinstance(features, Calibrated):
        inputs = in_coordinates_of(inputs, features)
        variances = head_variances(features, inputs.heads_shape[-1])
        _check_tilt(variances, coupling, norms, parameter)
        if np.any(np.ptp(variances, axis=-1)):
            return _errors(
                inputs,
                lambda head, points: error_of_iid_rows(points, variances[head[-1]], num_features),
                is_causal=is_causal,
            )
        parameters = (1 - variances[:, 0]) / 4
    else:
        checks.one_of("features", features, ATTENTION_FEATURES)
    num_rows = num_weighted_rows(num_features, norms)
    pairs = coupled_pairs(num_rows, inputs.dim, coupling, block, norms)
    if isinstance(features, str) and features == "hyperbolic":
        num_rows, pairs = 2 * num_rows, with_antipodes(pairs)

    def first_order(head: tuple[int, ...], points: Iterable[QueryPoint]) -> float:
        terms = error_terms(points, parameters[head[-1]], norms, pairs)
        return terms.relative_error(num_rows, pairs)

    return _errors(inputs, first_order, is_causal=is_causal)


def _errors(
    inputs: AttentionInputs,
    error_of: Callable[[tuple[int, ...], Iterable[QueryPoint]], float],
    *,
    is_causal: bool,
) -> Float64[np.ndarray, "*batch heads"]:
    """Returns the error of each head, given its queries."""
    result = np.empty(inputs.heads_shape)
    for head in np.ndindex(result.shape):
        result[head] = error_of(head, inputs.queries(head, is_causal=is_causal))
    return result


def _check_tilt(
    variances: Float64[np.ndarray, "num_heads dim"],
    coupling: ClosedFormCoupling,
    norms: Norms,
    parameter: float,
) -> None:
    """Raises ``ValueError`` unless there is a closed form for the rows of a calibrated map."""
    if parameter != 0:
        raise ValueError(
            f"parameter is for maps without a tilt of their own, got {parameter} and a Calibrated."
        )
    if np.any(variances != 1) and norms in FIXED_NORMS:
        raise ValueError(
            f"A calibrated map with a tilt needs norms that are chi variables, got norms={norms!r}."
        )
    if np.any(np.ptp(variances, axis=-1)) and (coupling, norms) != ("iid", "chi"):
        raise ValueError(
            "A tilt that differs between axes has a closed form for coupling='iid' and "
            f"norms='chi' only, got {coupling!r} and {norms!r}. Couplings make little difference "
            "where a tilt does."
        )


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
        moments, weights = RowCovariances(point.sums, parameter, norms), point.weights
        for cosine in parallel:
            parallel[cosine] += np.sum(weights * moments.of_parallel_rows(cosine))
        for relation in relations:
            harmonics = moments.of_degrees(relation)
            spectrum = np.tensordot(harmonics, weights, axes=2)
            spectra[relation] = _padded_sum(spectra[relation], spectrum)
        squared_bias += np.sum(weights * moments.bias_product)
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
