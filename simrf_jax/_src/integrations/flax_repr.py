"""Representations of the adapters in one line, for both Flax APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simrf_jax._src import one_line
from simrf_jax._src.features import FeatureMap, FeatureMapLike, as_feature_map
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.projections import DrawOptions

_HOLD_ARRAYS: dict[Any, type[FeatureMap]] = {"calibrated": Calibrated, "learned": Learned}
_ALWAYS_SHOWN = ("coupling", "block", "rotation", "norms")


def shown_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of an adapter as text: how W is drawn, and all non-default values.

    Args:
      fields: Fields by name, in the order to show them.
      defaults: Values to omit, by name.
    """
    return {
        name: one_line.shown(value)
        for name, value in fields.items()
        if name in _ALWAYS_SHOWN or name not in defaults or value != defaults[name]
    }


def name_of_map(feature_map: Any) -> Any:
    """Returns a feature map for display: by its name if it has one, without arrays."""
    if isinstance(feature_map, tuple | list):
        return tuple(map(name_of_map, feature_map))
    for name, kind in _HOLD_ARRAYS.items():
        if isinstance(feature_map, kind):
            return name
    if callable(feature_map) and not isinstance(feature_map, FeatureMap):
        return getattr(feature_map, "__name__", feature_map)
    return feature_map


def default_coupling(feature_maps: Sequence[FeatureMapLike]) -> Any:
    """Returns the default coupling of feature maps, one for each if they differ."""
    return _together([_coupling(feature_map) for feature_map in feature_maps])


def drawn_by(options: Sequence[DrawOptions | None]) -> dict[str, Any]:
    """Returns the coupling, row blocks, rotation and norms of draws, if there are any."""
    drawn = [one for one in options if one is not None]
    if not drawn:
        return {}
    return {name: _together([getattr(one, name) for one in drawn]) for name in _ALWAYS_SHOWN}


def _coupling(feature_map: FeatureMapLike) -> Any:
    if isinstance(feature_map, str) and feature_map in _HOLD_ARRAYS:
        return _HOLD_ARRAYS[feature_map].coupling
    try:
        return as_feature_map(feature_map).coupling
    except (TypeError, ValueError):
        return None  # A representation shows even values that a call will refuse.


def _together(values: list[Any]) -> Any:
    """Returns one value if all are equal, or else a tuple of them."""
    return values[0] if len(set(values)) == 1 else tuple(values)
