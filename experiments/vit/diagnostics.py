"""How well random features stand in for softmax in a model, on its own queries and keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import simrf_jax
from simrf_jax.features.exponential import positive_log_features
from simrf_jax.models import ViT
from simrf_jax.models.blocks import Block

# Which draw a key is for, after those of training.
DIAGNOSTICS = 3

NAMES = ("attention_error", "feature_variance")


def check_images(num_images: int, num_test: int) -> None:
    """Refuses to look at more images than there are.

    Raises:
      ValueError: If the test set has fewer.
    """
    if num_images > num_test:
        raise ValueError(
            f"config.diagnostics.images must be at most {num_test}, all the images to test on, got "
            f"{num_images}."
        )


def columns(depth: int) -> tuple[str, ...]:
    """The columns of ``row``."""
    return tuple(x for name in NAMES for x in (name, *(_of_layer(name, i) for i in range(depth))))


def row(measured: dict[str, jax.Array]) -> dict[str, float]:
    """The mean over layers, and each layer, of what ``measure`` returns."""
    values: dict[str, float] = {}
    for name in NAMES:
        layers = jax.device_get(measured[name])
        values[name] = float(layers.mean())
        values |= {_of_layer(name, i): float(value) for i, value in enumerate(layers)}
    return values


def _of_layer(name: str, layer: int) -> str:
    return f"{name}/layer_{layer}"  # TensorBoard draws what has a name before the slash together.


def measure(
    params: nnx.State,
    projections: nnx.State,
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

    in the mean over images and heads. ``feature_variance`` is the relative variance of the kernel
    estimates over a few redraws of W,

    .. math:: \operatorname{Var}[\phi(q) \cdot \phi(k)] / e^{2 q \cdot k}

    in the median over images, heads and pairs of tokens. A mean would be that of a few pairs: the
    variance grows like :math:`e^{|q + k|^2}`. Where :math:`|q + k|` is above about 2, nearly all of
    it is in draws so rare that a few redraws have none, and what is measured is the spread of the
    others.

    Args:
      params: Parameters of a ViT with random features.
      projections: Its projections.
      key: Of the redraws, which are the same for all layers.
      images: ``[batch, height, width, channels]``.
      graphdef: The ViT without its arrays; scanned or not, and on any mesh.
      num_images: How many of the images to look at, the first ones.
      num_redraws: At least 2.

    Returns:
      The two, ``[depth]`` each.

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Sec. 4.2; Reid et al.,
      Simplex Random Features (ICML 2023), Eq. 10, for the variance.
    """
    model = nnx.merge(graphdef, params, projections)
    draws = _draw(key, model, num_redraws)
    # They are too few to be split over devices.
    images = jax.lax.with_sharding_constraint(images[:num_images], PartitionSpec())

    def look(block: Block, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        query, key, value, output, x = _record(block, x)
        error = output_error(query, key, value, output)
        variance = jnp.median(kernel_variances(query, key, draws))
        return x, {"attention_error": error, "feature_variance": variance}

    x = model.embed(images)
    if model.config.scan:
        layer, stacked = nnx.split(model.blocks)
        return jax.lax.scan(lambda x, state: look(nnx.merge(layer, state), x), x, stacked)[1]
    layers = []
    for block in model.blocks:
        x, measured = look(block, x)
        layers.append(measured)
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def output_error(
    query: jax.Array, key: jax.Array, value: jax.Array, output: jax.Array
) -> jax.Array:
    """Relative error of an output to that of softmax attention, in the mean over all heads.

    Args:
      query: ``[batch, T, heads, H]``.
      key: ``[batch, S, heads, H]``.
      value: ``[batch, S, heads, D]``.
      output: ``[batch, T, heads, D]``.
    """
    query, key, value, output = (x.astype(jnp.float32) for x in (query, key, value, output))
    with jax.default_matmul_precision("highest"):
        exact = jax.nn.dot_product_attention(query, key, value)
    error, norm = (jnp.linalg.norm(x, axis=(1, 3)) for x in (output - exact, exact))
    return jnp.mean(error / norm)


def kernel_variances(query: jax.Array, key: jax.Array, draws: jax.Array) -> jax.Array:
    """Relative variances of kernel estimates over draws of W, without bias.

    Args:
      query: ``[batch, T, heads, H]``; not scaled yet, as attention gets it.
      key: ``[batch, S, heads, H]``.
      draws: ``[draws, heads, num_features, H]``.

    Returns:
      ``[heads, batch, T, S]``.
    """
    ratios = jax.lax.map(lambda w: _kernel_ratio(query, key, w), draws)
    return jnp.var(ratios, axis=0, ddof=1)


def _kernel_ratio(query: jax.Array, key: jax.Array, projection: jax.Array) -> jax.Array:
    """The estimated softmax kernel over the exact one, ``[heads, batch, T, S]``."""
    q, k = (_heads_first(x) for x in (query, key))
    # [heads, batch, length, num_features]
    of_queries, of_keys = (jax.vmap(_log_features)(x, projection) for x in (q, k))
    shifts = [x.max(axis=-1, keepdims=True) for x in (of_queries, of_keys)]
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("nbth,nbsh->nbts", q, k, precision=highest)
    product = jnp.einsum(
        "nbtm,nbsm->nbts",
        jnp.exp(of_queries - shifts[0]),
        jnp.exp(of_keys - shifts[1]),
        precision=highest,
    )
    return product * jnp.exp(shifts[0] + shifts[1].mT - logits)


def _heads_first(x: jax.Array) -> jax.Array:
    """``[heads, batch, length, H]``, times the root of attention's scale."""
    return jnp.moveaxis(x.astype(jnp.float32), -2, 0) * x.shape[-1] ** -0.25


def _log_features(x: jax.Array, projection: jax.Array) -> jax.Array:
    features = positive_log_features(x, projection, kernel="softmax")
    return features.exponent + features.log_scale


def _draw(key: jax.Array, model: ViT, num_redraws: int) -> jax.Array:
    """Projections of one layer, drawn as the model's: ``[draws, heads, num_features, H]``."""
    c = model.config
    shape = (num_redraws, c.num_heads, c.num_features, c.width // c.num_heads)
    return simrf_jax.redraw_projections(
        jax.random.fold_in(key, DIAGNOSTICS),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        coupling=c.attention,
        block=c.block,
    )


def _record(block: Block, x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys, values and output of a block's attention, and the output of the block."""
    attend = block.attention.attention_fn
    seen: list[jax.Array] = []

    def record(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        output = attend(query, key, value, **options)
        seen.extend((query, key, value, output))
        return output

    block.attention.attention_fn = record
    x = block(x)
    return *seen, x
