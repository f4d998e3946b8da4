"""Mixture proposals that fit the pairs of queries and keys to which attention gives weight."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, Real

from simrf_jax._src import checks, one_line
from simrf_jax._src.calibration.api import check_tokens, scaled
from simrf_jax._src.calibration.fit import log_optimal_variance, log_second_moment
from simrf_jax._src.features.calibrated import Calibrated, in_coordinates

LOGGER = logging.getLogger("simrf_jax")
NUM_STEPS = 20
_MESSAGE = (
    "fit_mixture: key head %d of %d: mean log second moment: map alone %.3g; mixture at most %.3g"
)


class Mixture(NamedTuple):
    """A mixture proposal for each key head.

    Attributes:
      feature_map: Calibrated map whose tilt suits the pairs around each center.
      centers: Centers of the rows of W, ``[K, num_centers, H]``, for ``draw_mixture_projection``.
    """

    feature_map: Calibrated
    centers: Float[Array, "K num_centers H"]

    def __repr__(self) -> str:
        return one_line.representation(self)


def fit_mixture(
    prng_key: Key[Array, ""],
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    num_centers: int,
    *,
    scale: Real[ArrayLike, ""] | None = None,
    calibration: Calibrated | None = None,
    is_causal: bool = False,
    query_mask: Bool[ArrayLike, "*batch T"] | None = None,
    key_mask: Bool[ArrayLike, "*batch S"] | None = None,
    keys_per_query: int = 4,
    exact_bandwidth: SupportsIndex | None = None,
) -> Mixture:
    r"""Fits a mixture of rows to queries and keys, for each key head.

    Each query draws keys by its attention weights. The sums :math:`\tilde v = \tilde x + \tilde y`
    of these pairs, in the coordinates of the calibrated map, fall into clusters with the centers
    :math:`\mu_c`: k-means, 20 steps of Lloyd's algorithm from a random choice of pairs. With the
    rows of W drawn around the :math:`\Sigma^{-1/2} \mu_c`, in shares :math:`\pi_c`, one row's
    relative second moment is at most

    .. math::
        \min_c \frac{1}{\pi_c} \prod_l \frac{1 + \rho_l}{2 \sqrt{\rho_l}}
        e^{\rho_l (\tilde v_l - \mu_{cl})^2}, \qquad \rho_l = \frac{1}{2 \Sigma_l - 1}.

    The tilt :math:`\Sigma` minimizes the mean log of this bound: it is that of ``calibrate`` for
    the spread around the centers. It replaces the tilt of the map, which is for the spread of all
    pairs.

    Fit on some data and use the mixture on other data, as with ``calibrate``. The estimates are
    unbiased for any queries and keys. The time and the memory of the fit grow with T S, like those
    of exact attention. Heads are fitted one after the other. For each head, the logger
    ``simrf_jax`` gets a line at level INFO with the mean over pairs of the log second moment of
    estimates from one row relative to the kernel, in nats: for the map alone, and the bound above.

    Args:
      prng_key: A typed PRNG key.
      query: Queries; each key head pools those of its N / K query heads.
      key: Keys. No gradient flows to either.
      num_centers: Number of clusters, at most that of pairs. One for every eight features works
        well.
      scale: Multiplies the logits, as in attention; by default ``H ** -0.5``.
      calibration: Feature map that ``calibrate`` fitted with this scale, or None to change only the
        tilt.
      is_causal: True if query t sees only the keys 0 to t.
      query_mask: False at queries that are padding.
      key_mask: False at keys that are padding.
      keys_per_query: Number of pairs for each query.
      exact_bandwidth: Distance over which attention sees keys exactly, or None. Features do not
        estimate the weights of such pairs, so these pairs are ignored. If fewer pairs than centers
        are left, the other centers are zeros.

    Returns:
      ``Mixture``, the feature map and the centers.

    Raises:
      TypeError: If queries or keys are not floating, a size is not an integer, a mask is not
        boolean, or the calibration is not a ``Calibrated``.
      ValueError: If shapes do not match, there is no token, there are fewer pairs than centers, or
        queries or keys are not finite. Traced values are not checked.

    Example:
      >>> import jax, simrf_jax
      >>> from simrf_jax.calibration import draw_mixture_projection, fit_mixture
      >>> q, k, v = 2 * jax.random.normal(jax.random.key(0), (3, 4, 100, 8, 64))
      >>> calibration = simrf_jax.calibrate(q, k)
      >>> mixture = fit_mixture(jax.random.key(1), q, k, 16, calibration=calibration)
      >>> mixture.centers.shape
      (8, 16, 64)
      >>> draw = lambda key, centers: draw_mixture_projection(key, centers, 128)
      >>> w = jax.vmap(draw)(jax.random.split(jax.random.key(2), 8), mixture.centers)
      >>> out = simrf_jax.random_feature_attention(q, k, v, w, feature_map=mixture.feature_map)
      >>> out.shape
      (4, 100, 8, 64)
    """
    checks.typed_key(prng_key)
    query, key = check_tokens(query, key, scale, query_mask, key_mask)
    num_centers = checks.positive_int("num_centers", num_centers)
    keys_per_query = checks.positive_int("keys_per_query", keys_per_query)
    is_causal = checks.boolean("is_causal", is_causal)
    if exact_bandwidth is not None:
        exact_bandwidth = checks.integer("exact_bandwidth", exact_bandwidth, least=0)
    num_heads, dim = key.shape[-2:]
    if calibration is None:
        calibration = Calibrated.identity(num_heads, dim, np.promote_types(key.dtype, jnp.float32))
    if not isinstance(calibration, Calibrated):
        raise TypeError(f"calibration must be a Calibrated, got {type(calibration).__name__}.")
    if jnp.shape(calibration.variances) != (num_heads, dim):
        raise ValueError(
            f"calibration must be for {num_heads} key heads of dim {dim}, got variances of shape "
            f"{jnp.shape(calibration.variances)}."
        )
    _check_pairs(query[..., 0].size // num_heads * keys_per_query, num_centers)
    group = query.shape[-2] // num_heads
    mixtures = []
    for head, own_key in enumerate(jax.random.split(prng_key, num_heads)):
        mixture, num_queries, nats = _fit_head(
            own_key,
            query[..., group * head : group * (head + 1), :],
            key[..., head : head + 1, :],
            dim**-0.5 if scale is None else scale,
            jax.tree.map(lambda leaf, head=head: leaf[head], calibration),
            query_mask,
            key_mask,
            num_centers=num_centers,
            is_causal=is_causal,
            keys_per_query=keys_per_query,
            exact_bandwidth=exact_bandwidth,
        )
        if not checks.is_traced(num_queries):
            _check_pairs(int(num_queries) * keys_per_query, num_centers)
        if not checks.are_finite(mixture):
            raise ValueError("Queries or keys are not finite, so no mixture can be fitted.")
        mixtures.append(mixture)
        if LOGGER.isEnabledFor(logging.INFO) and not isinstance(nats, jax.core.Tracer):
            LOGGER.info(_MESSAGE, head + 1, num_heads, *nats.tolist())
    return jax.tree.map(lambda *heads: jnp.stack(heads), *mixtures)


def _check_pairs(num_pairs: int, num_centers: int) -> None:
    """Raises ``ValueError`` if there are fewer pairs than centers."""
    if num_pairs < num_centers:
        raise ValueError(
            "num_centers must be at most the number of pairs of a key head without padding, "
            f"{num_pairs}, got {num_centers}."
        )


@functools.partial(
    jax.jit, static_argnames=("num_centers", "is_causal", "keys_per_query", "exact_bandwidth")
)
def _fit_head(
    prng_key: Key[Array, ""],
    query: Float[Array, "*batch T G H"],
    key: Float[Array, "*batch S 1 H"],
    scale: Real[ArrayLike, ""],
    calibration: Calibrated,
    query_mask: Bool[ArrayLike, "*batch T"] | None,
    key_mask: Bool[ArrayLike, "*batch S"] | None,
    *,
    num_centers: int,
    is_causal: bool,
    keys_per_query: int,
    exact_bandwidth: int | None,
) -> tuple[Mixture, Int[Array, ""], Float[Array, " 2"]]:
    """Returns the mixture of one key head, its number of queries, and mean log second moments.

    Padding does not count as a query. The moments are those without and with the mixture.
    """
    query, key = scaled(query, key, scale)
    length, num_keys = query.shape[-3], key.shape[-3]
    x = query.reshape(-1, *query.shape[-3:])
    y = key.reshape(-1, num_keys, key.shape[-1])
    visible = jnp.ones((len(y), length, num_keys), bool)
    if query_mask is not None:
        visible &= jnp.asarray(query_mask).reshape(-1, length, 1)
    if key_mask is not None:
        visible &= jnp.asarray(key_mask).reshape(-1, 1, num_keys)
    if is_causal:
        visible &= jnp.tri(length, num_keys, dtype=bool)[None]
    pairs_key, centers_key = jax.random.split(prng_key)
    sums, is_pair = _draw_sums(
        pairs_key, x, y, calibration, visible, keys_per_query, exact_bandwidth
    )
    centers, mean_square = _cluster(centers_key, sums, is_pair, num_centers)
    variances = log_optimal_variance(mean_square)
    mixture = Mixture(
        dataclasses.replace(calibration, variances=variances),
        centers / jnp.sqrt(variances)[None],
    )
    num_pairs = jnp.maximum(jnp.sum(is_pair), 1).astype(sums.dtype)
    alone = jnp.sum(jnp.square(sums), axis=0) / num_pairs
    nats = [
        log_second_moment(calibration.variances, alone),
        jnp.log(num_centers) + log_second_moment(variances, mean_square),
    ]
    num_queries = jnp.sum(jnp.any(visible, axis=-1)) * query.shape[-2]
    return mixture, num_queries, jnp.stack(nats)


def _draw_sums(
    prng_key: Key[Array, ""],
    x: Float[Array, "batch T G H"],
    y: Float[Array, "batch S H"],
    calibration: Calibrated,
    visible: Bool[Array, "batch T S"],
    keys_per_query: int,
    exact_bandwidth: int | None,
) -> tuple[Float[Array, "pairs H"], Bool[Array, " pairs"]]:
    """Returns sums of queries and keys drawn by attention, and whether features estimate them."""
    logits = jnp.einsum("btgh,bsh->btgs", x, y, precision=jax.lax.Precision.HIGHEST)
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    shape = (keys_per_query, *logits.shape[:-1])
    drawn = jax.random.categorical(prng_key, logits[None], shape=shape)
    sequence = jnp.arange(len(y))[None, :, None, None]
    sums = in_coordinates(x, calibration, "query")[None]
    sums = sums + in_coordinates(y, calibration, "key")[sequence, drawn]
    is_pair = jnp.broadcast_to(jnp.any(visible, axis=-1)[None, :, :, None], shape)
    if exact_bandwidth is not None:
        positions = jnp.arange(x.shape[1])[None, None, :, None]
        is_pair &= jnp.abs(drawn - positions) > exact_bandwidth
    is_pair = is_pair.ravel()
    # Padding may hold anything.
    return jnp.where(is_pair[:, None], sums.reshape(len(is_pair), -1), 0), is_pair


def _cluster(
    prng_key: Key[Array, ""],
    points: Float[Array, "n H"],
    counts: Bool[Array, " n"],
    num_centers: int,
) -> tuple[Float[Array, "num_centers H"], Float[Array, " H"]]:
    """Returns centers of the points where ``counts``, and the mean squares around the nearest ones.

    The method is Lloyd's algorithm.
    """
    weights = counts.astype(points.dtype)
    num_points = jnp.maximum(jnp.sum(weights), 1)
    shares = weights / num_points
    first = jax.random.choice(prng_key, points, (num_centers,), replace=False, p=shares)

    def members(centers: Float[Array, "c H"]) -> Float[Array, "n c"]:
        products = jnp.einsum("nh,ch->nc", points, centers, precision=jax.lax.Precision.HIGHEST)
        nearest = jnp.argmax(products - 0.5 * jnp.sum(centers**2, axis=-1)[None], axis=-1)
        return jax.nn.one_hot(nearest, num_centers, dtype=points.dtype) * weights[:, None]

    def step(_: Int[Array, ""], centers: Float[Array, "c H"]) -> Float[Array, "c H"]:
        own = members(centers)
        sizes = jnp.sum(own, axis=0)[:, None]
        sums = jnp.einsum("nc,nh->ch", own, points, precision=jax.lax.Precision.HIGHEST)
        # A cluster without points keeps its center.
        return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1), centers)

    centers = jax.lax.fori_loop(0, NUM_STEPS, step, first)
    nearest = jnp.einsum(
        "nc,ch->nh", members(centers), centers, precision=jax.lax.Precision.HIGHEST
    )
    squares = jnp.square(points - nearest) * weights[:, None]
    return centers, jnp.sum(squares, axis=0) / num_points
