"""Transformer layers and their stack, unrolled or scanned, with or without rematerialization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.variables import Observer
from simrf_jax._src.models.config import ViTConfig
from simrf_jax._src.models.layers import DROPOUT_MASK, dropout, sum_bias_gradients_by_products

Policy = Callable[..., bool]
Keys = tuple[jax.Array, ...]

# Values that a layer keeps for its gradient in addition to its input, for each ``ViTConfig.remat``
# except "none". The layer recomputes the rest.
POLICIES: dict[str, Policy] = {
    "block": jax.checkpoint_policies.nothing_saveable,
    # Keeps products with parameters and the dropout masks, which are small and slow to draw.
    # Products inside attention have batch dimensions and are not kept.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(DROPOUT_MASK),
    ),
}

DROPOUTS = 3  # In a layer: after the attention and after both dense layers of the MLP.


class TransformerLayer(nnx.Module):
    """One pre-norm transformer layer: attention, then an MLP, each with a residual connection.

    Args:
      config: Shape and arithmetic of the model.
      rngs: PRNG streams ``params`` (parameters) and ``features`` (projections), or a default one.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        c = config
        dtype = jnp.dtype(c.dtype)
        xavier = nnx.initializers.xavier_uniform()
        attention_fn: Callable[..., jax.Array]
        if c.attention == "exact":
            attention_fn = nnx.dot_product_attention  # Calls jax.nn.dot_product_attention.
        else:
            attention_fn = RandomFeatureAttention(
                c.num_heads,
                c.width // c.num_heads,
                c.num_features,
                feature_map=c.feature_map,
                coupling=c.attention,
                block=c.block,
                sequence_axis=c.sequence_axis,
                batch_axis=c.batch_axis,
                head_axis=c.head_axis,
                implementation=c.implementation,
                exact_bandwidth=c.exact_bandwidth,
                rngs=rngs,
            )
        self.attention_norm = nnx.LayerNorm(c.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            c.num_heads,
            c.width,
            dtype=dtype,
            kernel_init=xavier,
            attention_fn=attention_fn,
            decode=False,
            rngs=rngs,
        )
        for projection in (self.attention.query, self.attention.key, self.attention.value):
            sum_bias_gradients_by_products(projection)
        self.mlp_norm = nnx.LayerNorm(c.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.mlp_in = nnx.Linear(c.width, c.mlp_dim, kernel_init=xavier, dtype=dtype, rngs=rngs)
        self.mlp_out = nnx.Linear(c.mlp_dim, c.width, kernel_init=xavier, dtype=dtype, rngs=rngs)
        self.dropout_rate = c.dropout_rate

    def __call__(self, x: jax.Array, dropout_keys: Keys | None = None) -> jax.Array:
        """Returns the layer's output, ``[batch, length, width]``.

        Args:
          x: Tokens ``[batch, length, width]``.
          dropout_keys: ``DROPOUTS`` PRNG keys; None for no dropout.
        """

        def drop(y: jax.Array, number: int) -> jax.Array:
            if dropout_keys is None:
                return y
            return dropout(y, dropout_keys[number], self.dropout_rate)

        x = x + drop(self.attention(self.attention_norm(x)), 0)
        hidden = drop(nnx.gelu(self.mlp_in(self.mlp_norm(x))), 1)
        return x + drop(self.mlp_out(hidden), 2)


def make_layers(config: ViTConfig, *, rngs: nnx.Rngs) -> list[TransformerLayer] | TransformerLayer:
    """Returns the transformer layers of a model.

    Args:
      config: Shape of the model.
      rngs: PRNG streams ``params`` and ``features``, or a default one.

    Returns:
      A list of ``config.depth`` layers; with ``config.scan`` one ``TransformerLayer`` that holds
      the arrays of all layers, stacked along a new first axis.
    """
    layers = [TransformerLayer(config, rngs=rngs) for _ in range(config.depth)]
    if not config.scan:
        return layers
    states = [nnx.state(layer) for layer in layers]
    return nnx.merge(nnx.graphdef(layers[0]), jax.tree.map(lambda *x: jnp.stack(x), *states))


def apply_layers(
    layers: list[TransformerLayer] | TransformerLayer,
    x: jax.Array,
    *,
    config: ViTConfig,
    rngs: nnx.Rngs | None,
) -> jax.Array:
    """Applies all transformer layers to tokens, one after the other.

    Args:
      layers: The layers that ``make_layers`` returned for the same config.
      x: Tokens ``[batch, length, width]``.
      config: Config of the model, which determines what to keep for the gradient.
      rngs: PRNG stream ``dropout``; None for no dropout.

    Returns:
      Tokens ``[batch, length, width]``.
    """
    keys, impl = None, None
    if rngs is not None:
        drawn = jnp.stack([rngs.dropout() for _ in range(config.depth * DROPOUTS)])
        # A recomputed layer reuses its keys. JAX's key-reuse checker would report that for typed
        # keys, so the layers get raw key data.
        keys = jax.random.key_data(drawn.reshape(config.depth, DROPOUTS))
        impl = jax.random.key_impl(drawn)

    if isinstance(layers, TransformerLayer):
        graphdef, stacked = nnx.split(layers)
        apply = _function(graphdef, config, impl)
        x, observed = jax.lax.scan(lambda x, layer: apply(x, *layer), x, (stacked, keys))
        nnx.update(layers, observed)
        return x
    for number, layer in enumerate(layers):
        graphdef, state = nnx.split(layer)
        apply = _function(graphdef, config, impl)
        x, observed = apply(x, state, None if keys is None else keys[number])
        nnx.update(layer, observed)
    return x


def _function(
    graphdef: nnx.GraphDef, config: ViTConfig, impl: Any
) -> Callable[..., tuple[jax.Array, nnx.State]]:
    """Returns a layer as a function of its input, its state and the data of its dropout keys.

    The function returns the output, and what the observers of ``calibrate``, ``attention_report``
    and the like have seen, which is empty outside of them.
    """

    def apply(x: jax.Array, state: Any, keys: jax.Array | None) -> tuple[jax.Array, nnx.State]:
        layer = nnx.merge(graphdef, state)
        wrapped = None
        if keys is not None:
            wrapped = tuple(jax.random.wrap_key_data(key, impl=impl) for key in keys)
        return layer(x, wrapped), nnx.state(layer, Observer)

    if config.remat == "none":
        return apply
    # XLA does not merge computations inside a loop with others outside, so a scan does not need
    # prevent_cse.
    return jax.checkpoint(apply, policy=POLICIES[config.remat], prevent_cse=not config.scan)
