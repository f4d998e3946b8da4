"""Bytes and state dicts of ``flax.serialization`` for projections and feature maps of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import serialization

from simrf_jax.features import BipolarProjection
from simrf_jax.features.calibrated import Calibrated
from simrf_jax.features.learned import Learned
from simrf_jax.projections import WeightedProjection


def _register_serialization(cls: type[Any], parts: tuple[str, ...]) -> None:
    """Lets ``flax.serialization`` write and read the parts of a dataclass."""

    def to_state_dict(record: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(record, name)) for name in parts}

    def from_state_dict(record: Any, state: dict[str, Any]) -> Any:
        read = {
            name: serialization.from_state_dict(getattr(record, name), state[name], name=name)
            for name in parts
        }
        return dataclasses.replace(record, **read)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


_register_serialization(BipolarProjection, ("hyperbolic", "trigonometric", "weights"))
_register_serialization(WeightedProjection, ("rows", "log_weights"))
for _map in (Calibrated, Learned):
    _register_serialization(_map, tuple(field.name for field in dataclasses.fields(_map)))
