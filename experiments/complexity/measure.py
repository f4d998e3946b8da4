"""Measurement of the time and memory to draw a projection for m = d and to apply it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import simrf_jax
from experiments.harness import timing
from simrf_jax._src.projections import FixedCoupling

# Methods that form W as a matrix. SimRFs+ with a Hadamard rotation are the paper's fast SimRFs+.
MATRICES: dict[str, dict[str, Any]] = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex_plus": {"coupling": "simplex_plus"},
    "fast_simplex_plus": {"coupling": "simplex_plus", "rotation": "hadamard"},
}
# Methods that form no matrix. They are timed separately, because a call of microseconds right after
# a call of seconds would find cold caches and sleeping threads.
FAST: dict[str, FixedCoupling] = {"fast_orthogonal": "orthogonal", "fast_simplex": "simplex"}
TIMES = ("draw", "apply", "apply_batch")
MEMORIES = ("held", "draw", "apply")
PROJECT = jax.jit(simrf_jax.project)


def draw(name: str, dim: int, key: jax.Array) -> simrf_jax._src.projections.ProjectionLike:
    """Draws one row block of d features in d dimensions."""
    if name in FAST:
        return simrf_jax.draw_fast_projection(key, dim, dim, coupling=FAST[name], block="square")
    return simrf_jax.draw_projection(key, dim, dim, block="square", **MATRICES[name])


def measure(
    names: Iterable[str], dim: int, *, num_vectors: int, rounds: int, seconds: float
) -> dict[str, np.ndarray]:
    """Compiles the methods, then measures one quantity after the other.

    Args:
      names: Names of methods in ``MATRICES`` and ``FAST``, whose calls alternate.
      dim: Dimension d, and number of features.
      num_vectors: Number of vectors in the batch.
      rounds: Calls of each method, if ``seconds`` suffice.
      seconds: Time budget for each of ``TIMES``; see ``timing.alternate``.

    Returns:
      For each of ``TIMES``, the milliseconds of every call, ``[names, rounds]``. The entry
      ``"memory"`` has the bytes of ``MEMORIES``, ``[names, 3]``: those that a projection holds, and
      the outputs and temporary buffers of the compiled draw and of its application to one vector.
    """
    names = list(names)
    keys = [jax.random.key(round_) for round_ in range(rounds + 1)]
    batch = jax.random.normal(jax.random.key(rounds + 1), (num_vectors, dim))
    vector = batch[0]
    draws = {
        name: jax.jit(functools.partial(draw, name, dim)).lower(keys[0]).compile() for name in names
    }
    drawn = {name: draws[name](keys[0]) for name in names}
    applies = {name: PROJECT.lower(vector, drawn[name]).compile() for name in names}
    batched = {name: PROJECT.lower(batch, drawn[name]).compile() for name in names}
    calls = {
        "draw": {n: lambda round_, n=n: draws[n](keys[round_]) for n in names},
        "apply": {n: lambda _, n=n: applies[n](vector, drawn[n]) for n in names},
        "apply_batch": {n: lambda _, n=n: batched[n](batch, drawn[n]) for n in names},
    }
    measured = {"memory": np.array([_memory(drawn[n], draws[n], applies[n]) for n in names])}
    for quantity in TIMES:
        times = timing.alternate(calls[quantity], rounds, seconds=seconds)
        measured[quantity] = np.stack([times[name] for name in names])
    return measured


def held_bytes(projection: simrf_jax._src.projections.ProjectionLike) -> int:
    """Returns the bytes that a projection holds."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(projection))


def _memory(projection: Any, draw: Any, apply: Any) -> list[int]:
    plans = [compiled.memory_analysis() for compiled in (draw, apply)]
    buffers = [plan.temp_size_in_bytes + plan.output_size_in_bytes for plan in plans]
    return [held_bytes(projection), *buffers]
