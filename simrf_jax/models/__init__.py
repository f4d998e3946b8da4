"""Models built on random-feature attention."""

from simrf_jax.models.config import ATTENTIONS, ViTConfig
from simrf_jax.models.vit import ViT

__all__ = ["ATTENTIONS", "ViT", "ViTConfig"]
