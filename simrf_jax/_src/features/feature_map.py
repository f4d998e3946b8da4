"""The base class of feature maps, ``Custom`` for user functions, and the maps by name."""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey
from jaxtyping import Array, ArrayLike, Float

from simrf_jax._src import checks, one_line
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.log_space import KERNELS, SIDES, LogFeatures, Side
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections import Coupling, Projection, as_projection

Map = TypeVar("Map", bound="FeatureMap")

_CLASS_ATTRIBUTES = (
    "projection_type",
    "is_finite",
    "multiplies_rows",
    "coupling",
    "estimates_softmax",
    "needs_chi_norms",
    "kernel_of_rows",
    "head_dim",
    "axes_of_one",
)


class FeatureMap(abc.ABC):
    """A feature map phi: log features of queries and of keys.

    A feature map is a small pytree. Its arrays, such as phases or a bandwidth, are leaves: they go
    through ``jit`` and ``grad``. Static fields, such as the kernel, are part of its structure. Two
    maps of one class and of equal structure share their compiled programs, so ``log_features`` must
    be a pure function of its arguments and of the fields. Frozen dataclasses that derive from this
    class are registered as pytrees automatically. ``Custom`` turns a function into a feature map.

    Attributes:
      projection_type: Type of W: an array, or a structure of several parts.
      is_finite: True if every finite vector has finite features, including the zero vector. If
        False, attention checks the features and substitutes other tokens for hidden ones before
        calling the map.
      multiplies_rows: True if the map multiplies W by matrices. Attention then does so once per
        call; see ``Folded``.
      coupling: Coupling of the rows of W that suits the map best; the default of the adapters.
      axes_of_one: Names of the fields that may hold one array for each key head, and the number of
        axes of one such array. Attention treats an array with one more axis as one array for each
        key head.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, simrf_jax
      >>> @dataclasses.dataclass(frozen=True)
      ... class Scaled(simrf_jax.FeatureMap):  # Positive features of vectors times a factor.
      ...     factor: float
      ...     is_finite = True
      ...     def log_features(self, x, projection, *, side):
      ...         positive = simrf_jax.feature_maps.Positive()
      ...         return positive.log_features(self.factor * x, projection, side=side)
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 32, 16)
      >>> q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 10, 2, 16))
      >>> simrf_jax.random_feature_attention(q, k, v, w, feature_map=Scaled(0.5)).shape
      (1, 10, 2, 16)
    """

    projection_type: ClassVar[type] = jax.Array
    is_finite: ClassVar[bool] = False
    multiplies_rows: ClassVar[bool] = False
    coupling: ClassVar[Coupling] = "simplex"
    axes_of_one: ClassVar[Mapping[str, int]] = {}
    _static: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, static: Sequence[str] = (), **options: Any) -> None:
        """Makes the subclass, which must be a dataclass, a pytree.

        Args:
          static: Names of the fields that are part of the structure.
          **options: Passed on to other base classes.
        """
        super().__init_subclass__(**options)
        # A dataclass with slots is created again, without keywords, from the first one's
        # attributes.
        cls._static = (*cls._static, *(name for name in static if name not in cls._static))
        # A dataclass keeps a __repr__ defined in the class itself, but replaces an inherited one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = FeatureMap.__repr__  # type: ignore[method-assign]
        register(cls)

    def __post_init__(self) -> None:
        """Checks the kernel of a map that names one as static."""
        if "kernel" in self._static:
            checks.one_of("kernel", getattr(self, "kernel", None), KERNELS)

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def needs_chi_norms(self) -> bool:
        """True if the map estimates another kernel when the norms of the rows of W are fixed.

        Norms are fixed with ``norms="sqrt_dim"`` or ``"radau"``. ``check_norms`` then refuses a
        ``Projection`` that was drawn that way, and the adapters refuse to draw one.
        """
        return False

    @property
    def kernel_of_rows(self) -> ScaleMixture | None:
        """Kernel for which W must be drawn, or None for any kernel; see ``draw_projection``.

        ``check_norms`` refuses a ``Projection`` that was drawn for another kernel.
        """
        return GAUSSIAN

    @property
    def head_dim(self) -> int | None:
        """Width of the vectors that the arrays of the map fit, or None for any width."""
        return None

    @property
    def estimates_softmax(self) -> bool:
        """True if products of features estimate exp(x . y) itself, not a multiple of it.

        A map of another kernel sets ``estimates_softmax = False`` in the class, or has a static
        field ``kernel`` with another value. It cannot share a normalizer with exact attention.
        """
        return getattr(self, "kernel", "softmax") == "softmax"

    @abc.abstractmethod
    def log_features(self, x: Any, projection: Any, *, side: Side) -> LogFeatures:
        """Returns the features of vectors in log space.

        Args:
          x: Vectors ``[..., dim]``, at least in float32, multiplied by the square root of the scale
            of attention.
          projection: W, ``[num_features, dim]``, or an object that replaces it.
          side: ``"query"`` if the vectors are queries, ``"key"`` if they are keys.

        Returns:
          Features with the leading shape of x, whose products estimate the kernel (exp(x . y) in
          attention). Exponents are minus infinity where a feature is zero.
        """

    def log_features_of_heads(self, x: Any, projection: Any, *, side: Side) -> LogFeatures:
        """Returns the features of the vectors of all heads.

        Override it where one computation for all heads is faster than ``jax.vmap`` over heads.

        Args:
          x: Vectors ``[batch, length, K, ..., dim]`` of K key heads, as in ``log_features``.
          projection: W of all heads, or ``[K, num_features, dim]``, one for each.
          side: ``"query"`` or ``"key"``.
        """
        axis = None if projection is None or projection.ndim == 2 else 0
        axes = self.head_axes()
        if jax.tree.leaves(axes):
            of_head = functools.partial(type(self).log_features, side=side)
            return jax.vmap(of_head, in_axes=(axes, 2, axis), out_axes=2)(self, x, projection)
        own = functools.partial(self.log_features, side=side)
        if axis is None:
            return own(x, projection)
        return jax.vmap(own, in_axes=(2, axis), out_axes=2)(x, projection)

    def key_scores(self, y: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
        """Returns the scores by which ``ExactKeys(count, by="score")`` chooses keys of one head.

        They do not depend on W. Here they are those for queries and keys that are standard normal;
        see ``ExactKeys``.

        Args:
          y: Keys, at least in float32, multiplied by the square root of the scale of attention.
        """
        return 0.25 * jnp.sum(jnp.square(y), axis=-1)

    def exponential_form(self, projection: Any, *, side: Side) -> ExponentialForm | None:
        """Returns the features of one head as arrays if they are exponentials; else None.

        A fused Pallas kernel computes such features from the arrays alone.

        Args:
          projection: W, ``[num_features, dim]``, or an object that replaces it.
          side: ``"query"`` or ``"key"``.
        """
        return None

    def exponential_forms(self, projection: Any, *, side: Side) -> ExponentialForm | None:
        """Returns ``exponential_form`` with an axis of key heads, of size 1 if all heads share it.

        Args:
          projection: W of all heads, or ``[K, num_features, dim]``, one for each.
          side: ``"query"`` or ``"key"``.
        """
        if _rank(self, "exponential_form") > _rank(self, "log_features"):
            return None  # A subclass overrides the features but not their form.
        axis = None if projection is None or projection.ndim == 2 else 0
        axes = self.head_axes()
        of_head = functools.partial(type(self).exponential_form, side=side)
        if axis is None and not jax.tree.leaves(axes):
            form = of_head(self, projection)
            return jax.tree.map(lambda x: x[None], form)
        return jax.vmap(of_head, in_axes=(axes, axis))(self, projection)

    def head_axes(self) -> Any:
        """Returns the axis of key heads of each leaf, 0 or None, in the structure of this map.

        The result serves as ``in_axes`` of ``jax.vmap``, for ``axes_of_one``. It is None for a map
        without arrays for each key head.
        """
        if not self.axes_of_one:
            return None

        def axis(path: tuple[GetAttrKey, ...], leaf: Any) -> int | None:
            axes_of_one = _axes_of_one(self, path)
            return 0 if axes_of_one is not None and jnp.ndim(leaf) == axes_of_one + 1 else None

        return jax.tree_util.tree_map_with_path(axis, self)

    def features(
        self, x: Float[ArrayLike, "*batch dim"], projection: Any, *, side: Side = "key"
    ) -> Float[Array, "*batch features"]:
        """Returns the features phi(x).

        Args:
          x: Vectors.
          projection: W, ``[num_features, dim]``, or an object that replaces it.
          side: ``"query"`` if the vectors are queries, ``"key"`` if they are keys.

        Returns:
          The features in the dtype of x. Those of long vectors overflow or underflow.

        Raises:
          TypeError: If an argument is not floating.
          ValueError: If the side is unknown or the shapes do not match.
        """
        checks.one_of("side", side, SIDES)
        x = checks.vectors("x", x)
        projection = None if projection is None else as_projection(projection)
        self.check_norms(projection)
        return self.log_features(x, projection, side=side).evaluate(x.dtype)

    def check_norms(self, projection: Any) -> None:
        """Raises ``ValueError`` if the map needs norms of a different law from those of W.

        A ``Projection`` records how it was drawn, even inside ``jax.jit``. An array does not, and
        passes.

        Args:
          projection: W, an array or a structured projection; or None.
        """
        options = getattr(projection, "draw_options", None)
        if options is None:
            return
        if self.kernel_of_rows not in (None, options.kernel):
            raise ValueError(
                f"projection must be drawn for kernel={self.kernel_of_rows}, got one for "
                f"{options.kernel}, which trigonometric_features and phase_features estimate with "
                f"kernel={options.kernel}."
            )
        # needs_chi_norms comes last, because it may depend on values on a device.
        if options.has_fixed_norms and self.needs_chi_norms:
            Projection.of(projection).check_chi_norms()


def _rank(feature_map: FeatureMap, name: str) -> int:
    """Returns how many base classes up a method is defined."""
    classes = type(feature_map).__mro__
    return next(rank for rank, cls in enumerate(classes) if name in vars(cls))


def _axes_of_one(
    feature_map: FeatureMap | ExponentialForm, path: tuple[GetAttrKey, ...]
) -> int | None:
    """Returns the number of axes of one head's array at a leaf, according to its innermost map."""
    name, *inside = path
    field = getattr(feature_map, name.name)
    if isinstance(field, FeatureMap | ExponentialForm):
        return _axes_of_one(field, tuple(inside))
    return feature_map.axes_of_one.get(name.name)


def register(cls: type[Any]) -> None:
    """Makes a feature map, or another dataclass, a pytree.

    ``jax.tree_util.register_dataclass`` makes equal structures for any two classes with the same
    fields (jaxlib 0.10.2), so ``jax.jit`` might run the program of another feature map. Besides,
    this function restores a record without its constructor, whose checks would refuse the
    placeholders that JAX puts in place of leaves.

    Args:
      cls: The class. Its attribute ``_static`` names the fields that are part of the structure, if
        any.
    """
    static: tuple[str, ...] = getattr(cls, "_static", ())

    # The fields are not known yet: the class becomes a dataclass only after it is created.
    @functools.cache
    def names_of_leaves() -> tuple[str, ...]:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"The feature map {cls.__name__} must be a dataclass.")
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in static if name not in names]:
            raise TypeError(
                f"{cls.__name__} names {unknown} as static, which must be among its fields {names}."
            )
        if attributes := [name for name in _CLASS_ATTRIBUTES if name in names]:
            raise TypeError(
                f"{' and '.join(attributes)} must be attributes of the class {cls.__name__}, got "
                "fields; leave out their annotations."
            )
        return tuple(name for name in names if name not in static)

    def flatten_with_keys(
        record: Any,
    ) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
        leaves = [(GetAttrKey(name), getattr(record, name)) for name in names_of_leaves()]
        return leaves, tuple(getattr(record, name) for name in static)

    def unflatten(structure: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        record = object.__new__(cls)
        names = (*names_of_leaves(), *static)
        for name, value in zip(names, (*leaves, *structure), strict=True):
            object.__setattr__(record, name, value)
        return record

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)


