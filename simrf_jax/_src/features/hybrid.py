"""Hybrid random features: base estimators of a kernel, with weights that are estimated too.

Where one base estimator has all the weight, the hybrid equals that estimator. Queries and keys have
different feature maps, psi_1 and psi_2. Both are real.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from simrf_jax._src import checks
from simrf_jax._src.features.log_space import SIDES, LogFeatures, Side


def hybrid_features(
    bases: Sequence[Float[ArrayLike, "*batch _"]],
    weights: Sequence[Float[ArrayLike, "*batch _"]],
    offsets: Sequence[float],
    *,
    side: Side,
) -> Float[Array, "*batch num_features"]:
    r"""Returns the features of a hybrid estimator from those of its base estimators and weights.

    .. math::
        \hat K = \sum_{k=1}^p \hat\lambda^k \hat K^k
            + \Bigl(1 - \sum_{k=1}^p \hat\lambda^k\Bigr) \hat K^{p+1},
        \quad \hat K^k = \phi_1^k(x) \cdot \phi_2^k(y),
        \quad \hat\lambda^k = a_k + \rho_1^k(x) \cdot \rho_2^k(y)

    equals :math:`\Psi_1(x) \cdot \Psi_2(y)`. The paper's features are complex. Here the query side
    carries all negative signs, and both sides are real. The hybrid is unbiased if every base
    estimator is unbiased and the weights are independent of all base estimators.

    Args:
      bases: Features of the p + 1 base estimators on this side, :math:`\phi^k`, each
        ``[..., m_k]``.
      weights: Features of the p weights on this side, :math:`\rho^k`, each ``[..., n_k]``.
      offsets: The p constants :math:`a_k`, numbers; the same on both sides.
      side: ``"query"`` for :math:`\Psi_1`, ``"key"`` for :math:`\Psi_2`.

    Returns:
      Array ``[..., num_features]``, in time and memory O(sum of m_k n_k).

    Raises:
      TypeError: If an array is not floating or an offset is not a number.
      ValueError: If the numbers of bases, weights and offsets or the leading shapes of the arrays
        do not match, or the side is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from simrf_jax import hybrid
      >>> def psi(side):  # K1 = 2 * 3, K2 = 5 * 7, lambda = 0.5 + 0.1 * 2
      ...     one, two, rho = {"query": (2.0, 5.0, 0.1), "key": (3.0, 7.0, 2.0)}[side]
      ...     bases = [jnp.array([one]), jnp.array([two])]
      ...     return hybrid.hybrid_features(bases, [jnp.array([rho])], [0.5], side=side)
      >>> print(f"{psi('query') @ psi('key'):.4f}, {0.7 * 6 + 0.3 * 35:.4f}")
      14.7000, 14.7000

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Eq. 8 and Lemma 2.3,
      https://arxiv.org/abs/2110.04367
    """
    arrays = [checks.vectors("each of bases", base) for base in bases]
    rhos = [checks.vectors("each of weights", rho) for rho in weights]
    dtype = jnp.result_type(*arrays, *rhos) if arrays else jnp.float32
    compute = np.promote_types(dtype, jnp.float32)
    as_log = []
    for base in arrays:
        zero = jnp.zeros((*base.shape[:-1], 1), compute)
        as_log.append(LogFeatures(zero, zero, base.astype(compute)))
    wide = [rho.astype(compute) for rho in rhos]
    return hybrid_log_features(as_log, wide, offsets, side=side).evaluate(dtype)


def hybrid_log_features(
    bases: Sequence[LogFeatures],
    weights: Sequence[Float[Array, "*batch _"]],
    offsets: Sequence[float],
    *,
    side: Side,
) -> LogFeatures:
    """Returns ``hybrid_features`` in log space, with the same arguments."""
    checks.one_of("side", side, SIDES)
    if not len(bases) - 1 == len(weights) == len(offsets) > 0:
        raise ValueError(
            "A hybrid must have p weights, p offsets and p + 1 bases, with p at least 1; "
            f"got {len(weights)}, {len(offsets)} and {len(bases)}."
        )
    if not all(isinstance(offset, numbers.Real) for offset in offsets):
        raise TypeError(f"offsets must be numbers, got {offsets!r}.")
    leading = [base.log_scale.shape[:-1] for base in bases] + [rho.shape[:-1] for rho in weights]
    if len(set(leading)) > 1:
        raise ValueError(f"bases and weights must have one leading shape, got {leading}.")

    def with_offset(offset: float, *rhos: Float[Array, "*batch _"]) -> Float[Array, "*batch _"]:
        constant = jnp.full_like(rhos[0][..., :1], offset if side == "query" else 1.0)
        return jnp.concatenate([constant, *rhos] if offset else rhos, axis=-1)

    coefficients = [with_offset(a, rho) for a, rho in zip(offsets, weights, strict=True)]
    sign = -1 if side == "query" else 1
    coefficients.append(with_offset(1 - sum(offsets), *(sign * rho for rho in weights)))
    return weighted_sum(bases, coefficients)


def weighted_sum(
    bases: Sequence[LogFeatures],
    coefficients: Sequence[Float[Array, "*batch _"]],
    log_scale: Float[Array, "*batch 1"] | None = None,
) -> LogFeatures:
    r"""Returns the features of :math:`\sum_k (\omega_1^k(x) \cdot \omega_2^k(y)) \hat K^k(x, y)`.

    Args:
      bases: Features :math:`\phi^k` of one side, each ``[..., m_k]``.
      coefficients: Features :math:`\omega^k` of the weights on the same side, each ``[..., n_k]``.
      log_scale: Common scale of the result; by default the scale of the first base.

    Returns:
      The concatenation of all :math:`\omega^k \otimes \phi^k`, ``[..., sum of m_k n_k]``.
    """
    log_scale = bases[0].log_scale if log_scale is None else log_scale
    exponents, values = [], []
    for base, omega in zip(bases, coefficients, strict=True):
        value = jnp.ones_like(base.exponent) if base.values is None else base.values
        # Not by broadcasting: XLA's CPU backend may crash in its gradient's sums (jax 0.10.2).
        product = jnp.einsum("...a,...b->...ab", omega, value, precision=jax.lax.Precision.HIGHEST)
        exponent = base.exponent + (base.log_scale - log_scale)
        exponents.append(jnp.broadcast_to(exponent[..., None, :], product.shape))
        values.append(product)
    return LogFeatures(_flat(exponents), log_scale, _flat(values))


def _flat(products: list[Float[Array, "*batch _ _"]]) -> Float[Array, "*batch _"]:
    flat = [p.reshape(*p.shape[:-2], p.shape[-2] * p.shape[-1]) for p in products]
    return jnp.concatenate(flat, axis=-1)
