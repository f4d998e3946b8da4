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
from simrf_jax.attention.pallas_tpu import backward, causal, causal_backward, forward
from simrf_jax.attention.pallas_tpu.backward import Gradients
from simrf_jax.attention.pallas_tpu.choice import MeshAxes
from simrf_jax.attention.pallas_tpu.devices import Kernel, on_platform, over_devices
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
    is_causal: bool,
    reference: Reference,
) -> Float[Array, "*batch T N D"]:
    """Lets each query attend to all keys, or to those up to its position.

    The gradients of queries, keys and values come from a kernel, and those of everything else, if
    anyone asks for them, from ``reference``.

    Args:
      arguments: Arguments without segments, for which ``uses_kernel``.
      projection: W.
      feature_map: The feature map.
      axes: Mesh axes that shard the batch and the heads.
      is_causal: True to hide the keys after each query.
      reference: The same attention without kernels.
    """
    fixed = jax.lax.stop_gradient((projection, feature_map))
    operands = lay_out(arguments, *fixed, is_causal=is_causal)
    out = _outputs(_fused(Kernels(axes, is_causal), operands), arguments)
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


class Kernels(NamedTuple):
    """The kernels of a call, and where they run.

    Attributes:
      axes: Mesh axes that shard the batch and the heads.
      is_causal: True for the kernels of causal attention.
    """

    axes: MeshAxes
    is_causal: bool

    def forward(self, refs: Refs) -> Float[Array, "B N padded T"]:
        """Returns the outputs."""
        module = causal if self.is_causal else forward
        return self._call(module.forward, refs)

    def backward(self, *arrays: Any) -> Gradients:
        """Returns the gradients of queries, keys and values."""
        module = causal_backward if self.is_causal else backward
        return self._call(module.backward, *arrays)

    def _call(self, kernel: Kernel, *arrays: Any) -> Any:
        kernel = functools.partial(on_platform, kernel, is_causal=self.is_causal)
        return over_devices(kernel, self.axes, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(kernels: Kernels, refs: Refs) -> Float[Array, "B N padded T"]:
    """Attends in a kernel, with gradients of queries, keys and values alone."""
    return kernels.forward(refs)


def _fused_forward(kernels: Kernels, refs: Refs) -> tuple[Float[Array, "B N padded T"], Refs]:
    return _fused(kernels, refs), refs


def _fused_backward(
    kernels: Kernels, refs: Refs, of_outputs: Float[Array, "B N padded T"]
) -> tuple[Refs]:
    of_tokens = kernels.backward(refs, of_outputs)
    # Nobody uses the other gradients, so they are not computed.
    return (jax.tree.map(jnp.zeros_like, refs)._replace(**of_tokens._asdict()),)


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
