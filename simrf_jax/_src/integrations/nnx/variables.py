"""NNX variables for the arrays of adapters, and the module of those of learned features."""

from __future__ import annotations

from flax import nnx

from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations.flax_attention import Request
from simrf_jax._src.integrations.flax_versions import get_value, set_value


class RandomProjection(nnx.Variable):
    """The random projection W: part of the model's state and checkpoints, but not a parameter.

    Its metadata ``draw_options`` records how W was drawn: a ``simrf_jax.DrawOptions``, or one for
    each projection of a tuple, None where there is no W. ``redraw_projections`` reads it.
    """


class FeatureMapState(nnx.Variable):
    """The arrays of feature maps, such as calibrated ones: state of the model, not parameters."""


class LearnedRows(nnx.Param):
    """The parameters of learned features; ``wrt=LearnedRows`` trains only these."""


class Observer(nnx.Variable):
    """A record of an adapter's calls, for ``calibrate``, ``distillation_loss`` or a report.

    Its metadata ``after`` is a function of the value, a call and its attention that returns the
    next value.
    """

    def observe(self, request: Request, mechanism: RandomFeatureMechanism) -> None:
        """Updates the value with a call."""
        set_value(self, self.after(get_value(self), request, mechanism))


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
            calibration, **{name: getattr(self, name)[...] for name in Learned.axes_of_one}
        )
