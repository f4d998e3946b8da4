r"""Error of attention. It differs from that of the kernel: factors common to all keys cancel.

To first order in the relative errors :math:`\hat f_j - 1` of the kernel estimates between a query
and its keys j, with the attention weights p, the values V and the exact output o,

.. math::
    \hat o - o \approx \sum_j p_j (\hat f_j - 1) (V_j - o), \qquad
    E |\hat o - o|^2 \approx \sum_{j, l} p_j p_l\, (V_j - o) \cdot (V_l - o)\,
    E (\hat f_j - 1)(\hat f_l - 1),

and ``theory.harmonics`` computes the last factor in closed form. For calibrated features there is a
closed form for iid rows. In the coordinates of the map, with :math:`\tilde v = \tilde x + \tilde y`
and the variances :math:`\Sigma_l` of the rows, one row estimates the kernel, relative to its value,
by

.. math::
    f(w) = \prod_l \sqrt{\Sigma_l}\,
    e^{(1 - \Sigma_l) w_l^2 / 2 + \sqrt{\Sigma_l}\, w_l \tilde v_l - \tilde v_l^2 / 2}, \qquad
    w \sim N(0, I),

where w is the row before the tilt. Estimates of two pairs by one row have

.. math::
    E f f' = \prod_l \frac{1 + \rho_l}{2 \sqrt{\rho_l}}\,
    e^{(1 + \rho_l) (\tilde v_l + \tilde v'_l)^2 / 4 - (\tilde v_l^2 + \tilde v_l'^2) / 2}, \qquad
    \rho_l = \frac{1}{2 \Sigma_l - 1}.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax._src import checks
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.projections import FIXED_NORMS, BlockMode, Norms
from simrf_jax._src.selection.inputs import QueryPoint, Variances, attention_inputs
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import ClosedFormCoupling
from simrf_jax._src.theory.harmonics import RowCovariances, gegenbauer, is_parallel
from simrf_jax._src.theory.pairs import NormRelation, Pairs, Rows, coupled_rows
from simrf_jax._src.theory.quadrature import Vector

AttentionFeatures: TypeAlias = Literal["positive", "hyperbolic"]
ATTENTION_FEATURES = get_args(AttentionFeatures)
# Largest error that the first-order expansion predicts; see ``attention_error``.
FIRST_ORDER_LIMIT = 0.3
# Largest |x + y|^2 of a prediction, whose time and memory grow with its square.
LARGEST_SQUARED_DISTANCE = 1000.0


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
    of the kernel estimates. The expansion holds where these are small. For vectors :math:`x = q
    \sqrt{\text{scale}}` and y in 64 dimensions, with 128 features, it is within 3 % of trials at
    :math:`|x| = |y| = 0.5` in random directions, 5 to 20 % too high at 1, and three times too high
    at 1.5. If a few axes are long, it is too high earlier, and more so with more tokens. With
    standard deviations of 1/i along 32 axes and 64 keys, it is too high by 8 to 15 % for 4 queries
    of root-mean-square length 0.5, and three times too high at 0.75. For longer vectors, the law of
    the estimates has heavy tails: a few rare draws make up the variance, the output is bounded as
    an average of values, and the prediction is far above the error of most draws. A prediction
    above ``FIRST_ORDER_LIMIT``, 0.3, only says that the error is large; ``choose_num_features``
    measures the error of calibrated features instead. The prediction is far too low where each
    query attends to nearly one key and the estimate of that kernel has a large error: the expansion
    weighs all other keys by their exact weights. It is infinite for a head in which some :math:`|x
    + y|^2` is above 1,000, unless the rows are iid.

    A factor that all keys of a query share cancels, because :math:`\sum_j p_j (V_j - o) = 0`. This
    is why ``norms="shared"``, which raises the error of the kernel, lowers that of attention.

    Time grows like the number of queries times the square of the number of keys. For antithetic and
    shared norms it is ten times that for chi norms.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``. N is a multiple of K.
      value: Values ``[..., S, K, V]``.
      num_features: Number of rows m of the projection. Hyperbolic features have 2m entries.
      coupling: Coupling of the rows; see ``kernel_mse``.
      features: Feature map: ``"positive"``, ``"hyperbolic"``, or a ``Calibrated`` that was fitted
        with the same scale. If its tilt differs between axes, there is a closed form only for iid
        rows with chi norms.
      norms: Law of the row norms; see ``kernel_mse``.
      parameter: Parameter A of optimal positive features, one number; see ``kernel_mse``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      scale: Scale of the logits, at least 0. The default is :math:`1 / \sqrt H`.
      is_causal: If true, query t sees the keys 0 to t.

    Returns:
      float64 array ``[..., N]``; 0 for a head whose values are all zeros.

    Raises:
      TypeError: If ``num_features`` is not an integer, or an array is not real.
      ValueError: If a name is unknown, arguments do not fit each other, a shape does not match, a
        number is out of range or not finite, or there is no closed form.

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
    is_causal = checks.boolean("is_causal", is_causal)
    rows = coupled_rows(num_features, inputs.dim, coupling, block, norms)
    parameters = np.full(inputs.num_heads, arguments.one_parameter(parameter, norms))
    if isinstance(features, Calibrated):
        inputs = inputs.in_coordinates_of(features)
        variances = inputs.of_each_head(features.variances)
        _check_tilt(variances, coupling, norms, parameter)
        parameters = (1 - variances) / 4
        if not np.any(np.ptp(variances, axis=-1)):
            parameters = parameters[:, 0]
    else:
        checks.one_of("features", features, ATTENTION_FEATURES)
        rows = rows.with_antipodes() if features == "hyperbolic" else rows
    errors = []
    for head in inputs.heads:
        points = inputs.queries(head, is_causal=is_causal)
        terms = error_terms(points, parameters[head[-1]], norms, rows.kinds)
        errors.append(terms.errors(rows)[0])
    return np.reshape(errors, (*np.shape(query)[:-3], inputs.num_heads))


def _check_tilt(
    variances: Variances, coupling: ClosedFormCoupling, norms: Norms, parameter: float
) -> None:
    """Raises ``ValueError`` unless there is a closed form for the rows of a calibrated map."""
    if parameter != 0:
        raise ValueError(
            f"parameter is for maps without their own tilt, got {parameter} and a Calibrated."
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
    """Sums over queries that determine the relative squared error for any coupled pairs of rows.

    Attributes:
      parallel: Sums for the rows w and w, and for w and -w, by their cosine. Empty for fixed norms.
      spectra: Sums for each degree of the harmonics, by the relation of norms.
      squared_bias: Squared error of the mean estimate.
    """

    parallel: dict[float, Float64[np.ndarray, " 2"]]
    spectra: dict[NormRelation, Float64[np.ndarray, "degrees 2"]]
    squared_bias: Float64[np.ndarray, " 2"]

    def errors(self, rows: Rows) -> Float64[np.ndarray, " 2"]:
        """Returns two expected relative squared errors.

        The first is that of the outputs, divided by their squared norm. The second is that of the
        normalizers, summed over the queries. Infinity stands for numbers that are not known.
        """
        total = np.zeros(2)
        for pair in rows.kinds:
            if is_parallel(pair, rows.norms):
                total = total + pair.weight * self.parallel[pair.cosine]
            else:
                spectrum = self.spectra[pair.norms]
                polynomials = gegenbauer(np.array(pair.cosine), rows.dim, len(spectrum) - 1)
                total = total + pair.weight * (polynomials @ spectrum)
        errors = rows.weight**2 / rows.num_rows * total + self.squared_bias
        return np.where(np.isnan(errors), np.inf, np.maximum(errors, 0))  # Not -1e-17.


def error_terms(
    points: Iterable[QueryPoint], parameter: float | Vector, norms: Norms, kinds: Sequence[Pairs]
) -> ErrorTerms:
    """Returns the terms that the given kinds of pairs need, infinite if some vectors are too long.

    Args:
      points: Queries of one or several heads, whose errors are added up.
      parameter: Parameter A of the features, one number or one for each axis.
      norms: Law of the row norms.
      kinds: Kinds of pairs, regardless of weights and angles.
    """
    parallel = {pair.cosine: np.zeros(2) for pair in kinds if is_parallel(pair, norms)}
    # From degree 0 to 1 at least.
    spectra = {pair.norms: np.zeros((2, 2)) for pair in kinds if not is_parallel(pair, norms)}
    squared_bias = np.zeros(2)
    for point in points:
        with np.errstate(over="ignore"):
            longest = np.max(np.sum(point.sums**2, axis=-1))
        if longest > (LARGEST_SQUARED_DISTANCE if spectra else np.finfo(float).max):
            squared_bias = np.full(2, np.inf)
            break
        moments, weights = RowCovariances(point.sums, parameter, norms), point.weights
        for cosine in parallel:
            with np.errstate(over="ignore", invalid="ignore"):  # Covariances may be infinite.
                parts = np.where(weights == 0, 0, weights * moments.of_parallel_rows(cosine))
                parallel[cosine] += np.sum(parts, axis=(1, 2))
        for relation, total in spectra.items():
            spectrum = np.tensordot(moments.of_degrees(relation), weights, axes=([1, 2], [1, 2]))
            both = itertools.zip_longest(total, spectrum, fillvalue=np.zeros(2))
            spectra[relation] = np.sum([*both], axis=1)
        squared_bias += np.sum(weights * moments.bias_product, axis=(1, 2))
    return ErrorTerms(parallel, spectra, squared_bias)
