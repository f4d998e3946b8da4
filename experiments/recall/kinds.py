"""Kinds of attention that the experiment compares, and models that have them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from flax import nnx

import simrf_jax
from experiments.char_lm.model import CharLM
from experiments.harness import config_fields
from experiments.swap.swapping import swapped
from simrf_jax.integrations.nnx import RandomFeatureAttention


@dataclasses.dataclass(frozen=True)
class Kind:
    """Random-feature attention of one kind.

    Attributes:
      label: Name in tables and figures.
      feature_map: Name of the feature map.
      has_band: True if the keys of a band are attended exactly.
      keys: ``"in_place"`` if some exact keys replace as many features, ``"on_top"`` if they are
        added to them, or None.
    """

    label: str
    feature_map: Literal["positive", "learned"]
    has_band: bool = False
    keys: Literal["in_place", "on_top"] | None = None

    @property
    def features_per_row(self) -> int:
        """Returns the number of features of a row of W; learned ones are pairs of exponentials."""
        return 2 if self.feature_map == "learned" else 1


KINDS = {
    "positive": Kind("positive features", "positive"),
    "learned": Kind("learned features", "learned"),
    "band_learned": Kind("band + learned features", "learned", has_band=True),
    "keys_learned": Kind("keys + learned features", "learned", keys="in_place"),
    "band_keys_learned": Kind("band + keys + learned features", "learned", True, "in_place"),
    "band_more_keys_learned": Kind(
        "band + more keys + learned features", "learned", True, "on_top"
    ),
}
LABELS = {"softmax": "softmax"} | {name: kind.label for name, kind in KINDS.items()}
# Colors of Okabe and Ito.
LOOKS: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#000000", "linestyle": "-.", "marker": "o"},
    "positive": {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    "learned": {"color": "#E69F00", "linestyle": ":", "marker": "^"},
    "band_learned": {"color": "#56B4E9", "linestyle": "-", "marker": "v"},
    "keys_learned": {"color": "#009E73", "linestyle": "--", "marker": "D"},
    "band_keys_learned": {"color": "#CC79A7", "linestyle": "-", "marker": "P"},
    "band_more_keys_learned": {"color": "#0072B2", "linestyle": "-", "marker": "X"},
}


def check_rows(field: str, attention: str, num_features: int, exact_keys: int) -> None:
    """Refuses features that are no whole rows of W; see ``config_fields.check_rows``."""
    if kind := KINDS.get(attention):
        replaced = exact_keys if kind.keys == "in_place" else 0
        config_fields.check_rows(field, num_features, replaced, kind.features_per_row, attention)


def make_model(
    vocabulary_size: int,
    attention: str,
    *,
    width: int,
    depth: int,
    num_heads: int,
    num_features: int,
    exact_keys: int,
    bandwidth: int,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Returns the model of ``experiments.char_lm`` with one of ``LABELS`` in each layer.

    Args:
      vocabulary_size: Number of different tokens.
      attention: Name of the attention. Models of the same key have the same other parameters.
      width: Width of the tokens.
      depth: Number of transformer layers.
      num_heads: Number of heads of a layer.
      num_features: Number of features of a head.
      exact_keys: Number of exact keys of a head, of attentions that have some.
      bandwidth: Number of tokens that the exact band looks back, of attentions that have one.
      rngs: Keys of the parameters and the projections.
    """
    unused: dict[str, Any] = {"num_features": 1, "coupling": "iid", "bandwidth": 0}
    sizes = {"width": width, "depth": depth, "num_heads": num_heads}
    model = CharLM(vocabulary_size, attention="softmax", **sizes, **unused, rngs=rngs)
    if attention == "softmax":
        return model
    kind = KINDS[attention]
    if kind.keys == "in_place":
        num_features -= exact_keys
    adapters = [
        RandomFeatureAttention(
            num_heads,
            width // num_heads,
            num_features // kind.features_per_row,
            feature_map=kind.feature_map,
            is_causal=True,
            exact_bandwidth=bandwidth if kind.has_band else None,
            exact_keys=simrf_jax.ExactKeys(exact_keys, by="score") if kind.keys else None,
            rngs=rngs,
        )
        for _ in range(depth)
    ]
    return swapped(model, adapters)
