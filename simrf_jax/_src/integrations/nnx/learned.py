"""The parameters of learned features in NNX."""

from __future__ import annotations

from flax import nnx

from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations.nnx.variables import LearnedRows


class LearnedMap(nnx.Module):
    """The parameters of learned features; see ``simrf_jax.feature_maps.Learned``.

    Args:
      start: The map that they start at.
    """

    def __init__(self, start: Learned):
        self.query_rows = LearnedRows(start.query_rows)
        self.key_rows = LearnedRows(start.key_rows)
        self.query_offsets = LearnedRows(start.query_offsets)
        self.key_offsets = LearnedRows(start.key_offsets)
        self.log_weights = LearnedRows(start.log_weights)

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
