"""NNX variables for the arrays of adapters."""

from __future__ import annotations

from flax import nnx


class RandomProjection(nnx.Variable):
    """The random projection W: part of the model's state and checkpoints, but no parameter.

    Its metadata ``draw_options`` says how W was drawn: a ``simrf_jax.DrawOptions``, or for a tuple
    of projections a tuple of as many, None where there is no W. ``redraw_projections`` reads it.
    """


class Calibration(nnx.Variable):
    """The arrays of a calibrated feature map: state of the model, but no parameter."""


class LearnedRows(nnx.Param):
    """The parameters of learned features, which ``wrt=LearnedRows`` trains and nothing else."""
