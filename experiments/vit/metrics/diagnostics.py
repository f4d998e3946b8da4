"""Error of a model's random features against softmax, on its own queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import simrf_jax
from experiments.harness.mistakes import UserError
from simrf_jax._src.features import FeatureMap, FeatureMapLike, as_feature_map
from simrf_jax._src.integrations.nnx.adapter import in_state
from simrf_jax._src.models.transformer import TransformerLayer
from simrf_jax.integrations.nnx import RandomProjection
from simrf_jax.models import ViT

# The number of the draw of the redraws, after those of training.
DIAGNOSTICS = 3

NAMES = ("attention_error", "feature_variance")


class Seen(NamedTuple):
    """The arguments, the feature map and the output of a layer's attention.

    Attributes:
      query: ``[batch, T, heads, H]``, not scaled yet.
      key: ``[batch, S, heads, H]``.
      value: ``[batch, S, heads, D]``.
      feature_map: The map with its arrays, if it has any.
      output: ``[batch, T, heads, D]``.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    feature_map: FeatureMap
    output: jax.Array


def check_images(num_images: int, num_evaluated: int) -> None:
    """Refuses to look at more images than there are.

    Raises:
      UserError: If an evaluation has fewer.
    """
    if num_images > num_evaluated:
        raise UserError(
            f"config.diagnostics.images must be at most {num_evaluated}, all the images of an "
            f"evaluation, got {num_images}."
        )


def columns(depth: int) -> tuple[str, ...]:
    """Returns the columns of ``row``."""
    return tuple(x for name in NAMES for x in (name, *(_of_layer(name, i) for i in range(depth))))


def row(measured: dict[str, jax.Array]) -> dict[str, float]:
    """Returns the mean over layers, and each layer, of the arrays of ``measure``."""
    values: dict[str, float] = {}
    for name in NAMES:
        layers = jax.device_get(measured[name])
        values[name] = float(layers.mean())
        values |= {_of_layer(name, i): float(value) for i, value in enumerate(layers)}
    return values


def _of_layer(name: str, layer: int) -> str:
    return f"{name}/layer_{layer}"  # TensorBoard draws what has a name before the slash together.


def measure(
    model: tuple[nnx.State, ...],
    key: jax.Array,
    images: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    num_images: int,
    num_redraws: int,
) -> dict[str, jax.Array]:
    r"""Compares random features with softmax on the queries and keys of every layer.

    ``attention_error`` is that of the output with the model's own projections,

    .. math:: \|\hat A V - A V\|_F / \|A V\|_F

    in the mean over images and heads. ``feature_variance`` is the variance of the attention
    weights when W is redrawn, in the same mean,

    .. math:: \sum_{ts} \operatorname{Var}[\hat A_{ts}] / \|A\|_F^2

    estimated from a few redraws, without bias. Weights are kernel estimates over the sum of their
    row. Of the estimates as they are, a few redraws say nothing once training has made queries and
    keys long: their relative variance grows like :math:`e^{|q + k|^2}`, and nearly all of it is in
    draws too rare to be among a few.

    Args:
      model: States of a ViT with random features, as ``TrainState.model``.
      key: PRNG key of the redraws, which are the same for all layers.
      images: ``[batch, height, width, channels]``.
      graphdef: The ViT without its arrays; scanned or not, and on any mesh.
      num_images: Number of images to measure, from the first one on.
      num_redraws: Number of redraws, at least 2.

    Returns:
      Dictionary of ``attention_error`` and ``feature_variance``, ``[depth]`` each.

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Sec. 4.2.
    """
    vit = nnx.merge(graphdef, *model)
    draws = _draw(key, vit, num_redraws)

    def compare(seen: Seen) -> dict[str, jax.Array]:
        variance = weight_variance(
            seen.query,
            seen.key,
            draws,
            feature_map=seen.feature_map,
            exact_bandwidth=vit.config.exact_bandwidth,
        )
        return {"attention_error": output_error(seen), "feature_variance": variance}

    # They are too few to be split over devices.
    images = jax.lax.with_sharding_constraint(images[:num_images], PartitionSpec())
    return jax.lax.map(compare, _record_layers(vit, images))


def output_error(seen: Seen) -> jax.Array:
    """Returns the relative error of an output to softmax attention, averaged over all heads."""
    exact = jnp.einsum(
        "btns,bsnd->btnd",
        _softmax_weights(seen.query, seen.key),
        seen.value.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    error, norm = (jnp.linalg.norm(x, axis=(1, 3)) for x in (seen.output - exact, exact))
    return jnp.mean(error / norm)


def weight_variance(
    query: jax.Array,
    key: jax.Array,
    draws: jax.Array,
    *,
    feature_map: FeatureMapLike = "positive",
    exact_bandwidth: int | None = None,
) -> jax.Array:
    """Returns the relative variance of attention weights over draws of W, averaged over heads.

    Args:
      query: ``[batch, T, heads, H]``.
      key: ``[batch, S, heads, H]``.
      draws: ``[draws, heads, num_features, H]``.
      feature_map: Feature map of the layer.
      exact_bandwidth: Distance over which attention is exact, or None.
    """
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    exact = _softmax_weights(query, key)
    batch, length, heads, _ = key.shape
    # With these values the output is the weights.
    one_hot = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))

    def estimate(w: jax.Array) -> jax.Array:
        return simrf_jax.random_feature_attention(
            query, key, one_hot, w, feature_map=feature_map, exact_bandwidth=exact_bandwidth
        )

    estimated = jax.lax.map(estimate, draws)
    variances = jnp.var(estimated, axis=0, ddof=1)
    return jnp.mean(variances.sum(axis=(1, 3)) / jnp.square(exact).sum(axis=(1, 3)))


def _softmax_weights(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the weights of softmax attention, float32 ``[batch, T, heads, S]``."""
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    logits = jnp.einsum("btnh,bsnh->btns", query, key, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(logits * query.shape[-1] ** -0.5)


def _draw(key: jax.Array, model: ViT, num_redraws: int) -> jax.Array:
    """Draws W as the model draws that of a layer, ``[draws, heads, num_features, H]``."""
    projections = nnx.state(model, RandomProjection)
    first, *_ = jax.tree.leaves(projections, is_leaf=lambda x: isinstance(x, RandomProjection))
    c = model.config
    shape = (num_redraws, c.num_heads, c.num_features, c.width // c.num_heads)
    return simrf_jax.redraw_projections(
        jax.random.fold_in(key, DIAGNOSTICS),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        options=first.draw_options,
    )


def _record_layers(model: ViT, images: jax.Array) -> Seen:
    """Returns what ``_record`` sees in each layer, stacked."""
    x = model.embed(images)
    if isinstance(model.blocks, TransformerLayer):
        layer, stacked = nnx.split(model.blocks)
        return jax.lax.scan(lambda x, state: _record(nnx.merge(layer, state), x), x, stacked)[1]
    layers = []
    for block in model.blocks:
        x, seen = _record(block, x)
        layers.append(seen)
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def _record(block: TransformerLayer, x: jax.Array) -> tuple[jax.Array, Seen]:
    """Returns the output of a layer, and what its attention sees."""
    attend: Any = block.attention.attention_fn
    feature_map = as_feature_map(in_state(attend.feature_map))
    seen: list[Seen] = []

    def record(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        output = attend(query, key, value, **options)
        seen.append(Seen(query, key, value, feature_map, output))
        return output

    block.attention.attention_fn = record
    return block(x), seen[0]
