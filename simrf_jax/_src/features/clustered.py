"""Clustering-based hybrid features, with one base estimator for each pair of clusters.

The estimator of a pair is tuned to its two centers. With a spread of 0 it is exact there.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real, Shaped

from simrf_jax._src import checks
from simrf_jax._src.features.feature_map import FeatureMap, named, register
from simrf_jax._src.features.hybrid import weighted_sum
from simrf_jax._src.features.log_space import Kernel, LogFeatures, Side, half_squared_norm
from simrf_jax._src.projections import ProjectionLike, StructuredProjection, project


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClusteredProjection(StructuredProjection):
    """A projection together with the centers of the clusters of queries and of keys.

    Attributes:
      projection: W, ``[..., num_features, dim]``.
      query_centers: Centers of the clusters of queries.
      key_centers: Centers of the clusters of keys.
      spread: Standard deviation of a coordinate within a cluster, in the unit of the vectors, one
        number or one for each W of a stack. The base estimators are tuned to it. With 0 they are
        exact at the centers, but poor around a center with a coordinate near zero.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> simrf_jax.hybrid.ClusteredProjection(w, jnp.ones((3, 64)), jnp.ones((2, 64))).shape
      (130, 64)
    """

    expected = "a ClusteredProjection"
    projection: ProjectionLike
    query_centers: Float[Array, "*stack num_query_clusters dim"]
    key_centers: Float[Array, "*stack num_key_clusters dim"]
    spread: Real[ArrayLike, "*stack"] = 0.0

    def __post_init__(self) -> None:
        """Checks the spread, and broadcasts it to one for each W of a stack."""
        stack = jnp.shape(self.query_centers)[:-2]
        if jnp.ndim(self.spread) == 0:
            checks.scalar("spread", self.spread, sign="at least 0")
            if stack:
                object.__setattr__(self, "spread", jnp.full(stack, self.spread, self.dtype))
            return
        if jnp.shape(self.spread) != stack:
            raise ValueError(
                f"spread must be one number or have the leading axes {stack} of the centers, got "
                f"shape {jnp.shape(self.spread)}."
            )
        if not isinstance(self.spread, jax.core.Tracer):
            for one in np.ravel(self.spread):
                checks.scalar("spread", one, sign="at least 0")

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of W, ``[..., num_features, dim]``."""
        parts = (self.projection, self.query_centers, self.key_centers)
        w, *centers = map(np.shape, parts)
        if any(len(c) < 2 or (*c[:-2], c[-1]) != (*w[:-2], w[-1]) for c in centers):
            raise ValueError(
                "projection must be [..., num_features, dim], query_centers and key_centers "
                f"[..., clusters, dim], got {w}, {centers[0]} and {centers[1]}."
            )
        return w

    @property
    def dtype(self) -> jnp.dtype:
        """Returns the floating type of W."""
        return jnp.result_type(self.projection)


register(
    ClusteredProjection
)  # No constructor check, because a gradient may have a negative spread.


