"""Random-feature attention in fused Pallas kernels: their calls and their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inputs.sharding import MeshAxes
from simrf_jax._src.attention.pallas_inputs import query_factors, without_gradient
from simrf_jax._src.attention.pallas_tpu import (
    backward,
    causal,
    causal_backward,
    forward,
    near,
    near_backward,
)
from simrf_jax._src.attention.pallas_tpu.backward import Gradients
from simrf_jax._src.attention.pallas_tpu.devices import Kernel, on_platform, over_devices
from simrf_jax._src.attention.pallas_tpu.heads import Refs
from simrf_jax._src.attention.pallas_tpu.near import NearRefs
from simrf_jax._src.attention.pallas_tpu.operands import (
    band_of,
    lay_out,
    lay_out_near,
    shape_of,
)
from simrf_jax._src.attention.pallas_tpu.sums import Sums, merge
from simrf_jax._src.attention.random_features.xla import attend_locally


class Tokens(NamedTuple):
    """Queries, keys and values, ``[..., length, heads, dim]``."""

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K D"]


class Rest(NamedTuple):
    """The other arrays of a call; ``call`` has None in place of the tokens."""

    call: Any
    estimator: Estimator


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Lets each query attend to all keys, or to those up to its position.

    The gradients of queries, keys and values come from kernels. Those of everything else, if they
    are needed, come from the same attention without kernels.

    Args:
      estimator: W, the feature map, and the mesh axes that shard the batch and the heads.
      call: A call that the kernels can take.
    """
    fixed, axes = jax.lax.stop_gradient(estimator), estimator.mesh_axes
    tokens = Tokens(call.query, call.key, call.value)
    without: dict[str, Any] = dict.fromkeys(tokens._fields)
    rest = Rest(dataclasses.replace(call, **without), estimator)
    of_tokens = dataclasses.replace(jax.lax.stop_gradient(rest.call), **tokens._asdict())
    is_packed = call.segment_ids is not None and not call.is_causal
    if estimator.exact_bandwidth is not None or is_packed:
        out = _in_parts(fixed, of_tokens)
    else:
        start = 0 if call.is_causal else None
        operands = lay_out(of_tokens, fixed.projection, fixed.feature_map, start=start)
        out = _fused(Whole(axes, call.is_causal), operands)
    out = _outputs(out, call)
    return _with_gradients(out, jax.lax.stop_gradient(tokens), rest)


def _in_parts(estimator: Estimator, call: Call) -> Float[Array, "B N padded T"]:
    """Returns outputs from separate sums over the keys up to each query and the keys after it.

    With a band, they are those before and after the band, moved to the position of the query, and
    the keys of the band are exact.
    """
    projection, feature_map = estimator.projection, estimator.feature_map
    axes, bandwidth = estimator.mesh_axes, estimator.exact_bandwidth
    length, num_keys = call.query.shape[-3], call.key.shape[-3]
    start = 0 if bandwidth is None else -bandwidth - 1
    earlier = lay_out(call, projection, feature_map, start=start)
    parts = [_fused(Far(axes, False, start), earlier)]
    if not call.is_causal:
        start = 1 if bandwidth is None else bandwidth + 1
        # Queries are added so that each key after the first band is paired with one.
        missing = max(num_keys - start - length, 0)
        padding = [(0, 0)] * (call.query.ndim - 3) + [(0, missing), (0, 0), (0, 0)]
        query = jnp.pad(call.query, padding) if missing else call.query
        longer = dataclasses.replace(call, query=query)
        later = lay_out(longer, projection, feature_map, start=start, is_reversed=True)
        sums = _fused(Far(axes, True, start), later)
        parts.append(Sums(*(x[..., :length] for x in sums)))
    if bandwidth is None:
        return merge(parts)
    in_band = _fused(Near(axes, bandwidth, call.is_causal), lay_out_near(call, bandwidth))
    factors = query_factors(estimator, call)
    return merge([in_band, *(part.times(factors) for part in parts)])


def _outputs(out: Float[Array, "B N padded T"], call: Call) -> Float[Array, "*batch T N D"]:
    """Returns outputs in the caller's layout, zeros beyond the lengths of the queries."""
    *batch, length, heads, _ = call.query.shape
    out = jnp.transpose(out, (0, 3, 1, 2))[..., : call.value.shape[-1]]
    if call.query_seq_lengths is not None:
        out = jnp.where(call.with_batch_axis().real_queries(), out, 0)
    return out.reshape(*batch, length, heads, out.shape[-1])


