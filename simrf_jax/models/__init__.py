"""Models built on random-feature attention."""

from simrf_jax.models.vit import ATTENTIONS, ViT, ViTConfig

__all__ = ["ATTENTIONS", "ViT", "ViTConfig"]
