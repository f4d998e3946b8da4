"""Bytes and state dicts of ``flax.serialization`` for all records of the library with arrays.

Flax itself handles NamedTuples, such as ``AttentionState``.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import serialization

from simrf_jax._src import attention, features, projections
from simrf_jax._src.attention.estimator import KeyChoice
from simrf_jax._src.features import (
    bipolar,
    calibrated,
    clustered,
    exponential,
    folded,
    generalized,
    learned,
    trigonometric,
)
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.projections.fast import FastRows

RECORDS: tuple[type[Any], ...] = (
    bipolar.AngularHybrid,
    bipolar.GaussianHybrid,
    calibrated.Calibrated,
    clustered.ClusteredHybrid,
    exponential.Hyperbolic,
    exponential.OptimalPositive,
    exponential.Positive,
    features.Custom,
    folded.Folded,
    generalized.Elu,
    generalized.Relu,
    learned.Learned,
    trigonometric.Phase,
    trigonometric.Trigonometric,
    FastRows,
    projections.Projection,
    features.BipolarProjection,
    features.ClusteredProjection,
    ExponentialForm,
    attention.Band,
    attention.Blend,
    attention.RandomFeatureMechanism,
    KeyChoice,
)


def _parts(record: Any) -> tuple[dict[str, Any], Any]:
    """Returns the fields of a record that are not part of its structure, and the structure."""
    named, structure = jax.tree_util.tree_flatten_with_path(
        record, is_leaf=lambda node: node is not record
    )
    return {path[0].name: part for path, part in named}, structure


def _to_state_dict(record: Any) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in _parts(record)[0].items()}


def _from_state_dict(record: Any, state: dict[str, Any]) -> Any:
    parts, structure = _parts(record)
    if parts.keys() != state.keys():
        raise ValueError(
            f"The state of a {type(record).__name__} must have the fields {[*parts]}, got "
            f"{[*state]}."
        )
    read = [
        serialization.from_state_dict(part, state[name], name=name) for name, part in parts.items()
    ]
    return jax.tree.unflatten(structure, read)


for _kind in RECORDS:
    serialization.register_serialization_state(_kind, _to_state_dict, _from_state_dict)
