"""What all feature maps share: the kernels they estimate, and their form in log space."""

from __future__ import annotations

from typing import NamedTuple

import jax

KERNELS = ("gaussian", "softmax")


class LogFeatures(NamedTuple):
    """A positive feature map in log space: phi = exp(exponent + log_scale).

    The two parts stay apart because attention drops what all the features of a query share: adding
    a large ``log_scale`` to ``exponent`` only to subtract it again would cost digits.

    Attributes:
      exponent: Array ``[..., num_features]``.
      log_scale: Array ``[..., 1]``.
    """

    exponent: jax.Array
    log_scale: jax.Array
