"""Floating-point operations of a training step, and the peak of the devices."""

from __future__ import annotations

from jax.sharding import Mesh

from simrf_jax.models import ViTConfig

# bfloat16 operations a second of one JAX device, by jax.Device.device_kind. Those of a chip are 46
# (v2) and 123 (v3) tera: Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural
# Networks (CACM 2020); 275 (v4), 197 (v5e), 459 (v5p) and 918 (v6e): cloud.google.com/tpu/docs/v4
# and so on. A device is one of the two cores of a chip up to v3, and a whole chip from v4 on.
PEAK_FLOPS = {
    "TPU v2": 46e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def peak(mesh: Mesh) -> float | None:
    """Returns the peak bfloat16 FLOP/s of all devices of a mesh, or None if it is not known."""
    one = PEAK_FLOPS.get(mesh.devices.flat[0].device_kind)
    return None if one is None else one * mesh.size


def train_flops(model: ViTConfig) -> int:
    """Counts operations in the matrix products of a forward and a backward pass for one image.

    The gradient of a product takes two more of its size, one where an operand needs no gradient:
    the images, and the projections W. What is elementwise, the optimizer, redraws, products that
    a step takes once for all images, and what ``remat`` computes again do not count, so that the
    rate is that of the model's own work.

    XLA's cost analysis is no replacement: it counts the body of a scan once.

    Args:
      model: Shape of the ViT.

    Returns:
      Number of operations, two for each multiplication and addition.

    Example:
      >>> f"{train_flops(ViTConfig.named('B/16', attention='exact')):.3g}"
      '1.05e+11'

    References:
      Chowdhery et al., PaLM: Scaling Language Modeling with Pathways (JMLR 2023), App. B, for the
      utilization of a model's FLOPs.
    """
    c, tokens = model, model.num_tokens
    patches = tokens - (c.pooling == "token")
    dense = tokens * c.width * (4 * c.width + 2 * c.mlp_dim)
    attention, projection = _attention_products(c)
    embedding = patches * c.patch_size**2 * c.channels * c.width
    head = c.width * c.num_classes
    return 2 * (3 * (c.depth * (dense + attention) + head) + 2 * (c.depth * projection + embedding))


def _attention_products(c: ViTConfig) -> tuple[int, int]:
    """Counts multiplications of a layer's attention, and those by constants such as W apart."""
    if c.attention == "exact":
        return 2 * c.num_tokens**2 * c.width, 0
    # The queries read a column more, the denominator, which adds up without a product.
    products = c.num_features * (2 * c.width + c.num_heads)
    if c.exact_bandwidth is not None:
        # Chunks of keys are added with that column. Beside them, each query has products with the
        # keys and with the values in its band.
        products += c.num_features * c.num_heads
        products += 2 * min(2 * c.exact_bandwidth + 1, c.num_tokens) * c.width
    constants = 2 * c.num_features
    if c.feature_map == "calibrated":
        constants += c.width // c.num_heads  # The matrix of keys; W holds that of queries.
    return c.num_tokens * products, c.num_tokens * constants * c.width
