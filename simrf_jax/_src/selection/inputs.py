"""Checked inputs of attention, one query at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax._src import checks
from simrf_jax._src.features.calibrated import Calibrated

Queries: TypeAlias = Float64[np.ndarray, "sequences heads queries dim"]
Keys: TypeAlias = Float64[np.ndarray, "sequences heads keys dim"]
Variances: TypeAlias = Float64[np.ndarray, "heads dim"]  # Variances of the rows along each axis.


class QueryPoint(NamedTuple):
    """One query of one head, with the keys that it sees.

    Attributes:
      sums: Sums x + y of the query and each key, in the coordinates of the rows, ``[n, dim]``.
      probabilities: Attention weights p, ``[n]``.
      value: Values V, ``[n, value_dim]``, or None for uncorrelated values of variance 1.
      squared_outputs: Squared norm of the exact outputs of all queries of the head, or 1 if all
        values are zeros. Errors are relative to it.
    """

    sums: Float64[np.ndarray, "n dim"]
    probabilities: Float64[np.ndarray, " n"]
    value: Float64[np.ndarray, "n value_dim"] | None
    squared_outputs: float

    @property
    def share(self) -> float:
        """Share of the query's output in ``squared_outputs``."""
        output = self.probabilities if self.value is None else self.probabilities @ self.value
        return float(output @ output) / self.squared_outputs

    @property
    def weights(self) -> Float64[np.ndarray, "2 n n"]:
        """Factors of the covariances in the relative errors of the output and of the normalizer.

        They are p_j p_l (V_j - o) . (V_l - o) and p_j p_l.
        """
        p = self.probabilities
        of_normalizer = np.outer(p, p)
        if self.value is not None:
            deviations = p[:, None] * (self.value - p @ self.value)
            of_output = deviations @ deviations.T
        else:
            of_output = of_normalizer * (np.diag(np.ones(p.size)) - p[:, None] - p + p @ p)
        return np.stack([of_output / self.squared_outputs, of_normalizer])