@named("clustered_hybrid")
@dataclasses.dataclass(frozen=True)
class ClusteredHybrid(FeatureMap, static=("kernel",)):
    r"""Clustering-based hybrid features.

    Each pair of a query cluster with center q and a key cluster with center r has a base estimator

    .. math::
        \hat K = \operatorname{Re} \frac1m \sum_i \exp\bigl(w_i \cdot (A x + A^{-1} y)
            - \tfrac12 (Ax)^2 - \tfrac12 (A^{-1} y)^2\bigr), \qquad
        A_{jj}^2 = -\operatorname{sgn}(q_j r_j) \sqrt{\frac{r_j^2 + s^2}{q_j^2 + s^2}},

    where s is the spread of the clusters. With s = 0 the estimator has no variance at (q, r). The
    weight of a pair of clusters is one for the queries and keys that are nearest to its centers and
    zero for all others. So exactly one base estimator applies to each pair of a query and a key,
    and the estimate is unbiased. W is a ``ClusteredProjection``. There are ``2 num_features
    num_query_clusters num_key_clusters`` features.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> from simrf_jax import hybrid
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 16, 3)
      >>> q, r = jnp.array([[1.0, -0.5, 0.3], [0.2, 0.2, 0.9]]), jnp.array([[0.8, 0.4, -0.6]])
      >>> p = hybrid.ClusteredProjection(w, q, r)
      >>> psi_1 = hybrid.ClusteredHybrid().features(q, p, side="query")
      >>> psi_2 = hybrid.ClusteredHybrid().features(r, p, side="key")
      >>> bool(jnp.allclose(psi_1 @ psi_2.T, simrf_jax.softmax_kernel(q, r), rtol=1e-5))
      True

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), clustering-based HRFs (HRF-C),
      https://arxiv.org/abs/2110.04367
    """

    projection_type = ClusteredProjection
    is_finite = True
    coupling = "orthogonal"
    kernel: Kernel = "softmax"

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: ClusteredProjection, *, side: Side
    ) -> LogFeatures:
        """Returns psi_1 of queries and psi_2 of keys.

        Raises:
          TypeError: If the projection is not a ``ClusteredProjection``.
          ValueError: If the shapes do not match.
        """
        projection = ClusteredProjection.of(projection)
        x = x.astype(np.promote_types(x.dtype, jnp.float32))
        queries = checks.floating("query_centers", projection.query_centers)
        keys = checks.floating("key_centers", projection.key_centers)
        for name, centers in (("query_centers", queries), ("key_centers", keys)):
            if centers.ndim != 2 or centers.shape[0] < 1 or centers.shape[1] != x.shape[-1]:
                raise ValueError(
                    f"{name} must be [clusters, {x.shape[-1]}], at least one, got {centers.shape}."
                )
        mine = queries if side == "query" else keys
        offsets = x[..., None, :] - jnp.broadcast_to(mine, (*x.shape[:-1], *mine.shape))
        nearest = jnp.argmin(jnp.sum(jnp.square(offsets), axis=-1), axis=-1)[..., None]
        bases = []
        log_scale = jnp.zeros_like(x[..., :1])
        for i in range(queries.shape[0]):
            for j in range(keys.shape[0]):
                base = _centered(x, projection, queries[i], keys[j], side, self.kernel)
                member = nearest == (i if side == "query" else j)
                # The zero weight is applied in log space, because the features of an estimator that
                # is tuned to other clusters may overflow here.
                bases.append(base._replace(exponent=jnp.where(member, base.exponent, -jnp.inf)))
                log_scale = jnp.where(member, base.log_scale, log_scale)
        return weighted_sum(bases, [jnp.ones_like(log_scale) for _ in bases], log_scale)


def _centered(
    x: Float[Array, "*batch dim"],
    projection: ClusteredProjection,
    query_center: Float[Array, " dim"],
    key_center: Float[Array, " dim"],
    side: Side,
    kernel: Kernel,
) -> LogFeatures:
    r"""Returns features of :math:`\mathbb E\, e^{w \cdot (Ax + A^{-1} y)}`, tuned to two centers.

    A is diagonal. An entry is real where the two centers differ in sign, which gives positive
    features, and imaginary where they agree, which gives trigonometric ones. The moduli of the
    entries minimize the mean of :math:`|Ax + A^{-1}y|^2` over the two clusters.
    """
    q, r = query_center.astype(x.dtype), key_center.astype(x.dtype)
    longest = jnp.maximum(jnp.max(jnp.abs(q)), jnp.max(jnp.abs(r)))
    least = jnp.finfo(x.dtype).eps * (1 + longest)  # Keeps the ratio finite at a coordinate of 0.
    variance = jnp.square(jnp.asarray(projection.spread, x.dtype)) + least**2
    ratio = (jnp.square(r) + variance) / (jnp.square(q) + variance)
    modulus = ratio ** (0.25 if side == "query" else -0.25)
    real = q * r < 0

    def along(v: Shaped[Array, " dim"]) -> Shaped[Array, "*batch dim"]:
        return jnp.broadcast_to(v, x.shape)

    scaled = x * along(modulus)
    growth = jnp.where(along(real), scaled, 0)
    turn = jnp.where(along(real), 0, scaled)
    exponent, angles = (project(part, projection.projection) for part in (growth, turn))
    log_scale = half_squared_norm(turn, x.dtype) - half_squared_norm(growth, x.dtype)
    if kernel == "gaussian":
        log_scale -= half_squared_norm(x, x.dtype)
    log_scale -= 0.5 * math.log(angles.shape[-1])
    values = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return LogFeatures(jnp.concatenate([exponent, exponent], axis=-1), log_scale, values)
