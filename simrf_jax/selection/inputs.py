"""Checked inputs of attention, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks


class QueryPoint(NamedTuple):
    """One query of one head with the keys that it sees.

    Attributes:
      sums: Sums x + y of the query and each key, in the coordinates of the rows, ``[n, dim]``.
      probabilities: Attention weights p, ``[n]``.
      value: Values V, ``[n, value_dim]``, or None for uncorrelated values of variance 1.
    """

    sums: Float64[np.ndarray, "n dim"]
    probabilities: Float64[np.ndarray, " n"]
    value: Float64[np.ndarray, "n value_dim"] | None

    @property
    def weights(self) -> Float64[np.ndarray, "n n"]:
        """Factors p_j p_l (V_j - o) . (V_l - o) of the covariances in the squared error."""
        p = self.probabilities
        if self.value is not None:
            deviations = p[:, None] * (self.value - p @ self.value)
            return deviations @ deviations.T
        products = np.diag(np.ones(p.size)) - p[:, None] - p + p @ p
        return np.outer(p, p) * products

    @property
    def squared_output(self) -> float:
        """Squared norm of the exact output o."""
        p = self.probabilities
        output = p if self.value is None else p @ self.value
        return float(output @ output)


class AttentionInputs(NamedTuple):
    """Checked queries, keys and values of attention, in float64.

    Attributes:
      x: Queries times the root of the scale, ``[..., N, T, H]``.
      y: Keys times the root of the scale, ``[..., N, S, H]``.
      value: Values ``[..., N, S, V]``, or None for uncorrelated values of variance 1.
      row_x: Queries in the coordinates of the rows of W, which are x without a calibration.
      row_y: Keys in the coordinates of the rows of W.
    """

    x: Float64[np.ndarray, "*heads queries dim"]
    y: Float64[np.ndarray, "*heads keys dim"]
    value: Float64[np.ndarray, "*heads keys value_dim"] | None
    row_x: Float64[np.ndarray, "*heads queries dim"]
    row_y: Float64[np.ndarray, "*heads keys dim"]

    @property
    def dim(self) -> int:
        """Dimension H of queries and keys."""
        return self.x.shape[-1]

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """Leading shape and number of heads."""
        return self.x.shape[:-2]

    def queries(self, head: tuple[int, ...], *, is_causal: bool = False) -> Iterator[QueryPoint]:
        """Yields the queries of one head.

        Args:
          head: Index into ``heads_shape``.
          is_causal: If true, query t sees the keys 0 to t.
        """
        for t, x in enumerate(self.x[head]):
            visible = slice(t + 1 if is_causal else None)
            value = None if self.value is None else self.value[head][visible]
            sums = self.row_x[head][t] + self.row_y[head][visible]
            yield QueryPoint(sums, special.softmax(self.y[head][visible] @ x), value)

    def some_queries(self, num_queries: int) -> AttentionInputs:
        """Returns the inputs with some of the queries of each head, evenly spaced.

        Args:
          num_queries: Largest number of queries.
        """
        length = self.x.shape[-2]
        places = np.linspace(0, length - 1, min(num_queries, length))
        chosen = np.unique(places.round().astype(int))
        return self._replace(x=self.x[..., chosen, :], row_x=self.row_x[..., chosen, :])

    def halves(self) -> tuple[AttentionInputs, AttentionInputs]:
        """Returns the inputs of one half of the sequences, or of the tokens of a single one.

        Raises:
          ValueError: If a single sequence has less than two queries or two keys.
        """
        *lead, _ = self.heads_shape
        if math.prod(lead) > 1:
            first, second = _halves(math.prod(lead))
            return self._sequences(first), self._sequences(second)
        lengths = self.x.shape[-2], self.y.shape[-2]
        if min(lengths) < 2:
            raise ValueError(
                "trials=True needs two sequences, or two queries and two keys, to fit on one half "
                f"and to measure on the other, got {lengths[0]} and {lengths[1]}."
            )
        of_x, of_y = map(_halves, lengths)
        return self._tokens(of_x[0], of_y[0]), self._tokens(of_x[1], of_y[1])

    def _sequences(self, part: slice) -> AttentionInputs:
        """Returns some sequences, on one leading axis."""
        num_lead = len(self.heads_shape) - 1

        def take(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*some"]:
            return x.reshape(-1, *x.shape[num_lead:])[part]

        return AttentionInputs(
            take(self.x),
            take(self.y),
            None if self.value is None else take(self.value),
            take(self.row_x),
            take(self.row_y),
        )

    def _tokens(self, queries: slice, keys: slice) -> AttentionInputs:
        """Returns some queries and keys of all sequences."""
        return AttentionInputs(
            self.x[..., queries, :],
            self.y[..., keys, :],
            None if self.value is None else self.value[..., keys, :],
            self.row_x[..., queries, :],
            self.row_y[..., keys, :],
        )


def _halves(length: int) -> tuple[slice, slice]:
    return slice(length // 2), slice(length // 2, None)


def attention_inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike | None, scale: float | None
) -> AttentionInputs:
    """Returns checked arrays of attention, with the heads before the lengths.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``.
      value: Values ``[..., S, K, V]`` or None.
      scale: Scale of the logits, or None for the default.
    """
    query, key = checks.real("query", query), checks.real("key", key)
    for name, array in {"query": query, "key": key}.items():
        if array.ndim < 3 or 0 in array.shape:
            raise ValueError(f"{name} must be [..., length, heads, dim], got shape {array.shape}.")
    dim = query.shape[-1]
    if dim < 2 or key.shape[-1] != dim or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            "query and key must have one leading shape and one dim of at least 2, "
            f"got {query.shape} and {key.shape}."
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "query must have a multiple of the heads of key, "
            f"got {query.shape[-2]} and {key.shape[-2]}."
        )
    if scale is None:
        scale = dim**-0.5
    checks.scalar("scale", scale, sign="at least 0")
    groups = query.shape[-2] // key.shape[-2]
    x = np.swapaxes(query, -2, -3) * scale**0.5
    y = _with_heads_first(key, groups) * scale**0.5
    if value is None:
        return AttentionInputs(x, y, None, x, y)
    array = checks.real("value", value)
    if array.ndim < 3 or array.shape[:-1] != key.shape[:-1] or not array.shape[-1]:
        raise ValueError(
            f"value must be [..., S, K, V] with key of shape {key.shape}, got {array.shape}."
        )
    return AttentionInputs(x, y, _with_heads_first(array, groups), x, y)


def _with_heads_first(
    array: Float64[np.ndarray, "*batch length heads dim"], groups: int
) -> Float64[np.ndarray, "*batch repeated_heads length dim"]:
    return np.repeat(np.swapaxes(array, -2, -3), groups, axis=-3)
