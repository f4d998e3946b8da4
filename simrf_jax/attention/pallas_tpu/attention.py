"""Random-feature attention in fused kernels: when they can do it, and how it is differentiated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax.attention.inputs.arguments import Arguments
from simrf_jax.attention.pallas_tpu.backward import Transposed, backward
from simrf_jax.attention.pallas_tpu.choice import MeshAxes
from simrf_jax.attention.pallas_tpu.devices import on_platform, over_devices
from simrf_jax.attention.pallas_tpu.forward import forward
from simrf_jax.attention.pallas_tpu.heads import Refs
from simrf_jax.attention.pallas_tpu.operands import lay_out
from simrf_jax.features import FeatureMap
from simrf_jax.projections import Projection

# Attention of the same arguments by XLA, which gives the gradients of all but the tokens.
Reference: TypeAlias = Callable[[Arguments, Projection | None, FeatureMap], jax.Array]


class Tokens(NamedTuple):
    """Queries, keys and values, ``[..., length, heads, dim]``."""

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K D"]


class Rest(NamedTuple):
    """The other arrays of a call; ``arguments`` has None in the place of the tokens."""

    arguments: Any
    projection: Projection | None
    feature_map: FeatureMap


def attend(
    arguments: Arguments,
    projection: Projection | None,
    feature_map: FeatureMap,
    axes: MeshAxes,
    *,
    reference: Reference,
) -> Float[Array, "*batch T N D"]:
    """Lets each query attend to all keys.

    The gradients of queries, keys and values come from a kernel, and those of everything else, if
    anyone asks for them, from ``reference``.

    Args:
      arguments: Arguments without segments, for which ``uses_kernel``.
      projection: W.
      feature_map: The feature map.
      axes: Mesh axes that shard the batch and the heads.
      reference: The same attention without kernels.
    """
    fixed = jax.lax.stop_gradient((projection, feature_map))
    out = _outputs(_fused(axes, *lay_out(arguments, *fixed)), arguments)
    tokens = Tokens(arguments.query, arguments.key, arguments.value)
    without: dict[str, Any] = dict.fromkeys(tokens._fields)
    rest = Rest(dataclasses.replace(arguments, **without), projection, feature_map)
    return _with_gradients(reference, out, jax.lax.stop_gradient(tokens), rest)


def _outputs(
    out: Float[Array, "B N padded T"], arguments: Arguments
) -> Float[Array, "*batch T N D"]:
    """Returns outputs as the caller has them, zeros beyond the lengths of the queries."""
    *batch, length, heads, _ = arguments.query.shape
    out = jnp.transpose(out, (0, 3, 1, 2))[..., : arguments.value.shape[-1]]
    if arguments.query_seq_lengths is not None:
        out = jnp.where(arguments.real_queries(), out, 0)
    return out.reshape(*batch, length, heads, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(axes: MeshAxes, refs: Refs, transposed: Transposed) -> Float[Array, "B N padded T"]:
    """Attends in a kernel, with gradients of queries, keys and values alone."""
    del transposed
    return over_devices(functools.partial(on_platform, forward), axes, refs)


def _fused_forward(
    axes: MeshAxes, refs: Refs, transposed: Transposed
) -> tuple[Float[Array, "B N padded T"], tuple[Refs, Transposed]]:
    return _fused(axes, refs, transposed), (refs, transposed)


def _fused_backward(
    axes: MeshAxes, kept: tuple[Refs, Transposed], of_outputs: Float[Array, "B N padded T"]
) -> tuple[Refs, Transposed]:
    of_tokens = over_devices(functools.partial(on_platform, backward), axes, *kept, of_outputs)
    # Nobody uses the other gradients, so they are not computed.
    refs, transposed = jax.tree.map(jnp.zeros_like, kept)
    return refs._replace(**of_tokens._asdict()), transposed


_fused.defvjp(_fused_forward, _fused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradients(
    reference: Reference, out: Float[Array, "*batch T N D"], tokens: Tokens, rest: Rest
) -> Float[Array, "*batch T N D"]:
    """Returns ``out`` as it is.

    Its gradient with respect to ``rest`` is that of the reference; that of ``out`` passes through.
    """
    del reference, tokens, rest
    return out


def _with_gradients_forward(
    reference: Reference, out: Any, tokens: Any, rest: Any
) -> tuple[Float[Array, "*batch T N D"], tuple[Tokens, Rest] | None]:
    del reference
    leaves = jax.tree.leaves(rest, is_leaf=_is_primal)
    values = jax.tree.map(lambda leaf: leaf.value, (tokens, rest), is_leaf=_is_primal)
    # What nobody differentiates with respect to need not be kept.
    return out.value, values if any(leaf.perturbed for leaf in leaves) else None


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _with_gradients_backward(
    reference: Reference, kept: tuple[Tokens, Rest] | None, of_out: Any
) -> tuple[Any, None, Rest | None]:
    if kept is None or isinstance(of_out, jax.custom_derivatives.SymbolicZero):
        return of_out, None, None
    tokens, rest = kept

    def attention(rest: Rest) -> jax.Array:
        arguments = dataclasses.replace(rest.arguments, **tokens._asdict())
        return reference(arguments, rest.projection, rest.feature_map)

    _, pull_back = jax.vjp(attention, rest)
    return of_out, None, *pull_back(of_out)


_with_gradients.defvjp(_with_gradients_forward, _with_gradients_backward, symbolic_zeros=True)
