"""Mean squared error of the angular hybrid estimate."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features import Kernel
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.mse import Features, kernel_mse


def hybrid_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    num_weights: int,
    *,
    coupling: ClosedFormCoupling,
    kernel: Kernel = "softmax",
    log: bool = False,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the mean squared error of the angular hybrid estimate of a kernel.

    .. math::
        \mathrm{MSE} = E(\hat K(x, y) - K(x, y))^2
        = E\hat\lambda^2\, \mathrm{MSE}_\text{hyperbolic}
        + E(1 - \hat\lambda)^2\, \mathrm{MSE}_\text{trigonometric}, \qquad
        E\hat\lambda^2 = a^2 + \frac{a (1 - a)}{n}, \qquad a = \frac{\theta_{x,y}}{\pi},

    Here :math:`\hat\lambda` is the estimate of the weight from n random vectors, and
    :math:`\theta_{x,y}` is the angle between x and y, which counts as a right angle if x or y is 0.
    :math:`E(1 - \hat\lambda)^2` is the same expression with 1 - a in place of a. Both base
    estimators and the weight are independent of each other, as ``draw_bipolar_projection`` draws
    them. The formula then holds for any coupling of the rows of each base estimator.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``. The leading shapes of x and y broadcast.
      num_features: Number of rows m of either base estimator.
      num_weights: Number n of random vectors that estimate the weight.
      coupling: Coupling of the rows of each base estimator: ``"iid"``, ``"orthogonal"``,
        ``"simplex"`` or ``"cross_polytope"``.
      kernel: Kernel that is estimated: ``"softmax"`` or ``"gaussian"``.
      log: If true, return the logarithm, which does not overflow.

    Returns:
      float64 array of the broadcast leading shape. At x = y and x = -y the estimate is exact, and
      the result is 0, or -inf if ``log``.

    Raises:
      TypeError: If ``num_features`` or ``num_weights`` is not an integer, x or y is not real, or
        ``log`` is not Boolean.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        a number is less than 1, or the shapes do not match.

    Example:
      >>> import numpy as np
      >>> x = np.array([1.0, 0.0])
      >>> for angle in (0.1, 1.5, 3.0):
      ...     y = np.array([np.cos(angle), np.sin(angle)])
      ...     print(f"{hybrid_mse(x, y, 16, 8, coupling='orthogonal'):.5f}")
      0.05662
      0.08851
      0.00112

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Theorem 3.1 and Lemma 3.2,
      https://arxiv.org/abs/2110.04367
    """
    num_weights = checks.positive_int("num_weights", num_weights)
    log = checks.boolean("log", log)
    x, y = arguments.vectors(x, y)
    total: np.ndarray | np.float64 = np.float64(-np.inf)
    bases: tuple[Features, ...] = ("hyperbolic", "trigonometric")
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for share, features in zip(_angular_weights(x, y), bases, strict=True):
            second_moment = share * (share + (1 - share) / num_weights)
            log_mse = kernel_mse(
                x, y, num_features, coupling=coupling, features=features, kernel=kernel, log=True
            )
            total = np.logaddexp(total, np.log(second_moment) + log_mse)
        return total if log else np.exp(total)


def _angular_weights(
    x: Float64[np.ndarray, "*#batch dim"], y: Float64[np.ndarray, "*#batch dim"]
) -> tuple[
    Float64[np.ndarray, "*#batch"] | np.float64, Float64[np.ndarray, "*#batch"] | np.float64
]:
    """Returns a, the angle divided by pi, and 1 - a, each to full relative accuracy."""
    x, y = _unit(x), _unit(y)
    apart, together = np.linalg.norm(x - y, axis=-1), np.linalg.norm(x + y, axis=-1)
    return 2 / np.pi * np.arctan2(apart, together), 2 / np.pi * np.arctan2(together, apart)


def _unit(x: Float64[np.ndarray, "*batch dim"]) -> Float64[np.ndarray, "*batch dim"]:
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm == 0, 1, norm)
