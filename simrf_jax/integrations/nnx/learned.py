"""The parameters of learned features in NNX."""

from __future__ import annotations

from flax import nnx

from simrf_jax.features.calibrated import Calibrated
from simrf_jax.features.learned import Learned


class LearnedRows(nnx.Module):
    """The parameters of learned features; see ``simrf_jax.feature_maps.Learned``.

    Args:
      start: The map that they start at.
    """

    def __init__(self, start: Learned):
        self.query_rows = nnx.Param(start.query_rows)
        self.key_rows = nnx.Param(start.key_rows)
        self.query_offsets = nnx.Param(start.query_offsets)
        self.key_offsets = nnx.Param(start.key_offsets)
        self.log_weights = nnx.Param(start.log_weights)

    def feature_map(self, calibration: Calibrated) -> Learned:
        """Returns the map with these parameters."""
        return Learned(
            calibration,
            self.query_rows[...],
            self.key_rows[...],
            self.query_offsets[...],
            self.key_offsets[...],
            self.log_weights[...],
        )
