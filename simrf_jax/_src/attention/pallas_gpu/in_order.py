"""Attention that is causal, packed or beside an exact band, and its gradient.

A query reads the keys before some position by features, in a pass through the chunks, and those
after another position in a pass in reverse. Between the two it reads the keys of a band exactly.
The output is the mean of what the passes read, weighted by their log-sum-exps. The gradient of a
pass needs the output and the log-sum-exp of all passes together.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import chunks, chunks_gradient, flash, gradient
from simrf_jax._src.attention.pallas_gpu.flash import Read
from simrf_jax._src.attention.pallas_gpu.gradient import OfOutputs, side_of
from simrf_jax._src.attention.pallas_gpu.kernels import Band, Side
from simrf_jax._src.attention.pallas_gpu.operands import (
    NO_SEGMENT,
    Near,
    Operands,
    lay_out,
    row_terms_of,
    split_rows,
)
from simrf_jax._src.attention.pallas_inputs import bfloat16_parts, without_gradient
from simrf_jax._src.attention.random_features import xla


class Far(NamedTuple):
    """A pass by features, in which the query at t sees keys up to or from a position on.

    Queries are moved to the places of these keys.

    Attributes:
      start: If it is positive, the query sees the keys from ``t + start`` on, and otherwise those
        up to there.
    """

    start: int

    def read(self, operands: Operands, interpret: Any) -> Read:
        """Returns what the queries read."""
        moved, is_reversed = self._operands(operands), self.start > 0
        out, lse = chunks.attend(moved, interpret, is_reversed=is_reversed)
        return Read(_later(out, 1, -self.start), _later(lse, 2, -self.start, -jnp.inf))

    def gradients(
        self, operands: Operands, found: Read, of_out: jax.Array, interpret: Any
    ) -> chunks_gradient.Gradients:
        """Returns the gradients; the arguments are those of ``Passes.gradients``."""
        out, of_out = (_later(x, 1, self.start) for x in (found.out, of_out))
        found = Read(out, _later(found.lse, 2, self.start, -jnp.inf))
        moved, is_reversed = self._operands(operands), self.start > 0
        run = functools.partial(chunks_gradient.gradients, is_reversed=is_reversed)
        part = run(moved, found, of_out, interpret)
        query, terms = (
            _later(x, axis, -self.start) for x, axis in ((part.query, 1), (part.query_terms, 2))
        )
        return part._replace(query=query, query_terms=terms)

    def _operands(self, operands: Operands) -> chunks.Operands:
        value = operands.value
        queries = Side(True, (_later(operands.query, 1, self.start),))
        numbers, fills = [_marked(operands.key_terms, value)], [-math.inf]
        if operands.segments is not None:
            # 0 * NaN is not 0 in the states of other segments.
            value = jnp.where(jnp.isfinite(value), value, 0)
            numbers, fills = [*numbers, operands.segments], [*fills, NO_SEGMENT]
            moved = _later(operands.segments, 2, self.start, NO_SEGMENT)
            queries = queries._replace(numbers=(moved,), fills=(NO_SEGMENT,))
        keys = Side(True, (operands.key, value), (*numbers,), (*fills,))
        rows = (split_rows(x, chunks.ROWS) for x in (operands.query_rows, operands.key_rows))
        row_terms = row_terms_of(operands, chunks.ROWS)
        parts = tuple(part for both in rows for part in both)
        return chunks.Operands(queries, keys, Side(False, parts, (row_terms,), (-math.inf,)))


class Exact(NamedTuple):
    """A pass over the keys of a band."""

    band: Band

    def read(self, operands: Operands, near: Near, interpret: Any) -> Read:
        """Returns what the queries read."""
        positions, (_, length, num_heads, _) = self._positions(operands), operands.query.shape
        keys = self._keys(operands, near.key_terms, positions)
        queries = Side(True, bfloat16_parts(near.query, 2), (positions,), (math.inf,))
        found = flash.attend(queries, keys, num_heads, interpret, band=self.band)
        return found._replace(lse=found.lse[..., :length])

    def gradients(
        self, operands: Operands, near: Near, found: Read, of_out: jax.Array, interpret: Any
    ) -> tuple[Near, chunks_gradient.Gradients]:
        """Returns the gradients of ``near``, and those of the keys and the values."""
        positions, (_, length, num_heads, _) = self._positions(operands), operands.query.shape
        good, terms, offsets, of_out = OfOutputs.of(*found, of_out)
        query = bfloat16_parts(jnp.where(good, near.query, 0), 2)
        queries = side_of(True, query, of_out, terms, offsets, positions)
        keys = self._keys(operands, near.key_terms, positions)
        run = functools.partial(gradient.gradients, num_heads=num_heads, interpret=interpret)
        (of_query,) = run(queries, keys, others=False, terms=False, band=self.band)
        of_keys = run(keys, queries, others=True, terms=True, band=self.band.reverse)
        of_key, of_value, of_terms = chunks_gradient.summed(of_keys, operands.key.shape[2])
        of_query, of_terms = of_query.astype(jnp.float32), of_terms[..., :length]
        others = (operands.query, operands.key_terms, near.query_factors)
        none, none_of_terms, none_of_factors = map(jnp.zeros_like, others)
        part = chunks_gradient.Gradients(none, of_key, of_value, none_of_terms, none_of_factors)
        return Near(of_query, of_terms, none_of_factors), part

    def _positions(self, operands: Operands) -> jax.Array:
        """Returns the positions of the tokens, farther apart than the band between segments."""
        positions = jnp.arange(operands.query.shape[1], dtype=jnp.float32)[None, None]
        if operands.segments is None:
            return positions
        return positions + operands.segments * (1 + max(self.band))

    def _keys(self, operands: Operands, terms: jax.Array, positions: jax.Array) -> Side:
        """Returns the keys, zeros where they are not finite, because 0 * NaN is not 0."""
        terms = _marked(terms, operands.value)
        is_finite = jnp.swapaxes(jnp.isfinite(terms), 1, 2)[..., None]
        key, value = (jnp.where(is_finite, x, 0) for x in (operands.key, operands.value))
        return side_of(True, (key,), value, terms, positions=positions)


class Passes(NamedTuple):
    """The passes of a call.

    Attributes:
      far: Passes by features.
      exact: The pass over a band, or None.
    """

    far: tuple[Far, ...]
    exact: Exact | None

    @classmethod
    def of(cls, estimator: Estimator, call: Call) -> Passes:
        """Returns the passes of a call."""
        reach, starts, exact = estimator.exact_bandwidth, (0, 1), None
        if reach is not None:
            reach = min(reach, call.query.shape[-3] - 1)
            exact = Exact(Band(reach, 0 if call.is_causal else reach))
            starts = -reach - 1, reach + 1
        far = tuple(map(Far, starts[:1] if call.is_causal else starts))
        return cls(far if reach != call.query.shape[-3] - 1 else (), exact)

    def read(self, operands: Operands, interpret: Any) -> Read:
        """Returns what the queries read in all passes."""
        found, near = [far.read(operands, interpret) for far in self.far], operands.near
        if self.exact is not None and near is not None:
            found = [read._replace(lse=read.lse + near.query_factors) for read in found]
            found.append(self.exact.read(operands, near, interpret))
        return _merged(found)

    def gradients(
        self, operands: Operands, found: Read, of_out: jax.Array, interpret: Any
    ) -> Operands:
        """Returns the gradients of the tokens and their terms, and zeros for the rows.

        Args:
          operands: The arrays.
          found: Result of ``read``.
          of_out: Gradient of its outputs.
          interpret: Parameters of the interpreter, or None to compile.
        """
        near, of_near, parts = operands.near, None, []
        if self.exact is not None and near is not None:
            of_near, part = self.exact.gradients(operands, near, found, of_out, interpret)
            parts.append(part)
            found = found._replace(lse=found.lse - near.query_factors)
        parts += [far.gradients(operands, found, of_out, interpret) for far in self.far]
        total = parts[0]
        if len(parts) > 1:
            total = jax.tree.map(lambda *x: sum(y.astype(jnp.float32) for y in x), *parts)
        if of_near is not None:
            of_near = of_near._replace(query_factors=total.query_terms)
        return jax.tree.map(jnp.zeros_like, operands)._replace(
            query=total.query.astype(operands.query.dtype),
            key=total.key.astype(operands.key.dtype),
            value=total.value.astype(operands.value.dtype),
            key_terms=total.terms,
            near=of_near,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(interpret: Any, estimator: Estimator, call: Call) -> jax.Array:
    """Returns ``[B, T, N, D]``.

    Args:
      interpret: Parameters of the interpreter, or None to compile.
      estimator: W, the feature map and the band.
      call: A call that the kernels can take, in which positions matter.
    """
    return Passes.of(estimator, call).read(lay_out(estimator, call), interpret).out


def _forward(interpret: Any, estimator: Any, call: Any) -> tuple[jax.Array, Any]:
    # No kernel has gradients of the rows, nor of the scale, which multiplies them.
    is_learned = any(x.perturbed for x in jax.tree.leaves((estimator, call.scale)))
    estimator, call = jax.tree.map(lambda x: x.value, (estimator, call))

    def read(estimator: Estimator, call: Call) -> Read:
        return Passes.of(estimator, call).read(lay_out(estimator, call), interpret)

    found = without_gradient(read, estimator, call)
    return found.out, (estimator, call, None if is_learned else found)


def _backward(interpret: Any, kept: Any, of_out: jax.Array) -> Any:
    estimator, call, found = kept
    if found is None:
        _, pull_back = jax.vjp(xla.attend, estimator, call)
        shape = call.query.shape[:-1]
        return pull_back(of_out[:, : shape[-2]].reshape(*shape, of_out.shape[-1]))
    operands, pull_back = jax.vjp(lay_out, estimator, call)
    run = functools.partial(Passes.of(estimator, call).gradients, interpret=interpret)
    return pull_back(without_gradient(run, operands, found, of_out))


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _later(x: jax.Array, axis: int, by: int, fill: float = 0) -> jax.Array:
    """Moves the entries of an axis by some places, those that leave it out."""
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (by, -by, 0)
    return lax.pad(x, jnp.asarray(fill, x.dtype), padding) if by else x


def _marked(terms: jax.Array, value: jax.Array) -> jax.Array:
    """Returns the terms of keys, NaN also where a value of a visible key is not finite."""
    is_finite = jnp.swapaxes(jnp.all(jnp.isfinite(value), axis=-1), 1, 2)
    return jnp.where(is_finite | (terms == -jnp.inf), terms, jnp.nan)


def _merged(reads: list[Read]) -> Read:
    """Returns what queries read of all keys from what they read of disjoint sets of them."""
    if len(reads) == 1:
        return reads[0]
    weights, lse = flash.shares(jnp.stack([read.lse for read in reads]))
    both = zip(jnp.swapaxes(weights, 2, 3)[..., None], reads, strict=True)
    out = sum(weight * read.out.astype(jnp.float32) for weight, read in both)
    return Read(out.astype(jnp.bfloat16), lse)
