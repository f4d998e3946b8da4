"""Mean squared error of the angular hybrid estimate."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.mse import kernel_mse


def hybrid_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    num_weights: int,
    *,
    coupling: str,
    kernel: str = "softmax",
    log: bool = False,
) -> np.ndarray | np.float64:
    r"""Mean squared error :math:`E(\hat K(x, y) - K(x, y))^2` of the angular hybrid estimate.

    .. math::
        \mathrm{MSE} = E\hat\lambda^2\, \mathrm{MSE}_\text{hyperbolic}
        + E(1 - \hat\lambda)^2\, \mathrm{MSE}_\text{trigonometric}, \qquad
        E\hat\lambda^2 = a^2 + \frac{a (1 - a)}{n}, \qquad a = \frac{\theta_{x,y}}{\pi},

    and :math:`E(1 - \hat\lambda)^2` the same of 1 - a. Both bases and the weight are independent of
    each other, as ``draw_bipolar_projection`` draws them; then this holds for any coupling of the
    rows of each base. Where x or y is 0, the angle counts as a right one.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``; the leading shapes broadcast.
      num_features: Rows m of either base estimator.
      num_weights: Number n of random vectors that estimate the weight.
      coupling: How the rows of each base are coupled: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      kernel: ``"softmax"`` or ``"gaussian"``.
      log: Whether to return the logarithm, which does not overflow.

    Returns:
      float64 array of the broadcast leading shape. At x = y and x = -y the estimate is exact: 0, or
      -inf.

    Raises:
      TypeError: If ``num_features`` or ``num_weights`` is not an integer, x or y not real, or
        ``log`` not boolean.
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
      Choromanski et al., Hybrid Random Features (ICLR 2022), Theorem 3.1 and Lemma 3.2.
    """
    num_weights = checks.positive_int("num_weights", num_weights)
    log = checks.boolean("log", log)
    x, y = arguments.vectors(x, y)
    total: np.ndarray | np.float64 = np.float64(-np.inf)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for share, features in zip(
            _angular_weights(x, y), ("hyperbolic", "trigonometric"), strict=True
        ):
            second_moment = share * (share + (1 - share) / num_weights)
            log_mse = kernel_mse(
                x, y, num_features, coupling=coupling, features=features, kernel=kernel, log=True
            )
            total = np.logaddexp(total, np.log(second_moment) + log_mse)
        return total if log else np.exp(total)


def _angular_weights(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The angle over pi, and 1 less that, each to full relative accuracy."""
    x, y = _unit(x), _unit(y)
    apart, together = np.linalg.norm(x - y, axis=-1), np.linalg.norm(x + y, axis=-1)
    return 2 / np.pi * np.arctan2(apart, together), 2 / np.pi * np.arctan2(together, apart)


def _unit(x: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm == 0, 1, norm)
