"""Random features as a scikit-learn transformer."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from simrf_jax._src import checks
from simrf_jax._src.features.exponential import Hyperbolic, Positive
from simrf_jax._src.features.feature_map import FeatureMap
from simrf_jax._src.features.trigonometric import Phase, Trigonometric
from simrf_jax._src.kernels import GAUSSIAN, Matern, RationalQuadratic, ScaleMixture
from simrf_jax._src.projections import (
    COUPLINGS,
    FIXED_NORMS,
    NORMS,
    Coupling,
    Norms,
    draw_projection,
)

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "simrf_jax.integrations.sklearn needs scikit-learn 1.6 or newer, got "
        f"{error}. The extra sklearn installs it: pip install 'simrf_jax[sklearn]'."
    ) from error

FeatureMapName: TypeAlias = Literal["trigonometric", "phase", "positive", "hyperbolic"]
KernelName: TypeAlias = Literal["rbf", "laplace", "matern", "rational_quadratic"]
# With the default parameters of scikit-learn's Gaussian process kernels.
_KERNELS: dict[str, ScaleMixture] = {
    "rbf": GAUSSIAN,
    "laplace": Matern(0.5),
    "matern": Matern(1.5),
    "rational_quadratic": RationalQuadratic(1.0),
}
# All other dtypes are converted to the first.
_DTYPES = (np.float64, np.float32)
_MOST = 1e300  # Of length scales and gamma, and of their inverses.
# A batch has about _NUMBERS entries in the wider of input and output, but at least _LEAST_ROWS
# rows. Larger batches do not fit the caches of a CPU.
_LEAST_ROWS, _NUMBERS = 64, 2**20
# A context in which JAX computes in float64. It applies to one thread and does not change the
# user's setting. Before jax 0.8 it was in jax.experimental, from which later versions removed it.
_float64: Callable[[bool], contextlib.AbstractContextManager[None]] = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # type: ignore[attr-defined]
)


class _Maps(NamedTuple):
    """Feature maps of one kernel that make up a transformer.

    Attributes:
      single: Map with one feature for each row of W.
      pair: Map with two features for each row, or None. If there is one, ``single`` provides only
        the last feature of an odd number.
    """

    single: FeatureMap
    pair: FeatureMap | None = None

    @property
    def best_coupling(self) -> Coupling:
        """Returns the best coupling of the rows of W for most of the features."""
        return (self.pair or self.single).coupling

    def num_rows(self, n_components: int) -> int:
        """Returns the number of rows of W for a number of features."""
        return -(-n_components // 2) if self.pair else n_components


def _maps(name: FeatureMapName, kernel: ScaleMixture) -> _Maps:
    """Returns the feature maps of a kernel, the Gaussian one for exponential features."""
    if name == "trigonometric":
        return _Maps(Phase(kernel=kernel), Trigonometric(kernel))
    if name == "phase":
        return _Maps(Phase(kernel=kernel))
    return _Maps(Positive("gaussian"), Hyperbolic("gaussian") if name == "hyperbolic" else None)


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Transformer that approximates the feature space of the RBF and other isotropic kernels.

    .. math:: \phi(x) \cdot \phi(y) \approx K(x, y)

    A linear model of :math:`\phi(x)` is an approximate kernel machine, whose cost grows linearly
    with the number of rows. The estimate of each entry of the kernel matrix is unbiased. With the
    default arguments its error is below that of ``sklearn.kernel_approximation.RBFSampler`` with
    equally many components (``python -m benchmarks.sklearn_features``): sines and cosines in pairs
    have less variance than single cosines with random phases, and orthogonal random vectors less
    than independent ones.

    The output has the dtype of the transformed rows if that is float64 or float32, and float64 for
    every other dtype, as in scikit-learn's own scalers. W is always drawn in float64, so both
    dtypes give the same features up to rounding. JAX's own switch for float64, ``jax_enable_x64``,
    is not changed.

    The first fit for a number of components and of columns compiles a program, which takes from
    half a second to several seconds. Later fits of the same size do not, including those of clones
    in a grid search. To keep the programs for other processes, turn on JAX's persistent cache
    before the first fit::

        jax.config.update("jax_compilation_cache_dir", "a folder")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    Sparse rows are made dense one batch at a time. This takes little memory, and the same time as
    dense rows. The output is dense.

    Args:
      n_components: Number of features, which is the number of columns of the output.
      kernel: ``"rbf"``, :math:`e^{-r^2/2}` for the Euclidean distance r in length scales,
        ``"laplace"``, :math:`e^{-r}`, ``"matern"`` of smoothness 3/2, ``"rational_quadratic"``,
        :math:`1/(1 + r^2/2)`, or a kernel of ``simrf_jax.kernels`` with other parameters, such as
        ``Matern(2.5)``. scikit-learn's ``laplacian`` kernel, of the Manhattan distance, is not
        isotropic, so it is not supported.
      length_scale: Length scale, a number or one for each column. None derives it from ``gamma``.
      gamma: Factor :math:`\gamma` in the RBF kernel :math:`e^{-\gamma |x - y|^2}`, or ``"scale"``
        for ``1 / (X.shape[1] * X.var())`` of the training data X. For every kernel the length
        scale is :math:`(2 \gamma)^{-1/2}`. It must be ``"scale"`` if a length scale is given.
      coupling: Joint law of the rows of W, ``"iid"``, ``"orthogonal"``, ``"simplex"``,
        ``"cross_polytope"`` or ``"simplex_plus"``; see ``simrf_jax.draw_projection``. ``"auto"``
        uses the best one for the feature map: ``"simplex"`` for ``"positive"`` and ``"orthogonal"``
        for the others.
      feature_map: ``"trigonometric"`` has a sine and a cosine for each row of W, with the least
        error on data. ``"phase"`` has one shifted cosine. ``"positive"`` has one exponential and
        ``"hyperbolic"`` a pair of them; estimates are then positive, but errors grow with the
        lengths of centered rows. If features come in pairs and ``n_components`` is odd, the last
        row has a single feature.
      norms: Joint law of the norms of the rows of W, ``"chi"`` for independent ones,
        ``"antithetic"``, ``"shared"``, ``"pair"`` or ``"stratified"``; see
        ``simrf_jax.draw_projection``. ``"auto"`` uses ``"stratified"`` for sines and cosines, where
        it lowers the error at most distances, and ``"chi"`` for exponential features.
      center: If true, the mean of the training data is subtracted from all rows. The kernel does
        not change. Exponential features need it, and others lose fewer digits in float32.
      random_state: Seed, ``numpy.random.RandomState`` or None, as everywhere in scikit-learn.

    Attributes:
      projection_: W in float64, ``[rows, n_features_in_]``.
      kernel_: The kernel, an object of ``simrf_jax.kernels``. ``kernel_(X, X,
        length_scale=length_scale_)`` is the kernel matrix.
      length_scale_: Length scale of each column, ``[n_features_in_]``.
      norms_: Law of the norms of the rows of W.
      mean_: Mean of each column of the training data, or zeros if ``center`` is false.
      coupling_: Coupling of the rows of W.
      feature_map_: Name of the feature map.
      n_features_in_: Number of columns of the training data.
      feature_names_in_: Names of these columns, if they are all strings.

    Example:
      >>> from sklearn.datasets import load_digits
      >>> from sklearn.linear_model import RidgeClassifier
      >>> from sklearn.model_selection import train_test_split
      >>> from sklearn.pipeline import make_pipeline
      >>> from simrf_jax.integrations.sklearn import RandomFeatures
      >>> X_train, X_test, y_train, y_test = train_test_split(
      ...     *load_digits(return_X_y=True), random_state=0
      ... )
      >>> model = make_pipeline(RandomFeatures(512, random_state=0), RidgeClassifier(1e-2))
      >>> model.fit(X_train, y_train).score(X_test, y_test) > 0.97
      True

    References:
      Rahimi and Recht, Random Features for Large-Scale Kernel Machines (NeurIPS 2007).
      Yu et al., Orthogonal Random Features (NeurIPS 2016), https://arxiv.org/abs/1610.09072
      Reid et al., Simplex Random Features (ICML 2023), https://arxiv.org/abs/2301.13856
    """

    def __init__(
        self,
        n_components: int = 100,
        *,
        kernel: KernelName | ScaleMixture = "rbf",
        length_scale: Any = None,
        gamma: float | Literal["scale"] = "scale",
        coupling: Coupling | Literal["auto"] = "auto",
        feature_map: FeatureMapName = "trigonometric",
        norms: Norms | Literal["auto"] = "auto",
        center: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ):
        self.n_components = n_components
        self.kernel = kernel
        self.length_scale = length_scale
        self.gamma = gamma
        self.coupling = coupling
        self.feature_map = feature_map
        self.norms = norms
        self.center = center
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Draws W for the columns of X, and computes the length scale and the mean from its values.

        Args:
          X: Training data ``[rows, columns]``, an array, a data frame or a sparse matrix.
          y: Ignored; present because pipelines pass it.

        Returns:
          This transformer.

        Raises:
          TypeError: If ``n_components`` is not an integer, or ``center`` is not a boolean.
          ValueError: If another argument of the constructor is out of range, scikit-learn refuses
            the data, or they lack the dimension that the coupling needs.
        """
        del y
        n_components = self._check_parameters()
        X = validate_data(self, X, accept_sparse="csr", dtype=_DTYPES)
        dim = X.shape[1]
        self.kernel_ = self._kernel()
        self.length_scale_ = _length_scale_of(self.length_scale, self.gamma, X)
        self.mean_ = _mean(X) if self.center else np.zeros(dim)
        self.feature_map_ = self.feature_map
        maps = _maps(self.feature_map, self.kernel_)
        self.coupling_ = self._coupling_for(maps.best_coupling, dim)
        self.norms_ = self._norms_for(maps)
        num_rows = maps.num_rows(n_components)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with _float64(True):
            key = jax.random.key(seed, impl="threefry2x32")  # Not JAX's default, which may differ.
            self.projection_ = np.array(
                draw_projection(
                    key,
                    num_rows,
                    dim,
                    coupling=self.coupling_,
                    norms=self.norms_,
                    dtype=jnp.float64,
                    kernel=self.kernel_,
                )
            )
        self._n_features_out = n_components
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Fits to a first batch, and checks the columns of later ones.

        The features do not change after the first batch, because a model that is partially fitted
        to them, such as ``SGDClassifier``, depends on them.

        Args:
          X: Training data ``[rows, columns]``, an array, a data frame or a sparse matrix.
          y: Ignored; present because pipelines pass it.

        Returns:
          This transformer.

        Raises:
          TypeError: If ``fit`` refuses the first batch.
          ValueError: If ``fit`` refuses the first batch, or a later one has other columns.
        """
        if not hasattr(self, "projection_"):
            return self.fit(X)
        validate_data(self, X, accept_sparse="csr", dtype=_DTYPES, reset=False)
        return self

    def transform(self, X: Any) -> Any:
        """Returns the features of each row.

        Args:
          X: Data ``[rows, n_features_in_]``, an array, a data frame or a sparse matrix.

        Returns:
          Array ``[rows, n_components]``, float32 if X is float32 and float64 otherwise; or the
          container chosen by ``set_output``.

        Raises:
          NotFittedError: If ``fit`` was not called before.
          ValueError: If scikit-learn refuses the data.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_DTYPES, reset=False)
        features = np.empty((X.shape[0], self._n_features_out), X.dtype)
        batch = _rows_of_batch(max(X.shape[1], self._n_features_out))
        with _float64(True):
            of_rows = functools.partial(
                _features,
                _maps(self.feature_map_, self.kernel_),
                jnp.asarray(self.projection_, X.dtype),
                self.mean_,
                1 / self.length_scale_,
                self._n_features_out,
            )
            for start in range(0, X.shape[0], batch):
                rows = _dense(X[start : start + batch])
                out = np.asarray(of_rows(_padded(rows)))
                features[start : start + batch] = out[: len(rows)]
        return features

    def _check_parameters(self) -> int:
        """Returns the number of features as a Python integer."""
        checks.one_of("feature_map", self.feature_map, get_args(FeatureMapName))
        checks.one_of("coupling", self.coupling, ("auto", *COUPLINGS))
        checks.boolean("center", self.center)
        return checks.positive_int("n_components", self.n_components)

    def _kernel(self) -> ScaleMixture:
        """Returns the kernel as an object, after checking that the features estimate it."""
        if isinstance(self.kernel, str) and self.kernel in ("laplacian", "Laplacian"):
            raise ValueError(
                f"kernel={self.kernel!r} of scikit-learn uses the Manhattan distance and is not "
                "isotropic; kernel='laplace' uses the Euclidean distance."
            )
        kernel = self.kernel
        if not isinstance(kernel, ScaleMixture):
            if not isinstance(kernel, str) or kernel not in _KERNELS:
                raise ValueError(
                    f"kernel must be one of {', '.join(map(repr, _KERNELS))}, or a kernel of "
                    f"simrf_jax.kernels, got {kernel!r}."
                )
            kernel = _KERNELS[kernel]
        if kernel != GAUSSIAN and self.feature_map in ("positive", "hyperbolic"):
            raise ValueError(
                f"feature_map={self.feature_map!r} estimates only kernel='rbf', got kernel="
                f"{self.kernel!r}; feature_map='trigonometric' estimates it."
            )
        return kernel

    def _norms_for(self, maps: _Maps) -> Norms:
        checks.one_of("norms", self.norms, ("auto", *(n for n in NORMS if n not in FIXED_NORMS)))
        if self.norms != "auto":
            return self.norms
        return "stratified" if isinstance(maps.single, Phase) else "chi"

    def _coupling_for(self, best: Coupling, dim: int) -> Coupling:
        if self.coupling != "auto":
            if dim < 2 and self.coupling in ("simplex", "simplex_plus"):
                raise ValueError(
                    f"coupling={self.coupling!r} needs at least 2 columns, got n_features = {dim}."
                )
            return self.coupling
        # In one dimension the simplex is a vector and its negative, that is, the cross-polytope.
        return "cross_polytope" if (best, dim) == ("simplex", 1) else best

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


@functools.partial(jax.jit, static_argnames="num_features")
def _features(
    maps: _Maps,
    projection: jax.Array,
    mean: jax.Array,
    scale: jax.Array,
    num_features: int,
    x: jax.Array,
) -> jax.Array:
    """Returns the features of rows ``[rows, dim]``; their products are unbiased estimates."""
    centered = x.astype(mean.dtype) - mean[None]  # The mean is in float64.
    x = (scale[None] * centered).astype(x.dtype)
    if maps.pair is None:
        return maps.single.features(x, projection)
    num_pairs, num_single = divmod(num_features, 2)
    # The weighted mean of two unbiased estimates.
    parts = []
    if num_pairs:
        weight = 2 * num_pairs / num_features
        parts.append(weight**0.5 * maps.pair.features(x, projection[:num_pairs]))
    if num_single:
        parts.append(num_features**-0.5 * maps.single.features(x, projection[num_pairs:]))
    return jnp.concatenate(parts, axis=1)


def _length_scale_of(length_scale: Any, gamma: Any, X: Any) -> np.ndarray:
    """Returns the length scale of each column, for training data X."""
    dim = X.shape[1]
    if length_scale is None:
        return np.full(dim, (2 * _gamma_of(gamma, X)) ** -0.5)
    if not (isinstance(gamma, str) and gamma == "scale"):
        raise ValueError(
            "length_scale and gamma are two ways to set one number; leave one of them out, got "
            f"length_scale={length_scale!r} and gamma={gamma!r}."
        )
    try:
        array = np.asarray(length_scale, np.float64)
        is_bool = np.asarray(length_scale).dtype == bool
    except (TypeError, ValueError, OverflowError):
        array, is_bool = np.array(np.nan), False
    if array.shape not in ((), (dim,)) or is_bool or not np.all(_is_in_range(array)):
        raise ValueError(
            f"length_scale must be a positive number up to {_MOST}, or one for each of {dim} "
            f"columns, got {length_scale!r}."
        )
    return np.broadcast_to(array, dim).copy()


def _gamma_of(gamma: Any, X: Any) -> float:
    """Returns gamma as a number, for training data X."""
    if isinstance(gamma, str) and gamma == "scale":
        return _scale_gamma(X)
    is_number = isinstance(gamma, numbers.Real) and not isinstance(gamma, bool | np.bool_)
    if not (is_number and _is_in_range(gamma)):
        raise ValueError(
            f"gamma must be 'scale' or a positive number up to {_MOST}, got {gamma!r}."
        )
    return float(gamma)


def _is_in_range(x: Any) -> Any:
    """Returns whether numbers are positive, and they and their inverses are finite."""
    return (x >= 1 / _MOST) & (x <= _MOST)


def _scale_gamma(X: Any) -> float:
    if isinstance(X, np.ndarray):
        variance = float(X.var(dtype=np.float64))
    else:
        variance = _sparse_variance(X.astype(np.float64))
    if variance <= 0:  # The data are constant, and the kernel is 1 for any gamma.
        return 1.0
    gamma = 1 / (X.shape[1] * variance)
    if not 0 < gamma < math.inf:
        raise ValueError(
            "gamma='scale' needs data whose variance is within the range of float64, got "
            f"X.var() = {variance}."
        )
    return gamma


def _sparse_variance(X: Any) -> float:
    """Returns the variance of all entries of a sparse matrix, stored or not.

    The deviations from the mean are squared, not the entries: the squares of entries and of their
    mean would cancel if the mean is large.
    """
    X.sum_duplicates()
    size, mean = math.prod(X.shape), X.mean()
    not_stored = (size - X.data.size) / size
    return float(np.square(X.data - mean).sum() / size + not_stored * mean**2)


def _mean(X: Any) -> np.ndarray:
    """Returns the mean of each column in float64; for a sparse matrix, SciPy returns a matrix."""
    return np.asarray(X.mean(axis=0, dtype=np.float64)).ravel()


def _dense(X: Any) -> np.ndarray:
    return X if isinstance(X, np.ndarray) else X.toarray()


def _rows_of_batch(width: int) -> int:
    """Returns the number of rows of a batch, a power of two."""
    return max(_LEAST_ROWS, 2 ** math.floor(math.log2(max(1, _NUMBERS // width))))


def _padded(rows: np.ndarray) -> np.ndarray:
    """Pads rows with zeros up to a power of two, so that few shapes are compiled."""
    target = max(_LEAST_ROWS, 2 ** math.ceil(math.log2(len(rows))))
    return np.pad(rows, ((0, target - len(rows)), (0, 0)))