class AttentionInputs(NamedTuple):
    """Checked queries, keys and values of attention, in float64.

    Attributes:
      x: Queries times the root of the scale, ``[sequences, N, T, H]``.
      y: Keys times the root of the scale, ``[sequences, N, S, H]``.
      value: Values ``[sequences, N, S, V]``, or None for uncorrelated values of variance 1.
      row_x: Queries in the coordinates of the rows of W; equal to x without a calibration.
      row_y: Keys in the coordinates of the rows of W.
      num_key_heads: Number K of key heads, each of which serves N / K query heads.
    """

    x: Queries
    y: Keys
    value: Float64[np.ndarray, "sequences heads keys value_dim"] | None
    row_x: Queries
    row_y: Keys
    num_key_heads: int

    @property
    def dim(self) -> int:
        """Dimension H of queries and keys."""
        return self.x.shape[-1]

    @property
    def num_heads(self) -> int:
        """Number N of heads."""
        return self.x.shape[1]

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """Sequence and head of each attention, in order."""
        return list(np.ndindex(self.x.shape[:2]))

    def queries(self, head: tuple[int, ...], *, is_causal: bool = False) -> Iterator[QueryPoint]:
        """Yields the queries of one head.

        Args:
          head: One of ``heads``.
          is_causal: If true, query t sees the keys 0 to t.
        """
        value = None if self.value is None else self.value[head]
        logits = self.x[head] @ self.y[head].T
        if is_causal:
            logits = np.where(np.tri(*logits.shape) == 1, logits, -np.inf)
        probabilities = special.softmax(logits, axis=-1)
        outputs = probabilities if value is None else probabilities @ value
        is_zero = value is not None and not value.any()  # The error is then 0, and not 0 / 0.
        squared_outputs = 1.0 if is_zero else float(np.sum(outputs**2))
        for t, p in enumerate(probabilities):
            seen = slice(t + 1 if is_causal else None)
            sums = self.row_x[head][t] + self.row_y[head][seen]
            yield QueryPoint(sums, p[seen], None if value is None else value[seen], squared_outputs)

    def queries_of_all_heads(self) -> Iterator[QueryPoint]:
        """Yields the queries of one head after the other."""
        for head in self.heads:
            yield from self.queries(head)

    def part(
        self,
        *,
        sequences: slice = slice(None),
        queries: slice | Int[np.ndarray, " chosen"] = slice(None),
        keys: slice = slice(None),
    ) -> AttentionInputs:
        """Returns the inputs of some sequences, queries and keys, by default all."""
        x, row_x = (array[sequences, :, queries] for array in (self.x, self.row_x))
        y, row_y = (array[sequences, :, keys] for array in (self.y, self.row_y))
        value = None if self.value is None else self.value[sequences, :, keys]
        return AttentionInputs(x, y, value, row_x, row_y, self.num_key_heads)

    def some_queries(self, num_queries: int) -> AttentionInputs:
        """Returns the inputs with some of the queries of each head, evenly spaced.

        Args:
          num_queries: Largest number of queries.
        """
        length = self.x.shape[-2]
        places = np.linspace(0, length - 1, min(num_queries, length))
        return self.part(queries=np.unique(places.round().astype(int)))

    def halves(self) -> list[AttentionInputs]:
        """Returns the inputs of each half of the sequences, or of the tokens of a single sequence.

        Raises:
          ValueError: If a single sequence has fewer than two queries or two keys.
        """
        num_sequences, *lengths = len(self.x), self.x.shape[-2], self.y.shape[-2]
        if num_sequences > 1:
            return [self.part(sequences=half) for half in _halves(num_sequences)]
        if min(lengths) < 2:
            raise ValueError(
                "trials=True needs two sequences, or two queries and two keys, to fit on one half "
                f"and to measure on the other, got {lengths[0]} and {lengths[1]}."
            )
        both = zip(*map(_halves, lengths), strict=True)
        return [self.part(queries=queries, keys=keys) for queries, keys in both]

    def of_each_head(self, leaf: ArrayLike) -> Float64[np.ndarray, " heads *shape"]:
        """Repeats an array of a calibrated map for each query head.

        Args:
          leaf: One array for each key head.
        """
        array = np.asarray(leaf, np.float64)
        return np.repeat(array, self.num_heads // len(array), axis=0)

    def in_coordinates_of(self, calibration: Calibrated) -> AttentionInputs:
        """Returns inputs with ``row_x`` and ``row_y`` in the coordinates of a calibrated map.

        Args:
          calibration: Map with one array for each key head.

        Raises:
          ValueError: If the map is for other heads.
        """
        shape = np.shape(calibration.variances)
        if shape != (self.num_key_heads, self.dim):
            raise ValueError(
                "features must be a calibrated map for the heads of key, with variances "
                f"[{self.num_key_heads}, {self.dim}], got variances of shape {shape}."
            )
        c = calibration
        x_mean, x_matrix, y_mean, y_matrix = map(
            self.of_each_head, (c.query_mean, c.query_matrix, c.key_mean, c.key_matrix)
        )
        return self._replace(
            row_x=np.einsum("...nth,njh->...ntj", self.row_x - x_mean[:, None], x_matrix),
            row_y=np.einsum("...nth,njh->...ntj", self.row_y - y_mean[:, None], y_matrix),
        )


def _halves(length: int) -> tuple[slice, slice]:
    return slice(length // 2), slice(length // 2, None)


def attention_inputs(
    query: ArrayLike, key: ArrayLike, value: ArrayLike | None, scale: float | None
) -> AttentionInputs:
    """Returns checked arrays of attention, with one leading axis and the heads before the lengths.

    Args:
      query: Queries ``[..., T, N, H]``.
      key: Keys ``[..., S, K, H]``.
      value: Values ``[..., S, K, V]`` or None.
      scale: Scale of the logits, or None for the default.
    """
    query, key = _finite("query", query), _finite("key", key)
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
    num_heads, num_key_heads = query.shape[-2], key.shape[-2]
    x, y = (_heads_first(array, num_heads) * scale**0.5 for array in (query, key))
    if value is None:
        return AttentionInputs(x, y, None, x, y, num_key_heads)
    array = _finite("value", value)
    if array.ndim < 3 or array.shape[:-1] != key.shape[:-1] or not array.shape[-1]:
        raise ValueError(
            f"value must be [..., S, K, V] with key of shape {key.shape}, got {array.shape}."
        )
    return AttentionInputs(x, y, _heads_first(array, num_heads), x, y, num_key_heads)


def _finite(name: str, value: ArrayLike) -> Float64[np.ndarray, "*shape"]:
    array = checks.real(name, value)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {np.sum(~np.isfinite(array))} other numbers.")
    return array


def _heads_first(
    array: Float64[np.ndarray, "*batch length heads dim"], num_heads: int
) -> Float64[np.ndarray, "sequences num_heads length dim"]:
    one_batch = np.swapaxes(array.reshape(-1, *array.shape[-3:]), 1, 2)
    return np.repeat(one_batch, num_heads // one_batch.shape[1], axis=1)