# The maps that attention accepts by name; ``named`` adds to them.
FEATURE_MAPS: dict[str, FeatureMap] = {}


def named(name: str) -> Callable[[type[Map]], type[Map]]:
    """Returns a decorator that registers a feature map by name, as in ``feature_map="mine"``.

    Put it above ``dataclasses.dataclass``. Every field needs a default. The name is known once the
    module of the class is imported, as ``simrf_jax._src.features`` does.

    Args:
      name: Name of the feature map.

    Raises:
      ValueError: If another class has that name. A class that is defined again, as in a notebook,
        replaces its earlier version.
    """

    def decorate(cls: type[Map]) -> type[Map]:
        known = type(FEATURE_MAPS.get(name, cls()))
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"The name of a feature map must be new, got {name!r}, which is that of "
                f"{known.__module__}.{known.__qualname__}."
            )
        FEATURE_MAPS[name] = cls()
        return cls

    return decorate


@dataclasses.dataclass(frozen=True)
class Custom(
    FeatureMap,
    static=(
        "query",
        "key",
    ),
):
    """A custom feature map: a function from (x, projection) to features.

    The function returns features ``[..., num_features]`` of vectors ``[..., dim]`` that are already
    scaled. The features must not overflow, but need not be finite at zero: the function sees copies
    of other tokens in place of hidden keys and padding. If its features of a visible token are not
    finite, the gradients of that token, of W, of the scale and of arrays in the function are NaN,
    even for outputs that do not see the token, because 0 times infinity is NaN in the function's
    own derivative: clip the exponents. Outside ``jit``, causal and packed attention call it on the
    whole length at once.

    Attributes:
      query: Function of queries.
      key: Function of keys; None to use that of queries.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> def squares(x, w):
      ...     return jnp.square(simrf_jax.project(x, w))
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 32, 16)
      >>> q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 10, 2, 16))
      >>> custom = simrf_jax.feature_maps.Custom(squares)
      >>> simrf_jax.random_feature_attention(q, k, v, w, feature_map=custom).shape
      (1, 10, 2, 16)
    """

    kernel_of_rows = None
    query: Callable[..., jax.Array]
    key: Callable[..., jax.Array] | None = None

    def log_features(self, x: jax.Array, projection: Any, *, side: Side) -> LogFeatures:
        """Returns features in units of the largest feature of each vector.

        Products with values of any size, and their sums, stay finite in these units.

        Raises:
          TypeError: If the features are not floating.
          ValueError: If the features have the wrong shape.
        """
        function = self.query if side == "query" or self.key is None else self.key
        phi = checks.floating("The features of a feature_map", function(x, projection))
        if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
            raise ValueError(
                f"feature_map must map {(*x.shape[:-1], 'dim')} to "
                f"{(*x.shape[:-1], 'num_features')}, got {phi.shape} for x of shape {x.shape}."
            )
        phi = phi.astype(x.dtype)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(phi), axis=-1, keepdims=True))
        largest = jnp.where(largest > 0, largest, 1)
        return LogFeatures(jnp.zeros_like(largest), jnp.log(largest), phi / largest)


