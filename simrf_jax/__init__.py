"""Random-feature maps and random-feature attention in JAX.

A kernel becomes an inner product: K(x, y) = E[phi(x) . phi(y)].

- ``draw_projection``, ``project``: the random vectors W, coupled iid, orthogonally or as simplices.
- ``redraw_key``, ``redraw_projections``: new W for all layers and heads, on a schedule.
- ``positive_features``: phi. ``gaussian_kernel``, ``softmax_kernel``: the exact K beside it.
- ``random_feature_attention``: softmax attention in linear time.

What depends on Flax is imported by name: ``simrf_jax.integrations.nnx``,
``simrf_jax.integrations.linen``, ``simrf_jax.models``.
"""

from simrf_jax.attention import random_feature_attention
from simrf_jax.features import gaussian_kernel, positive_features, softmax_kernel
from simrf_jax.projections import draw_projection, project, redraw_key, redraw_projections

__version__ = "0.1.0"

__all__ = [
    "draw_projection",
    "gaussian_kernel",
    "positive_features",
    "project",
    "random_feature_attention",
    "redraw_key",
    "redraw_projections",
    "softmax_kernel",
]
