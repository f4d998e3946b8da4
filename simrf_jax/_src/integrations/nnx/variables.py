"""NNX variables for the arrays of adapters."""

from __future__ import annotations

from flax import nnx


class RandomProjection(nnx.Variable):
    """The random projection W: part of the model's state and checkpoints, but not a parameter.

    Its metadata ``draw_options`` records how W was drawn: a ``simrf_jax.DrawOptions``, or one for
    each projection of a tuple, None where there is no W. ``redraw_projections`` reads it.
    """


class Calibration(nnx.Variable):
    """The arrays of a calibrated feature map: state of the model, but not parameters."""


class LearnedRows(nnx.Param):
    """The parameters of learned features; ``wrt=LearnedRows`` trains only these."""
