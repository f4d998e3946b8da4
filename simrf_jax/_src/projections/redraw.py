"""The redraw schedule, which determines the W of every layer and head at every training step."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Integer, Key, Shaped

from simrf_jax._src import checks
from simrf_jax._src.projections.record import DrawOptions, agreed
from simrf_jax._src.projections.structured import is_structured


def redraw_key(
    key: Key[Array, ""], step: int | Integer[ArrayLike, ""], *, interval: int
) -> Key[Array, ""]:
    """Returns the key in force at a training step, ``fold_in(key, step // interval)``.

    Args:
      key: A typed PRNG key, the same for the whole run.
      step: Training step, counted from 0: an integer, or an integer array without axes, which may
        be traced. The value of a traced step cannot be checked: if it is negative, or follows 2**32
        redraws or more, the key is that of another step.
      interval: Steps between redraws; 0 never redraws.

    Returns:
      A typed PRNG key that changes every ``interval`` steps. It depends on nothing else, so a run
      that is resumed, or moved to other devices, continues with the same projections.

    Raises:
      TypeError: If the key is not typed or a number is not an integer.
      ValueError: If a number is negative, or step // interval is 2**32 or more, because
        ``jax.random.fold_in`` takes 32 bits.

    Example:
      >>> import jax, simrf_jax
      >>> key = jax.random.key(0)
      >>> a, b, c = (simrf_jax.redraw_key(key, step, interval=100) for step in (100, 199, 200))
      >>> bool(a == b), bool(b == c)
      (True, False)
    """
    checks.typed_key(key)
    interval = checks.integer("interval", interval, least=0)
    if isinstance(step, jax.core.Tracer):
        return jax.random.fold_in(key, _traced_redraws(step, interval))
    step = checks.integer("step", step, least=0)
    redraws = step // interval if interval else 0
    if redraws >= 2**32:
        raise ValueError(
            "step // interval must be less than 2**32, because jax.random.fold_in takes 32 "
            f"bits, got {step} // {interval}."
        )
    return jax.random.fold_in(key, redraws)


def _traced_redraws(step: Integer[Array, ""], interval: int) -> Integer[Array, ""] | int:
    """Returns step // interval, 0 for an interval of 0."""
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step must be one integer, got {step.dtype.name} of shape {step.shape}.")
    # JAX would wrap an interval that the step's type cannot hold.
    if not 0 < interval <= jnp.iinfo(step.dtype).max:
        return 0
    return step // jnp.asarray(interval, step.dtype)


def redraw_projections(
    key: Key[Array, ""],
    projections: Any,
    *,
    options: DrawOptions | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Draws new values for all projections of a model.

    A projection with draw options is redrawn with these options. They are found in the attribute
    ``draw_options`` of a pytree node above the projection: a ``DrawOptions`` or, for a node that
    holds a tuple of projections, a tuple of the same length. The variables of both Flax adapters
    are such nodes, and so are ``Projection`` and ``BipolarProjection``.

    Projection number ``h`` of leaf number ``l`` is drawn from ``fold_in(fold_in(key, l), h)``. The
    leaves are numbered in the order of ``jax.tree.leaves``. In most models a leaf is a layer, and
    the projections in it are its heads. With a key that is not a threefry key, they are drawn one
    after the other.

    Args:
      key: A typed PRNG key; see ``redraw_key``.
      projections: A pytree of arrays (or ``jax.ShapeDtypeStruct``) ``[..., num_features, dim]``, of
        ``Projection``, with weights if the options draw weights, and of ``BipolarProjection`` of
        arrays. This can be the ``random_features`` collection of a Linen model, or
        ``nnx.state(model, RandomProjection)`` of an NNX model.
      options: Options for projections without draw options, such as bare arrays. The others must
        have been drawn with the same options.
      mesh: Mesh whose devices each draw an equal share of the heads. By default every device draws
        all heads. Values differ only by rounding. With several processes, call this inside
        ``jax.jit``, and over Explicit axes inside ``jax.set_mesh``.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      TypeError: If the key is not typed, ``options`` is not a ``DrawOptions`` or ``mesh`` is not a
        ``jax.sharding.Mesh``, or if a leaf cannot be drawn from a key: a ``ClusteredProjection``,
        whose centers were fitted, a ``Projection`` whose weights are not those of the options, or
        one with fast rows but no draw options.
      ValueError: If a projection was drawn with other options than those given, if none are given
        and a projection has none, if a leaf is not an array of at least two axes, or if
        ``draw_projection`` raises it for these sizes and options.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> layers = {"a": jnp.zeros((12, 130, 64)), "b": jnp.zeros((130, 64))}
      >>> options = simrf_jax.DrawOptions(coupling="orthogonal")
      >>> layers = simrf_jax.redraw_projections(jax.random.key(0), layers, options=options)
      >>> layers["a"].shape, layers["b"].shape
      ((12, 130, 64), (130, 64))
    """
    checks.typed_key(key)
    if not isinstance(options, DrawOptions | None):
        raise TypeError(f"options must be a simrf_jax.DrawOptions, got {options!r}.")
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
    leaves, treedef = jax.tree.flatten(projections, is_leaf=is_structured)
    groups = collections.defaultdict(list)  # Numbers of leaves with equal heads, drawn together.
    for layer, (leaf, carried) in enumerate(zip(leaves, _carried(projections), strict=True)):
        groups[_head(leaf), agreed(carried, options)].append(layer)
    drawn: list[Any] = [None] * len(leaves)
    for ((structure, parts), drawn_by), layers in groups.items():
        stacks = [leaves[layer].shape[:-2] for layer in layers]
        counts = [math.prod(stack) for stack in stacks]
        layer_of_each = np.repeat(layers, counts)
        head_of_each = np.concatenate([np.arange(count) for count in counts])
        draw = functools.partial(_draw_like, jax.tree.unflatten(structure, parts), drawn_by)
        heads = _map(draw, key, (layer_of_each, head_of_each), mesh)
        ends = itertools.accumulate(counts)
        for layer, stack, count, end in zip(layers, stacks, counts, ends, strict=True):
            unstack = functools.partial(_take, first=end - count, end=end, stack=stack)
            drawn[layer] = jax.tree.map(unstack, heads)
    return jax.tree.unflatten(treedef, drawn)


def _map(
    draw: Callable[..., Any],
    key: Key[Array, ""],
    numbers: tuple[Shaped[np.ndarray, " n"], ...],
    mesh: Mesh | None,
) -> Any:
    """Draws once for each number, in equal parts on the devices of a mesh."""

    def draw_all(key: Key[Array, ""], *numbers: Integer[Array, " n"]) -> Any:
        if jax.random.key_impl(key) == "threefry2x32":
            return jax.vmap(draw, in_axes=(None, 0, 0))(key, *numbers)
        # Under vmap, other kinds of keys would draw all heads from the first.
        return jax.lax.map(lambda each: draw(key, *each), numbers)

    if mesh is None:
        return draw_all(key, *map(jnp.asarray, numbers))
    everywhere, divided = PartitionSpec(), PartitionSpec(mesh.axis_names)
    specs = (everywhere, divided, divided)
    shared = jax.shard_map(draw_all, mesh=mesh, in_specs=specs, out_specs=divided, check_vma=False)
    # Parts must be equal, so numbers are added at the end. Their draws are discarded.
    count = -(-len(numbers[0]) // mesh.size) * mesh.size
    resized = [jnp.asarray(np.resize(x, count)) for x in numbers]
    if AxisType.Explicit not in mesh.axis_types:
        return shared(key, *resized)
    resized = jax.sharding.reshard(resized, NamedSharding(mesh, divided))
    return jax.sharding.reshard(shared(key, *resized), NamedSharding(mesh, everywhere))


def _carries(node: Any) -> bool:
    return is_structured(node) or _options(node) is not None


def _options(node: Any) -> Any:
    """Returns the options that a node carries, or None.

    Flax's bridge puts variables of NNX models in boxes, which have the options in their metadata.
    """
    metadata = getattr(node, "metadata", None)
    of_bridge = metadata.get("draw_options") if isinstance(metadata, Mapping) else None
    return getattr(node, "draw_options", of_bridge)


def _carried(projections: Any) -> list[DrawOptions | None]:
    """Returns the draw options of each leaf, None for a leaf without any."""
    nodes = jax.tree.leaves(projections, is_leaf=_carries)
    return [options for node in nodes for options in _options_of_leaves(node)]


def _options_of_leaves(node: Any) -> list[DrawOptions | None]:
    """Returns the options of each leaf of a carrier; None for a bare array."""
    options = _options(node)
    if options is None or is_structured(node):
        return [options]

    def repeat(one: DrawOptions, part: Any) -> list[DrawOptions]:
        return [one] * len(jax.tree.leaves(part, is_leaf=is_structured))

    # A carrier has one child, its value. Its options are one record or a prefix of the value.
    [value] = jax.tree.leaves(node, is_leaf=lambda child: child is not node)
    outer = jax.tree.leaves(jax.tree.map(repeat, options, value))
    inner = [_options(leaf) for leaf in jax.tree.leaves(value, is_leaf=is_structured)]
    for one, other in zip(outer, inner, strict=True):
        if other is not None and one != other:
            raise ValueError(
                f"A projection and the variable that holds it must have the same draw "
                f"options, got {other} and {one}; make the model anew."
            )
    return outer


def _head(leaf: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the structure and the parts of one projection of a stack; parts may be numbers."""
    if len(getattr(leaf, "shape", ())) < 2:
        given = f"the shape {leaf.shape}" if hasattr(leaf, "shape") else repr(leaf)
        raise ValueError(f"A projection must be an array [..., num_features, dim], got {given}.")
    parts, structure = jax.tree.flatten(leaf)
    num_stack_axes = len(leaf.shape) - 2
    return structure, tuple(
        jax.ShapeDtypeStruct(jnp.shape(part)[num_stack_axes:], jnp.result_type(part))
        for part in parts
    )


def _draw_like(
    head: Any,
    options: DrawOptions,
    key: Key[Array, ""],
    layer: Integer[Array, ""],
    number: Integer[Array, ""],
) -> Any:
    """Draws a projection like that of a head, given its layer and its number in the layer."""
    key = jax.random.fold_in(jax.random.fold_in(key, layer), number)
    if is_structured(head):
        return head.redraw(key, options)
    if options.draws_weights:
        raise ValueError(
            f"norms={options.norms!r} draws a Projection with weights, which cannot take the place "
            "of an array; make the model anew with those options."
        )
    return options.draw(key, *head.shape, dtype=head.dtype)


def _take(
    x: Shaped[Array, " heads *shape"], *, first: int, end: int, stack: tuple[int, ...]
) -> Shaped[Array, "*stack_and_shape"]:
    return x[first:end].reshape(*stack, *x.shape[1:])