class Whole(NamedTuple):
    """The kernels of a call that give outputs.

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

    def backward(self, refs: Refs, out: Any, of_outputs: jax.Array) -> Gradients:
        """Returns the gradients of queries, keys and values."""
        del out
        module = causal_backward if self.is_causal else backward
        return self._call(module.backward, refs, of_outputs)

    def _call(self, kernel: Kernel, *arrays: Any) -> Any:
        sizes = functools.partial(shape_of, is_causal=self.is_causal)
        return over_devices(functools.partial(on_platform, kernel, sizes), self.axes, *arrays)


class Far(NamedTuple):
    """The causal kernels that give sums.

    Attributes:
      axes: Mesh axes that shard the batch and the heads.
      is_reversed: True if queries see the keys from their own position on.
      start: Position of the key that was moved to the first query.
    """

    axes: MeshAxes
    is_reversed: bool
    start: int

    def forward(self, refs: Refs) -> Sums:
        """Returns the sums."""
        return self._call(causal.read_sums, refs)

    def backward(self, refs: Refs, out: Any, of_sums: Sums) -> Gradients:
        """Returns the gradients of queries, keys and values."""
        del out
        return self._call(causal_backward.backward, refs, of_sums)

    def _call(self, kernel: Kernel, *arrays: Any) -> Any:
        sizes = functools.partial(
            shape_of, is_causal=True, is_reversed=self.is_reversed, is_moved=self.start != 0
        )
        return over_devices(functools.partial(on_platform, kernel, sizes), self.axes, *arrays)


class Near(NamedTuple):
    """The kernels of the keys in a band.

    Attributes:
      axes: Mesh axes that shard the batch and the heads.
      bandwidth: Distance over which queries see keys.
      is_causal: True if later keys are hidden.
    """

    axes: MeshAxes
    bandwidth: int
    is_causal: bool

    def forward(self, refs: NearRefs) -> Sums:
        """Returns the sums."""
        return self._call(near.read_sums, refs)

    def backward(self, refs: NearRefs, out: Sums, of_sums: Sums) -> Gradients:
        """Returns the gradients of queries, keys and values."""
        return self._call(near_backward.backward, refs, near_backward.Given(out.rows, of_sums))

    def _call(self, kernel: Kernel, *arrays: Any) -> Any:
        sizes = functools.partial(band_of, bandwidth=self.bandwidth, is_causal=self.is_causal)
        return over_devices(functools.partial(on_platform, kernel, sizes), self.axes, *arrays)


Kernels: TypeAlias = Whole | Far | Near


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(kernels: Kernels, refs: Any) -> Any:
    """Calls a kernel, with gradients of queries, keys and values only."""
    return kernels.forward(refs)


def _fused_forward(kernels: Kernels, refs: Any) -> tuple[Any, tuple[Any, Any]]:
    out = _fused(kernels, refs)
    return out, (refs, out)


def _fused_backward(kernels: Kernels, kept: tuple[Any, Any], of_out: Any) -> tuple[Any]:
    refs, out = kept
    of_tokens = without_gradient(kernels.backward, refs, out, of_out)
    # The other gradients are unused, so they are not computed.
    return (jax.tree.map(jnp.zeros_like, refs)._replace(**of_tokens._asdict()),)


_fused.defvjp(_fused_forward, _fused_backward)


@jax.custom_vjp
def _with_gradients(
    out: Float[Array, "*batch T N D"], tokens: Tokens, rest: Rest
) -> Float[Array, "*batch T N D"]:
    """Returns ``out`` as it is.

    Its gradient with respect to ``rest`` is that of attention without kernels; the gradient of
    ``out`` passes through.
    """
    del tokens, rest
    return out


def _with_gradients_forward(
    out: Any, tokens: Any, rest: Any
) -> tuple[Float[Array, "*batch T N D"], tuple[Tokens, Rest] | None]:
    leaves = jax.tree.leaves(rest, is_leaf=_is_primal)
    values = jax.tree.map(lambda leaf: leaf.value, (tokens, rest), is_leaf=_is_primal)
    # An array that needs no gradient is not kept.
    return out.value, values if any(leaf.perturbed for leaf in leaves) else None


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _with_gradients_backward(
    kept: tuple[Tokens, Rest] | None, of_out: Any
) -> tuple[Any, None, Rest | None]:
    if kept is None or isinstance(of_out, jax.custom_derivatives.SymbolicZero):
        return of_out, None, None
    tokens, rest = kept

    def attention(rest: Rest) -> jax.Array:
        call = dataclasses.replace(rest.call, **tokens._asdict())
        return attend_locally(rest.estimator, call)

    _, pull_back = jax.vjp(attention, rest)
    return of_out, None, *pull_back(of_out)


_with_gradients.defvjp(_with_gradients_forward, _with_gradients_backward, symbolic_zeros=True)
