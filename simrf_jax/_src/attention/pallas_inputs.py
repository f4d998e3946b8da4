"""Inputs of the fused Pallas kernels of all platforms, and the calls that none of them takes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inputs.sharding import MeshAxes
from simrf_jax._src.features import FeatureMap
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.log_space import SIDES, Side
from simrf_jax._src.projections import ProjectionLike

LOG2E = math.log2(math.e)
# Larger components of a query have squares that may not be finite.
LARGEST_QUERY = 1e18


def reason_against_call(estimator: Estimator, call: Call) -> str | None:
    """Returns why no kernel can take a call, or None.

    Raises:
      ValueError: If the feature map or W does not fit the heads of the keys.
    """
    if estimator.exact_keys is not None:
        return "its kernels have no exact_keys"
    if estimator.sequence_axis:
        return "its kernels are for whole sequences, got a call with a sequence_axis"
    estimator.check_heads(call)
    return None


def reason_against_tokens(call: Call, dtypes: tuple[Any, ...]) -> str | None:
    """Returns why the kernels cannot take the arrays of a call, or None.

    Args:
      call: The call.
      dtypes: Types of which all queries, keys and values must have one.
    """
    tokens = (call.query, call.key, call.value)
    found = {x.dtype for x in tokens}
    if len(found) > 1 or not found <= {jnp.dtype(dtype) for dtype in dtypes}:
        names = " and ".join(sorted(dtype.name for dtype in found))
        wanted = " or ".join(f"all {jnp.dtype(dtype).name}" for dtype in dtypes)
        return f"queries, keys and values are {names}, not {wanted}"
    sizes = [size for x in tokens for size in x.shape]
    if not all(isinstance(size, int) for size in sizes):
        return "a size is symbolic"
    if 0 in sizes:
        return "an array is empty"
    if any(axis is not None for x in tokens for axis in jax.typeof(x).sharding.spec):
        return "axes of type Explicit shard the arrays, so call it inside jax.shard_map"
    return None


def runs_alone(axes: MeshAxes) -> bool:
    """Returns whether a kernel gets the tokens of one device, as far as this code can know.

    XLA cannot partition a kernel: it would give each device the tokens of all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    named = {*axes.batch, *axes.heads}
    return all(
        kind == AxisType.Manual or size == 1 or name in named
        for name, kind, size in zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    )


def shapes_of_form(estimator: Estimator) -> ExponentialForm | str:
    """Returns the shapes of the form of the keys' features, or why no kernel can compute them."""
    feature_map = estimator.feature_map
    of_keys = functools.partial(type(feature_map).exponential_forms, side="key")
    form = jax.eval_shape(of_keys, feature_map, estimator.projection)
    if form is None:
        return (
            f"{type(feature_map).__name__} features are not exponentials that estimate exp(x . y)"
        )
    if form.rows.dtype != jnp.float32:
        return f"projection is {form.rows.dtype.name}"
    return form


def form_of(
    feature_map: FeatureMap, projection: ProjectionLike | None, side: Side
) -> ExponentialForm:
    """Returns the form of the features of queries or keys, with an axis of key heads."""
    form = feature_map.exponential_forms(projection, side=side)
    if form is None:
        raise TypeError(f"{type(feature_map).__name__} has no exponential form.")
    return form


def repeated(form: ExponentialForm, groups: int) -> ExponentialForm:
    """Repeats the arrays of each key head for each of its query heads."""
    return jax.tree.map(lambda x: jnp.repeat(x, groups, axis=0) if x.shape[0] > 1 else x, form)


def root_and_sign(call: Call) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the square root of the absolute scale, and the sign of the scale."""
    scale = jnp.asarray(call.logit_scale, jnp.float32)
    return jnp.sqrt(jnp.abs(scale)), jnp.sign(scale)


def query_factors(estimator: Estimator, call: Call) -> Float[Array, "B N T"]:
    """Returns logarithms of the factors that all weights of a query's features share, to base 2.

    Kernels leave them out. They matter beside exact weights.
    """
    of_queries, of_keys = (
        form_of(estimator.feature_map, estimator.projection, side) for side in SIDES
    )
    *_, length, num_heads, dim = call.query.shape
    num_key_heads = call.key.shape[-2]
    root, sign = root_and_sign(call)
    query = call.query.reshape(-1, length, num_key_heads, num_heads // num_key_heads, dim)
    query = query.astype(jnp.float32)
    # The kernels flag queries that are not finite. Without this, 0 * NaN would reach gradients
    # here. The features of very long ones vanish beside exact weights.
    query = jnp.where(jnp.isfinite(query), jnp.clip(query, -LARGEST_QUERY, LARGEST_QUERY), 0)
    query *= root * sign

    def of_heads(x: jax.Array) -> jax.Array:
        return x[None, None, :, None]

    stretched = query
    if of_queries.stretch is not None:
        matrix = jnp.broadcast_to(of_queries.stretch, (num_key_heads, dim, dim))
        highest = jax.lax.Precision.HIGHEST
        stretched = jnp.einsum("btkgi,kji->btkgj", query, matrix, precision=highest)
    if of_queries.center is not None:
        stretched -= of_heads(of_queries.center)
    factors = -0.5 * jnp.sum(jnp.square(stretched), axis=-1)
    for constant in (of_queries.constant, of_keys.constant):
        factors += 0 if constant is None else of_heads(constant)
    factors = (factors - math.log(of_queries.num_features)) * LOG2E
    return jnp.moveaxis(factors.reshape(-1, length, num_heads), 1, 2)


def to_base_2(
    log_weights: Float[Array, "B rows S"], *, hidden: float, least: float
) -> Float[Array, "B rows S"]:
    """Returns log weights to base 2, NaN where they are too large.

    Args:
      log_weights: Log weights of the keys.
      hidden: Number in place of minus infinity.
      least: Number in place of lower ones.
    """
    too_large = log_weights > float(jnp.finfo(jnp.float32).max) / 4  # Exponents would overflow.
    # A finite bias, however low, hides no key: equal biases of all keys change nothing.
    scaled = jnp.maximum(log_weights * LOG2E, least)
    scaled = jnp.where(log_weights == -jnp.inf, hidden, scaled)
    return jnp.where(too_large, jnp.nan, scaled)


def bfloat16_parts(x: Float[Array, "*shape"], count: int) -> tuple[Array, ...]:
    """Returns parts in bfloat16 that add up to a number, each with 8 more of its bits."""
    parts = []
    for _ in range(count):
        # Not by a conversion and its inverse, which XLA for GPUs leaves out.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x -= part
    return tuple(parts)


def without_x64() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which indices are int32 and constants float32, as kernels need."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(False)
    return jax.experimental.disable_x64()  # type: ignore[attr-defined]  # Before jax 0.8.0.


@contextlib.contextmanager
def no_forward_mode() -> Iterator[None]:
    """Raises an error that says what to do if a kernel is differentiated in forward mode."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" in str(error):
            raise TypeError(
                "The Pallas kernels can be differentiated in reverse mode, got a derivative in "
                'forward mode of random-feature attention; compute it with implementation="xla".'
            ) from error
        raise


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a function of kernels that has no gradient itself, because it gives one."""
    return function(*arrays)


def _forward(function: Callable[..., Any], *arrays: Any) -> tuple[Any, None]:
    return without_gradient(function, *arrays), None


def _backward(function: Callable[..., Any], kept: None, of_gradient: Any) -> Any:
    raise NotImplementedError(
        "The Pallas kernels can be differentiated once, got a second derivative of "
        'random-feature attention; compute it with implementation="xla".'
    )


without_gradient.defvjp(_forward, _backward)
