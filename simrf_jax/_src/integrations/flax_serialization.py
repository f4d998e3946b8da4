"""Bytes and state dicts of ``flax.serialization`` for all records of the library with arrays.

Flax itself handles NamedTuples, such as ``AttentionState``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
from flax import serialization

from simrf_jax._src.attention import Mechanism
from simrf_jax._src.attention.estimator import KeyChoice
from simrf_jax._src.features import FeatureMap
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.projections import StructuredProjection
from simrf_jax._src.projections.fast import FastRows


def _derived(kind: type[Any]) -> Iterator[type[Any]]:
    """Yields the classes of the library that derive from one."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("simrf_jax."):
            yield one
            yield from _derived(one)


RECORDS = {
    ExponentialForm,
    FastRows,
    KeyChoice,
    *itertools.chain(*map(_derived, (FeatureMap, Mechanism, StructuredProjection))),
}


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