def calls_function(feature_map: FeatureMap) -> bool:
    """Returns whether a feature map is, or holds, a function of the user.

    Such a map is not compiled outside ``jax.jit``: user functions are not cached, because they may
    be impure.
    """
    nodes = jax.tree.leaves(feature_map, is_leaf=lambda node: isinstance(node, Custom))
    return any(isinstance(node, Custom) for node in nodes)


# Names of maps whose arrays a Flax adapter creates, and what functions take instead.
OF_ADAPTERS = {
    "calibrated": "the map that simrf_jax.calibrate(query, key) returns",
    "learned": "a simrf_jax.feature_maps.Learned",
}

# A feature map as users pass it: a name, an object, or a function (x, projection).
FeatureMapLike: TypeAlias = str | FeatureMap | Callable[..., jax.Array]


def as_feature_map(feature_map: FeatureMapLike) -> FeatureMap:
    """Returns the feature map for a name, an object or a function (x, projection).

    Raises:
      TypeError: If it is none of these, or one of the library's functions, whose features overflow:
        pass its feature map instead.
      ValueError: If the name is unknown.
    """
    if isinstance(feature_map, str) and feature_map in OF_ADAPTERS:
        raise ValueError(
            f"feature_map={feature_map!r} holds its own arrays: pass {OF_ADAPTERS[feature_map]}."
            " Of the Flax adapters, only RandomFeatureAttention takes the name."
        )
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            checks.one_of("feature_map", feature_map, FEATURE_MAPS)
        return FEATURE_MAPS[feature_map]
    if isinstance(feature_map, FeatureMap):
        own = type(feature_map)
        for name, value in vars(feature_map).items():
            # Other libraries may put strings in place of arrays, as labels.
            if name not in own._static and isinstance(value, str):
                raise TypeError(
                    f"The field {name} of {own.__name__} is not an array, got {value!r}; name it "
                    f"as static: class {own.__name__}(FeatureMap, static=({name!r},))."
                )
        return feature_map
    if not callable(feature_map) or isinstance(feature_map, type):
        raise TypeError(
            f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}, a FeatureMap, or a "
            f"function (x, projection) -> features, got {feature_map!r}."
        )
    inner: Any = feature_map
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", "").removesuffix("_features")
    of_class = name.title().replace("_", "")
    # A feature function is defined in the module of its feature map.
    module = getattr(inner, "__module__", None) or ""
    if module.startswith("simrf_jax._src.features.") and hasattr(sys.modules[module], of_class):
        by_name = f" or {name!r}" if name in FEATURE_MAPS else ""
        raise TypeError(
            f"feature_map must be simrf_jax.feature_maps.{of_class}(...){by_name}, got the "
            f"function {inner.__name__}, whose features overflow where those of the map do not."
        )
    return Custom(feature_map)
