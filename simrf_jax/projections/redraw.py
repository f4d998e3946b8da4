"""The redraw schedule: which W every layer and head has at every training step."""

from __future__ import annotations

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax import checks
from simrf_jax.projections.dense import draw_stack
from simrf_jax.projections.structured import StructuredProjection


def redraw_key(key: jax.Array, step: int | jax.Array, *, interval: int) -> jax.Array:
    """The key in force at a training step: ``fold_in(key, step // interval)``.

    Args:
      key: A typed PRNG key, the same for the whole run.
      step: Training step, counted from 0; may be traced.
      interval: Steps between redraws; 0 never redraws.

    Returns:
      A typed PRNG key that changes every ``interval`` steps. It depends on nothing else, so a run
      that is resumed, or moved to other devices, goes on with the same projections.

    Raises:
      TypeError: If the key is not typed or a number is no integer.
      ValueError: If a number is negative.

    Example:
      >>> import jax, simrf_jax
      >>> key = jax.random.key(0)
      >>> a, b, c = (simrf_jax.redraw_key(key, step, interval=100) for step in (100, 199, 200))
      >>> bool(a == b), bool(b == c)
      (True, False)
    """
    checks.typed_key(key)
    checks.integer("interval", interval, least=0)
    if not isinstance(step, jax.Array):
        checks.integer("step", step, least=0)
    return jax.random.fold_in(key, step // interval if interval else 0)


def redraw_projections(
    key: jax.Array,
    projections: Any,
    *,
    coupling: str,
    block: str = "regular",
    rotation: str = "haar",
    norms: str = "chi",
    num_sweeps: int | None = None,
) -> Any:
    """Draws new values for all the projections of a model, in one batched call.

    Leaf number ``l``, in the order of ``jax.tree.leaves`` (a layer, in most models), and the
    projection number ``h`` inside it (a head) are drawn from ``fold_in(fold_in(key, l), h)``.

    Args:
      key: A typed PRNG key; see ``redraw_key``.
      projections: A pytree of arrays (or ``jax.ShapeDtypeStruct``) ``[..., num_features, dim]``:
        the ``random_features`` collection of a Linen model, or
        ``nnx.state(model, RandomProjection)`` of an NNX one.
      coupling: As ``draw_projection``. The arrays do not tell how they were drawn, so say it.
      block: As ``draw_projection``.
      rotation: As ``draw_projection``.
      norms: As ``draw_projection``.
      num_sweeps: As ``draw_projection``.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      TypeError: As ``draw_projection``; if a leaf is a ``FastProjection`` or a hybrid's.
      ValueError: As ``draw_projection``; if a leaf is no array of at least two axes.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> layers = {"a": jnp.zeros((12, 130, 64)), "b": jnp.zeros((130, 64))}
      >>> layers = simrf_jax.redraw_projections(jax.random.key(0), layers, coupling="orthogonal")
      >>> layers["a"].shape, layers["b"].shape
      ((12, 130, 64), (130, 64))
    """
    checks.typed_key(key)
    options = {
        "coupling": coupling,
        "block": block,
        "rotation": rotation,
        "norms": norms,
        "num_sweeps": num_sweeps,
    }
    leaves, treedef = jax.tree.flatten(
        projections, is_leaf=lambda node: isinstance(node, StructuredProjection)
    )
    groups = collections.defaultdict(list)  # (num_features, dim, dtype) -> leaf numbers
    for layer, leaf in enumerate(leaves):
        if isinstance(leaf, StructuredProjection):
            raise TypeError(
                f"A {type(leaf).__name__} cannot be redrawn here; draw it again from "
                "redraw_key(key, step, interval=...), by jax.vmap over keys for a stack."
            )
        if len(getattr(leaf, "shape", ())) < 2:
            raise ValueError(f"A projection is an array [..., num_features, dim], got {leaf!r}.")
        groups[(*leaf.shape[-2:], leaf.dtype)].append(layer)
    drawn: list[Any] = [None] * len(leaves)
    for (num_features, dim, dtype), layers in groups.items():
        counts = [math.prod(leaves[layer].shape[:-2]) for layer in layers]
        layer_of_each = np.repeat(layers, counts)
        head_of_each = np.concatenate([np.arange(count) for count in counts])
        fold_in_both = functools.partial(_fold_in_both, key)
        keys = jax.vmap(fold_in_both)(jnp.asarray(layer_of_each), jnp.asarray(head_of_each))
        stack = draw_stack(keys, num_features, dim, dtype=dtype, **options)
        parts = jnp.split(stack, np.cumsum(counts)[:-1])
        for layer, part in zip(layers, parts, strict=True):
            drawn[layer] = part.reshape(leaves[layer].shape)
    return jax.tree.unflatten(treedef, drawn)


def _fold_in_both(key: jax.Array, layer: jax.Array, head: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, layer), head)
