"""Models built on random-feature attention."""

from simrf_jax._src.models.config import ViTConfig
from simrf_jax._src.models.layers import dropout, sum_bias_gradients_by_products
from simrf_jax._src.models.vit import ViT

__all__ = ["ViT", "ViTConfig", "dropout", "sum_bias_gradients_by_products"]
