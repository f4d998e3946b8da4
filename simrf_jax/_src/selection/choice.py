"""Number of features needed for an error: in closed form, and for given queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax._src import checks
from simrf_jax._src.calibration.api import calibrate as fit_calibration
from simrf_jax._src.selection.inputs import AttentionInputs, Variances, attention_inputs
from simrf_jax._src.selection.prediction import error_terms
from simrf_jax._src.selection.trials import errors_in_trials
from simrf_jax._src.theory.arguments import ClosedFormCoupling
from simrf_jax._src.theory.pairs import SAME_ROW, Pairs, coupled_rows
from simrf_jax._src.theory.positive import optimal_parameter

ChosenFeatures: TypeAlias = Literal["positive", "hyperbolic", "optimal_positive", "calibrated"]
_LEAST_DRAWS = 4  # Each trial draws a separate W for every head.
_LEAST_PROJECTIONS = 32  # If there are few heads, trials are added up to this number of W.
_INDEPENDENT, _ANTIPODAL = Pairs(1.0, 0.0, "independent"), Pairs(1.0, -1.0, "equal")
# The orthogonal rows of hyperbolic features, with their negatives, are a cross-polytope.
_CANDIDATES: tuple[tuple[ChosenFeatures, ClosedFormCoupling], ...] = (
    ("positive", "simplex"),
    ("positive", "orthogonal"),
    ("positive", "cross_polytope"),
    ("hyperbolic", "orthogonal"),
    ("optimal_positive", "simplex"),
    ("optimal_positive", "orthogonal"),
    ("optimal_positive", "cross_polytope"),
)


def required_features(
    query_covariance: ArrayLike, key_covariance: ArrayLike, *, relative_error: float
) -> Float64[np.ndarray, "*batch"] | np.float64:
    r"""Returns the number of balanced features needed for a mean relative squared error.

    .. math::
        m \ge \frac{1}{\varepsilon} \Big(\prod_l \sqrt{1 + 4 s_l} - 1\Big), \qquad
        s_l = \sqrt{\lambda_l(C_x C_y)}

    Here :math:`C_x` and :math:`C_y` are the covariances of centered queries and keys, which are
    multiplied by the root of the scale of the logits. Balanced features map them by M and
    :math:`M^{-T}` so that both covariances become diag(s), which is the best choice of M. If the
    sum of a balanced query and key is normal with the covariance 2 diag(s), then :math:`\prod_l
    \sqrt{1 + 4 s_l}` is the least mean second moment of any proposal, by the Cauchy-Schwarz
    inequality. The bound is for iid rows and the error of the kernel. It indicates how many
    features a head needs.

    Args:
      query_covariance: Covariance of x, ``[..., dim, dim]``, symmetric and positive semidefinite.
      key_covariance: Covariance of y, ``[..., dim, dim]``, of the same kind.
      relative_error: Mean of :math:`E(\hat K / K - 1)^2` over pairs, positive.

    Returns:
      float64 array of the broadcast leading shape: whole numbers, or infinity.

    Raises:
      TypeError: If an array is not real or ``relative_error`` is not one number.
      ValueError: If a shape does not match, a matrix is not a covariance, or ``relative_error`` is
        not positive.

    Example:
      >>> import numpy as np
      >>> print(required_features(np.eye(4), np.eye(4) / 4, relative_error=0.1))
      80.0

    References:
      Bhatia and Kittaneh, On the Singular Values of a Product of Operators (1990), for the best
      balance, https://doi.org/10.1137/0611018
      Likhosherstov et al., FAVOR# (2023), for features with a matrix as a parameter,
      https://arxiv.org/abs/2302.00787
    """
    checks.scalar("relative_error", relative_error, sign="positive")
    x = _root("query_covariance", query_covariance)
    y = _root("key_covariance", key_covariance)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            "query_covariance and key_covariance must have one dim, "
            f"got {x.shape[-1]} and {y.shape[-1]}."
        )
    # Singular values of a product of roots keep their digits, whereas eigenvalues of C_x C_y would
    # lose half of them.
    s = np.linalg.svd(np.swapaxes(x, -1, -2) @ y, compute_uv=False)
    with np.errstate(over="ignore"):
        excess = np.expm1(np.sum(np.log1p(4 * s), axis=-1) / 2)
        # Rounding must not push a whole number up to the next.
        return np.maximum(np.ceil(excess / relative_error * (1 - 1e-12)), 1)[()]


def _root(name: str, covariance: ArrayLike) -> Float64[np.ndarray, "*batch dim dim"]:
    """Returns L with L L^T = C after checking that C is a covariance."""
    c = checks.real(name, covariance)
    if c.ndim < 2 or c.shape[-1] != c.shape[-2] or not c.shape[-1] or not np.all(np.isfinite(c)):
        raise ValueError(f"{name} must be [..., dim, dim] and finite, got shape {c.shape}.")
    tolerance = 1e-6 * np.max(np.abs(c), axis=(-2, -1), keepdims=True)
    eigenvalues, vectors = np.linalg.eigh(c)
    asymmetry = np.abs(c - np.swapaxes(c, -1, -2))
    if np.any(asymmetry > tolerance) or np.any(eigenvalues < -tolerance[..., 0]):
        raise ValueError(f"{name} must be symmetric and positive semidefinite.")
    return vectors * np.sqrt(np.maximum(eigenvalues, 0))[..., None, :]


@dataclasses.dataclass(frozen=True)
class FeatureChoice:
    """The choice of ``choose_num_features``, which documents the fields."""

    reached: bool
    features: ChosenFeatures
    coupling: ClosedFormCoupling
    num_features: int
    num_entries: int
    parameter: float
    predicted_error: float
    standard_error: float | None
    relative_error: float
    mean_squared_distance: float

    @property
    def reason(self) -> str:
        """Sentence with the reason for this choice."""
        if self.reached:
            return (
                "No other map and coupling reaches a relative error of "
                f"{self.relative_error:g} with fewer entries."
            )
        return (
            f"No map and coupling reaches a relative error of {self.relative_error:g} with as many "
            f"entries: the mean of |x + y|^2 is {self.mean_squared_distance:.3g}, and the variance "
            "of one feature without a calibration grows like its exponential. Lower the scale of "
            "the logits, allow more features, or weigh some keys exactly (exact_bandwidth and "
            "exact_keys)."
        )

    def __str__(self) -> str:
        """Returns the choice and its reason."""
        parameter = f", parameter={self.parameter:.4g}" if self.parameter else ""
        how, spread = "predicted", ""
        if self.standard_error is not None:
            how, spread = "measured", f" ± {self.standard_error:.1g} on the second half of the data"
        return (
            f"{'' if self.reached else 'Not reached: '}{self.features} features of "
            f"{self.coupling} rows, num_features={self.num_features}{parameter}, {how} error "
            f"{self.predicted_error:.3g}{spread}. {self.reason}"
        )


def _rank(choice: FeatureChoice) -> tuple[bool, int, bool, float]:
    """Returns a sort key for choices; the smallest is the best."""
    if not choice.reached:
        return True, 0, False, choice.predicted_error
    # A calibration must be worth its fit.
    return False, choice.num_entries, choice.features == "calibrated", choice.predicted_error


def choose_num_features(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None = None,
    *,
    relative_error: float,
    max_features: int = 1024,
    scale: float | None = None,
    num_queries: int = 16,
    trials: bool = True,
) -> FeatureChoice:
    r"""Chooses the feature map, coupling and number of features for given queries and keys.

    The function predicts the relative squared error of the output of attention as
    ``attention_error`` does, for positive, hyperbolic and optimal positive features with each
    coupling, and returns the choice with the fewest entries that reaches ``relative_error``. If
    none does with ``max_features`` entries, the result says so and contains the best choice. The
    prediction is accurate where it is small, and too high for vectors with a few long axes; see
    ``attention_error``. A large prediction only shows that the map is unsuitable. A small one
    counts as 1 if the mean relative variance of the normalizers, the sums of a query's kernel
    estimates, is above 1: then it cannot hold. If some :math:`|x + y|^2` is above 1,000, nothing is
    predicted, and the error counts as infinite.

    Calibrated features are for vectors so long that the prediction fails. They are measured
    instead, with several draws of cross-polytopes: fitted on the first half of the data, and tested
    on the second. Positive and optimal positive features are measured too, because their
    predictions are too high. A measured error reaches ``relative_error`` if its mean plus one
    standard error does. Other data may have larger errors: data of another kind, and even other
    sequences of the same kind, several times larger if you gave only one. So give several
    sequences. The halves are sequences if there are two or more, otherwise the first and the second
    half of the tokens, so that each query sees half of the keys. The numbers of features that are
    tried grow by a fifth or by one. The draws are fixed: equal arguments give equal results.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``. N is a multiple of K.
      value: Values ``[..., S, K, V]``. If None, values are assumed uncorrelated with variance 1.
      relative_error: Expected squared error divided by the squared norm of the output, positive.
      max_features: Largest number of entries of the features.
      scale: Scale of the logits, at least 0. The default is :math:`1 / \sqrt H`.
      num_queries: Number of queries of each head that are evaluated, evenly spaced.
      trials: False skips the measurements, and thereby calibrated features.

    Returns:
      A record that prints as sentences, with the fields

      - ``reached``: True if the predicted error, or the mean of trials plus its standard error, is
        at most ``relative_error``. Otherwise the choice is the one with the smallest error.
      - ``features``: Feature map: ``"positive"``, ``"hyperbolic"``, ``"optimal_positive"`` or
        ``"calibrated"``.
      - ``coupling``: Coupling of the rows of the projection.
      - ``num_features``: Number of rows m of the projection.
      - ``num_entries``: Number of entries of the features, 2m for hyperbolic features.
      - ``parameter``: Parameter A of optimal positive features, otherwise 0.
      - ``predicted_error``: Expected relative squared error, averaged over heads: in closed form,
        or the mean of trials.
      - ``standard_error``: Standard error of the trials over draws of W and over the queries that
        were evaluated, None for a closed form.
      - ``relative_error``: Requested error.
      - ``mean_squared_distance``: Mean of :math:`|x + y|^2`, which indicates how hard the task is.
      - ``reason``: Sentence with the reason for this choice.

    Raises:
      TypeError: If a number is not an integer, an array is not real, or ``trials`` is neither True
        nor False.
      ValueError: If a shape does not match, a number is out of range or not finite, or a single
        sequence has not two queries and two keys to split.

    Example:
      >>> import numpy as np
      >>> query, key = np.random.default_rng(0).normal(size=(2, 32, 1, 16))
      >>> choice = choose_num_features(query / 2, key / 2, relative_error=0.05)
      >>> choice.features, choice.coupling, choice.num_features
      ('optimal_positive', 'cross_polytope', 27)
      >>> print(choose_num_features(2 * query, 2 * key, relative_error=0.05).reached)
      False
    """
    inputs = attention_inputs(query, key, value, scale)
    checks.scalar("relative_error", relative_error, sign="positive")
    relative_error = float(relative_error)
    max_features = checks.positive_int("max_features", max_features)
    num_queries = checks.positive_int("num_queries", num_queries)
    halves = inputs.halves() if checks.boolean("trials", trials) else []
    inputs = inputs.some_queries(num_queries)
    squared_distance = _mean_squared_distance(inputs)
    choices = [*_predicted(inputs, squared_distance, relative_error, max_features)]
    if halves:
        fit, test = halves
        test = test.some_queries(num_queries)
        choices = [*_measured(fit, test, squared_distance, relative_error, max_features), *choices]
    return min(choices, key=_rank)


def _measured(
    fit: AttentionInputs,
    test: AttentionInputs,
    squared_distance: float,
    relative_error: float,
    max_features: int,
) -> Iterator[FeatureChoice]:
    """Yields the choices for feature maps fitted on the first inputs and tested on the second."""
    exponents = np.arange(0, 4 * np.log2(max_features) + 1) / 4
    sizes = np.unique(np.minimum(np.ceil(2**exponents), max_features).astype(int))
    num_draws = max(_LEAST_DRAWS, -(-_LEAST_PROJECTIONS // len(test.heads)))
    # In the vectors the heads come before the length, and they are already scaled.
    of_key_heads = fit.y[:, :: fit.num_heads // fit.num_key_heads]
    query, key = (np.swapaxes(x, 1, 2).astype(np.float32) for x in (fit.x, of_key_heads))
    calibration = fit_calibration(query, key, scale=1.0)
    variances = test.of_each_head(calibration.variances)
    parameter = float(optimal_parameter(squared_distance, test.dim))
    tries: list[tuple[ChosenFeatures, AttentionInputs, Variances, float]] = [
        ("positive", test, np.ones_like(variances), 0.0),
        ("optimal_positive", test, np.full_like(variances, 1 - 4 * parameter), parameter),
        ("calibrated", test.in_coordinates_of(calibration), variances, 0.0),
    ]
    for features, inputs, of_rows, own_parameter in tries:
        means, spreads = errors_in_trials(inputs, of_rows, sizes, num_draws)
        # All larger numbers of features must reach the error too, so that no lucky draw decides.
        reaches = means + spreads <= relative_error
        is_enough = np.logical_and.accumulate(reaches[::-1])[::-1]
        place = int(np.argmax(is_enough)) if is_enough[-1] else int(np.argmin(means))
        yield FeatureChoice(
            reached=bool(is_enough[-1]),
            features=features,
            coupling="cross_polytope",
            num_features=int(sizes[place]),
            num_entries=int(sizes[place]),
            parameter=own_parameter,
            predicted_error=float(means[place]),
            standard_error=float(spreads[place]),
            relative_error=relative_error,
            mean_squared_distance=squared_distance,
        )


def _predicted(
    inputs: AttentionInputs, squared_distance: float, relative_error: float, max_features: int
) -> Iterator[FeatureChoice]:
    """Yields the choices according to the closed form."""
    parameter = float(optimal_parameter(squared_distance, inputs.dim))
    num_queries = len(inputs.heads) * inputs.x.shape[-2]
    kinds = (SAME_ROW, _ANTIPODAL, _INDEPENDENT)
    points = [*inputs.queries_of_all_heads()]
    plain = error_terms(points, 0.0, "chi", kinds)
    tilted = error_terms(points, parameter, "chi", kinds[:2])
    # For rows of independent norms, covariances do not depend on the parameter.
    tilted = tilted._replace(spectra=plain.spectra, squared_bias=plain.squared_bias)
    for features, coupling in _CANDIDATES:
        is_tilted = features == "optimal_positive"
        terms, own_parameter = (tilted, parameter) if is_tilted else (plain, 0.0)
        entries = 2 if features == "hyperbolic" else 1  # For each row.
        most = max_features // entries
        least, num_features, reached = np.inf, max(most, 1), False
        for size in range(1, most + 1):
            rows = coupled_rows(size, inputs.dim, coupling)
            rows = rows.with_antipodes() if features == "hyperbolic" else rows
            error, of_normalizers = terms.errors(rows) / (len(inputs.heads), num_queries)
            if error <= least:
                least, num_features = error, size
            reached = bool(error <= relative_error and of_normalizers <= 1)
            if reached:
                break
        if not reached and least <= relative_error:
            least = max(least, 1.0)
        yield FeatureChoice(
            reached=reached,
            features=features,
            coupling=coupling,
            num_features=num_features,
            num_entries=num_features * entries,
            parameter=own_parameter,
            predicted_error=float(least),
            standard_error=None,
            relative_error=relative_error,
            mean_squared_distance=squared_distance,
        )


def _mean_squared_distance(inputs: AttentionInputs) -> float:
    """Returns the mean of |x + y|^2 over all heads, queries and keys."""
    x, y = inputs.x, inputs.y
    squares = np.mean(np.sum(x**2, axis=-1)) + np.mean(np.sum(y**2, axis=-1))
    products = np.sum(np.mean(x, axis=-2) * np.mean(y, axis=-2), axis=-1)
    return max(float(squares + 2 * np.mean(products)), 0.0)
