"""Calibration of feature maps on data like the queries and keys that they will see."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from simrf_jax._src import checks
from simrf_jax._src.calibration.fit import TILTS, Balance, Tilt, fit
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.features.calibrated import Calibrated


def calibrate(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    *,
    scale: Real[ArrayLike, ""] | None = None,
    center: bool = True,
    balance: Balance = True,
    tilt: Tilt | None = "log",
    query_mask: Bool[ArrayLike, "*batch T"] | None = None,
    key_mask: Bool[ArrayLike, "*batch S"] | None = None,
) -> Calibrated:
    """Fits positive features to queries and keys.

    Random features fail on the queries and keys of trained models for one reason: the vectors are
    long and far from isotropic. The fit reduces the variance and adds no bias: it subtracts the
    means, balances the covariances of queries and keys, and draws W from the Gaussian law that
    minimizes the mean log second moment of the estimates, all in closed form, for each key head.
    The minimum is for the means and the covariances of the data. Covariances are shrunk toward
    multiples of the identity, only slightly if there are many tokens.

    Calibrate on some data and use the map on other data: the estimates are unbiased for any
    queries and keys. Statistics of the batch at hand would let later tokens change earlier outputs.

    Args:
      query: Queries; each key head pools those of its N / K query heads.
      key: Keys, of any length. No gradient flows to either.
      scale: Multiplies the logits, as in attention; by default ``H ** -0.5``.
      center: True to subtract the means.
      balance: True for the matrix that makes the covariances of queries and keys equal and
        diagonal; ``"diagonal"`` for a diagonal matrix, which balances the variances of each
        coordinate; False for none.
      tilt: Law of W. ``"log"`` gives it the variance along each axis that minimizes the mean log
        second moment, ``"mean"`` the one that minimizes the mean second moment if x + y is
        Gaussian. ``"isotropic"`` gives all axes one variance. None leaves W unchanged.
      query_mask: False at queries that are padding.
      key_mask: False at keys that are padding.

    Returns:
      The feature map, with arrays for each key head, for attention of the same scale. It needs a W
      with Gaussian rows, the default of ``draw_projection``. Without centering, ``balance=False,
      tilt="isotropic"`` is FAVOR++ (OPRF), ``balance="diagonal", tilt="isotropic"`` is SADERF,
      ``balance=True, tilt="isotropic"`` is ADERF, and ``balance=False, tilt="log"`` is SDERF.

    Raises:
      TypeError: If queries or keys are not floating, a mask is not boolean, or a switch is neither
        True nor False.
      ValueError: If shapes do not match, there is no token, tokens are not finite or so large or
        small that the fit is not, or a name is unknown. Traced values are not checked.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = 2 * jax.random.normal(jax.random.key(0), (3, 4, 100, 8, 64))
      >>> q = q.at[..., 8:].multiply(0.1) + 1  # Like trained models: a few long axes and a mean.
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 128, 64)
      >>> calibrated = simrf_jax.calibrate(q[:2], k[:2])
      >>> exact = jax.nn.dot_product_attention(q[2:], k[2:], v[2:])
      >>> def error(feature_map):
      ...     out = simrf_jax.random_feature_attention(
      ...         q[2:], k[2:], v[2:], w, feature_map=feature_map
      ...     )
      ...     return float(((out - exact) ** 2).sum() / (exact**2).sum())
      >>> bool(error(calibrated) < 0.6 * error("positive"))
      True

    References:
      Likhosherstov et al., FAVOR#: Sharp Attention Kernel Approximations via New Classes of
      Positive Random Features (2023), https://arxiv.org/abs/2302.00787
    """
    check_options(center=center, balance=balance, tilt=tilt)
    query, key = check_tokens(query, key, scale, query_mask, key_mask)
    calibrated, queries, keys = _calibrate(
        query,
        key,
        query.shape[-1] ** -0.5 if scale is None else scale,
        query_mask,
        key_mask,
        center=bool(center),
        balance=balance,
        tilt=tilt,
    )
    for name, one in (("query", queries), ("key", keys)):
        check_moments(name, one)
    check_fitted(calibrated)
    return calibrated


def check_tokens(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    scale: Real[ArrayLike, ""] | None,
    query_mask: Bool[ArrayLike, "*batch T"] | None,
    key_mask: Bool[ArrayLike, "*batch S"] | None,
) -> tuple[Float[Array, "*batch T N H"], Float[Array, "*batch S K H"]]:
    """Returns queries and keys after checking all arrays of a fit; see ``calibrate``."""
    query, key = checks.floating("query", query), checks.floating("key", key)
    if min(query.ndim, key.ndim) < 3:
        raise ValueError(
            "query and key must be [..., length, heads, dim], got shapes "
            f"{query.shape} and {key.shape}."
        )
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query and key must have the same batch shape, got shapes {query.shape} and "
            f"{key.shape}."
        )
    num_heads, dim = query.shape[-2:]
    num_key_heads = key.shape[-2]
    if key.shape[-1] != dim or num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            "query and key must have the same head_dim, and the number of query heads must be a "
            f"multiple of the number of key heads, got shapes {query.shape} and {key.shape}."
        )
    if 0 in (math.prod(query.shape), math.prod(key.shape)):
        raise ValueError(f"There must be tokens, got shapes {query.shape} and {key.shape}.")
    for name, mask, x in (("query_mask", query_mask, query), ("key_mask", key_mask, key)):
        _check_mask(name, mask, x)
    if scale is not None:
        checks.scalar("scale", scale)
    return query, key


def check_moments(name: str, moments: Moments) -> None:
    """Raises ``ValueError`` if moments are known to be empty or not finite."""
    if not checks.are_finite(moments):
        raise ValueError(
            f"{name} and its squares must be finite at all tokens that are not padding."
        )
    if not checks.is_traced(moments) and not np.all(np.asarray(moments.num_vectors) > 0):
        raise ValueError(f"{name} must have a token that is not padding.")


def check_fitted(calibrated: Calibrated) -> None:
    """Raises ``ValueError`` if a calibration is known to have numbers that are not finite."""
    if not checks.are_finite(calibrated):
        raise ValueError(
            "Queries and keys must have covariances whose products fit in their floating type, got "
            "larger or smaller ones. Check the scale of both."
        )


def check_options(*, center: bool, balance: Balance, tilt: Tilt | None) -> None:
    """Accepts the options of a fit."""
    checks.boolean("center", center)
    if not isinstance(balance, bool | np.bool_ | str) or balance not in (True, False, "diagonal"):
        raise ValueError(f"balance must be True, False or 'diagonal', got {balance!r}.")
    checks.one_of("tilt", tilt, (*TILTS, None))


def _check_mask(name: str, mask: Bool[ArrayLike, " ..."] | None, x: Float[Array, " ..."]) -> None:
    if mask is None:
        return
    if jnp.result_type(mask) != jnp.bool:
        raise TypeError(f"{name} must be boolean, got {jnp.result_type(mask).name}.")
    if jnp.shape(mask) != x.shape[:-2]:
        raise ValueError(
            f"{name} must be [batch..., length] = {x.shape[:-2]}, got shape {jnp.shape(mask)}."
        )


@functools.partial(jax.jit, static_argnames=("center", "balance", "tilt"))
def _calibrate(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    scale: Real[ArrayLike, ""],
    query_mask: Bool[ArrayLike, "*batch T"] | None,
    key_mask: Bool[ArrayLike, "*batch S"] | None,
    *,
    center: bool,
    balance: Balance,
    tilt: Tilt | None,
) -> tuple[Calibrated, Moments, Moments]:
    queries, keys = moments(query, key, scale, query_mask, key_mask)
    return fit(queries, keys, center=center, balance=balance, tilt=tilt), queries, keys


def _whole(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Removes explicit mesh axes from an array, because sums over tokens would be ambiguous."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, jax.P()))


def scaled(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    scale: Real[ArrayLike, ""],
) -> tuple[Float[Array, "*batch T N H"], Float[Array, "*batch S K H"]]:
    """Returns queries and keys whose products are the logits, without gradients."""
    compute = np.promote_types(query.dtype, jnp.float32)
    query, key = jax.lax.stop_gradient((_whole(query), _whole(key)))
    scale = jnp.asarray(scale, compute)
    root = jnp.sqrt(jnp.abs(scale))
    return query.astype(compute) * (jnp.sign(scale) * root), key.astype(compute) * root


def moments(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    scale: Real[ArrayLike, ""],
    query_mask: Bool[ArrayLike, "*batch T"] | None = None,
    key_mask: Bool[ArrayLike, "*batch S"] | None = None,
) -> tuple[Moments, Moments]:
    """Returns the moments of queries and keys, scaled as attention scales them, by key heads."""
    query, key = scaled(query, key, scale)
    num_key_heads = key.shape[-2]
    # The query heads of a group are adjacent.
    *lead, num_heads, dim = query.shape
    query = query.reshape(*lead, num_key_heads, num_heads // num_key_heads, dim).swapaxes(-3, -2)
    real_queries = real_keys = None
    if query_mask is not None:
        real_queries = jnp.repeat(jnp.asarray(query_mask)[..., None], query.shape[-3], axis=-1)
    if key_mask is not None:
        real_keys = jnp.asarray(key_mask)
    return Moments.of(query, real_queries), Moments.of(key, real_keys)
