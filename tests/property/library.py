"""The only module that calls the library, so that only it changes with the interface."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax import Projection, attention_matrix, banded_attention, random_feature_attention
from simrf_jax.fmm import fmm_attention
from tests import compilation
from tests.attention import steps
from tests.property.cases import Program
from tests.property.feature_maps import MAPS, Map
from tests.versions import enable_x64

Arrays = dict[str, Any]
DIFFERENTIABLE = (
    "query",
    "key",
    "value",
    "projection",
    "log_weights",
    "near_weight",
    "far_weights",
    "bias",
    "scale",
)
OF_KEYS = ("mask", "bias", "scale", "query_seq_lengths", "key_value_seq_lengths", "segment_ids")
# Compilation takes most of the time, and only a third as long without fusion emitters.
EMITTERS = "xla_cpu_use_fusion_emitters"
COMPILER_OPTIONS = {EMITTERS: False} if compilation.is_known(EMITTERS) else {}


def run(program: Program, x: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """Runs attention and its backward pass under jit.

    Args:
      program: Program to call.
      x: Arrays that ``cases.arrays`` returned.
      cotangent: Cotangent of the output ``[..., T, N, D]``, or of a matrix ``[..., T, N, S]``.

    Returns:
      The output, and the gradients of all arrays that have one.
    """
    with enable_x64(program.dtype == "float64"):
        moving = {name: jnp.array(x[name]) for name in DIFFERENTIABLE if name in x}
        fixed = {name: jnp.array(value) for name, value in x.items() if name not in moving}
        out = _compiled(program)(moving, fixed, jnp.array(cotangent))
        return jax.tree.map(np.asarray, out)


def run_without_jit(program: Program, x: Arrays) -> np.ndarray:
    """Runs attention operation by operation."""
    with enable_x64(program.dtype == "float64"):
        return np.asarray(attend(program, jax.tree.map(jnp.array, x)))


@functools.lru_cache(maxsize=40)
def _compiled(program: Program) -> Any:
    def with_gradients(moving: Arrays, fixed: Arrays, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda moving: attend(program, moving | fixed), moving)
        return out, pullback(cotangent.astype(out.dtype))[0]

    return jax.jit(with_gradients, compiler_options=COMPILER_OPTIONS)


def attend(program: Program, x: Arrays, **axes: Any) -> jax.Array:
    """Calls the mechanism of a program in its mode, with the names of mesh axes if any."""
    if program.mode == "decoding":
        return _decode(program, x)
    p, options = program, {name: x[name] for name in OF_KEYS if name in x}
    options |= {"is_causal": p.is_causal, **axes}
    if p.is_matrix:
        options |= {"feature_map": MAPS[p.maps[0]].argument}
        matrix = attention_matrix(x["query"], x["key"], *_projections(p, x), **options)
        return jnp.moveaxis(matrix, -3, -2)
    inputs = (x["query"], x["key"], x["value"])
    if p.mechanism == "band":
        return banded_attention(*inputs, bandwidth=p.bandwidth, block_size=p.block_size, **options)
    options["chunk_size"] = p.chunk_size
    if p.mechanism != "blend":
        return random_feature_attention(*inputs, **_features(p, x), **options)
    return fmm_attention(
        *inputs,
        _projections(p, x),
        feature_maps=_maps(p),
        bandwidth=p.bandwidth,
        block_size=p.block_size,
        near_weight=x["near_weight"],
        far_weights=x["far_weights"],
        **options,
    )


def _maps(program: Program) -> tuple[Any, ...]:
    return tuple(MAPS[name].argument for name in program.maps)


def _projections(program: Program, x: Arrays) -> tuple[Any, ...]:
    return tuple(_projection(MAPS[name], x) for name in program.maps)


def _projection(feature_map: Map, x: Arrays) -> Any:
    if not feature_map.projected:
        return None
    if feature_map.weighted:
        return Projection(x["projection"], x["log_weights"])
    return x["projection"]


def _features(program: Program, x: Arrays) -> Arrays:
    """Returns the arguments of random features, and of an exact band beside them."""
    (feature_map,), (projection,) = _maps(program), _projections(program, x)
    bandwidth = program.bandwidth if program.mechanism == "joint" else None
    return {
        "projection": projection,
        "feature_map": feature_map,
        "exact_bandwidth": bandwidth,
    }


def _decode(program: Program, x: Arrays) -> jax.Array:
    """Attends piece by piece. Under jit, pieces of equal length are the steps of one scan."""
    state, start, outs = _init(program, x), 0, []
    step = functools.partial(_step, program, x)
    for size, group in itertools.groupby(program.pieces):
        pieces = [_cut(x, start + i * size, size) for i, _ in enumerate(group)]
        start += len(pieces) * size
        if isinstance(x["query"], jax.core.Tracer):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pieces)
            state, out = jax.lax.scan(step, state, stacked)
            outs += list(out)
        else:
            for piece in pieces:
                state, out = step(state, piece)
                outs.append(out)
    return jnp.concatenate(outs, axis=-3)


def _cut(x: Arrays, start: int, size: int) -> Arrays:
    """Returns the tokens of one piece, with the mask, the bias and the lengths of their keys."""
    piece = {name: x[name][..., start : start + size, :, :] for name in ("query", "key", "value")}
    for name in ("mask", "bias"):
        if name in x:
            piece[name] = x[name][..., start : start + size]
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in x:
            piece[name] = jnp.clip(x[name] - start, 0, size)
    return piece


def _init(program: Program, x: Arrays) -> Any:
    p = program
    sizes = {
        "batch": p.batch,
        "num_key_heads": p.key_heads,
        "head_dim": p.dim,
        "value_dim": p.width,
        "dtype": p.dtype,
    }
    if p.mechanism == "band":
        return steps.init_window(bandwidth=p.bandwidth, **sizes)
    if p.mechanism != "blend":
        return steps.init_state(**_features(p, x), **sizes)
    return steps.init_fmm_state(
        _projections(p, x), bandwidth=p.bandwidth, feature_maps=_maps(p), **sizes
    )


def _step(program: Program, x: Arrays, state: Any, piece: Arrays) -> tuple[Any, jax.Array]:
    p, tokens = program, dict(piece)
    if "scale" in x:
        tokens["scale"] = x["scale"]
    inputs = [tokens.pop(name) for name in ("query", "key", "value")]
    if p.mechanism == "band":
        out, state = steps.window_step(state, *inputs, **tokens)
    elif p.mechanism != "blend":
        tokens |= _features(p, x)
        out, after = steps.step(state, *inputs, chunk_size=p.chunk_size, **tokens)
        if p.append:
            tokens.pop("query_seq_lengths", None)
            after = steps.append(state, *inputs[1:], **tokens)
        state = after
    else:
        out, state = steps.fmm_step(
            state,
            *inputs,
            _projections(p, x),
            feature_maps=_maps(p),
            near_weight=x["near_weight"],
            far_weights=x["far_weights"],
            chunk_size=p.chunk_size,
            **tokens,
        )
    return state, out
