"""What attention must give: every query and head by itself, in float64, by no code of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.property.cases import Program
from tests.property.feature_maps import MAPS

Arrays = dict[str, np.ndarray]


class Rows(NamedTuple):
    """Outputs ``[..., T, N, D]``.

    Attributes:
      out: The outputs.
      size: How large they are before anything cancels, which is what rounding errors scale with.
      condition: ``[..., T, N]``, the sizes of the terms of a denominator over its own.
    """

    out: np.ndarray
    size: np.ndarray
    condition: np.ndarray


def visible(program: Program, x: Arrays, *, near: bool | None = None) -> np.ndarray:
    """Which keys each query sees, ``[..., N, T, S]``.

    Args:
      program: What is called.
      x: The arrays.
      near: Whether no key outside the band is seen; by default whether attention is banded alone.
    """
    p = program
    position, of_key = np.arange(p.length)[:, None], np.arange(p.key_length)
    seen = np.broadcast_to(log_weights(p, x)[..., None, :].real > -np.inf, _rows(p))
    if p.is_causal:
        seen = seen & (of_key <= position)
    if p.mechanism == "band" if near is None else near:
        seen = seen & (abs(of_key - position) <= p.bandwidth)
    if p.is_packed:
        runs = segments(x)
        seen = seen & (runs[..., :, None] == runs[..., None, :])[..., None, :, :]
    if "query_seq_lengths" in x:
        lengths = x["query_seq_lengths"].reshape(*p.batch, 1, 1, 1)
        seen = seen & (position < lengths)
    return seen


def _rows(program: Program) -> tuple[int, ...]:
    return (*program.batch, program.heads, program.length, program.key_length)


def segments(x: Arrays) -> np.ndarray:
    """Numbers the runs of equal ids."""
    ids = x["segment_ids"]
    return np.cumsum(np.diff(ids, axis=-1, prepend=ids[..., :1]) != 0, axis=-1)


def log_weights(program: Program, x: Arrays) -> np.ndarray:
    """What is added to the logits of each key, ``[..., N, S]``; minus infinity hides it."""
    p = program
    shape = (*p.batch, p.heads, 1, p.key_length)
    weights = np.zeros(shape) + x.get("bias", 0.0)
    weights = np.where(np.broadcast_to(x.get("mask", True), shape), weights, -np.inf)
    if "key_value_seq_lengths" in x:
        lengths = x["key_value_seq_lengths"].reshape(*p.batch, 1, 1, 1)
        weights = np.where(np.arange(p.key_length) < lengths, weights, -np.inf)
    return weights[..., 0, :]


def attend(program: Program, x: Arrays) -> Rows:
    """The outputs of a program; analytic in all arrays, which may be complex."""
    x = {name: _widened(array) for name, array in x.items()}
    if program.is_matrix:
        # The weights are what attention makes of unit vectors.
        eye = np.broadcast_to(np.eye(program.key_length)[:, None], (*x["key"].shape[:-1], program.key_length))
        x["value"] = eye
    fields = list(_fields(program, x))
    return Rows(
        sum(weight * rows.out for weight, rows in fields),
        sum(abs(weight) * rows.size for weight, rows in fields),
        np.max([rows.condition for _, rows in fields], axis=0),
    )


def _widened(array: np.ndarray) -> np.ndarray:
    known = array.dtype.kind in "biuc"
    return array if known else array.astype(np.float64)


def _fields(program: Program, x: Arrays) -> Iterator[tuple[Any, Rows]]:
    """The near field and the far ones with their weights, ``[N, 1]``."""
    if program.mechanism != "features":
        seen = visible(program, x, near=True)
        yield x.get("near_weight", np.ones(program.heads))[:, None], _each_head(program, x, seen, None)
    if program.mechanism != "band":
        seen = visible(program, x, near=False)
        weights = x.get("far_weights", np.ones((1, program.heads)))
        for name, weight in zip(program.maps, weights, strict=True):
            yield weight[:, None], _each_head(program, x, seen, name)


def _each_head(program: Program, x: Arrays, seen: np.ndarray, name: str | None) -> Rows:
    """Attends by one feature map, or by the exact kernel for None."""
    p = program
    query, key, value = x["query"], x["key"], x["value"]
    weights = log_weights(p, x)
    scale = x.get("scale", p.dim**-0.5)
    shape = (*query.shape[:-1], value.shape[-1])
    complex_ = np.result_type(*x.values())
    rows = Rows(np.zeros(shape, complex_), np.zeros(shape), np.ones(shape[:-1]))
    for i in np.ndindex(p.batch):
        for n in range(p.heads):
            k = n // p.groups
            pair = query[i][:, n], key[i][:, k]
            if name is None:
                log = scale * (pair[0] @ pair[1].T)[..., None]
                sign = np.ones(log.shape)
            else:
                log, sign = _terms(name, *(np.sqrt(scale) * one for one in pair), _of_head(x, k))
            for t in range(p.length):
                _attend_row(
                    Rows(*(one[i][t, n] for one in rows[:2]), rows.condition[i][t, n : n + 1]),
                    log[t] + weights[i][n, :, None],
                    sign[t],
                    seen[i][n, t],
                    value[i][:, k],
                )
    return rows


def _of_head(x: Arrays, k: int) -> np.ndarray | None:
    w = x.get("projection")
    return w[k] if w is not None and w.ndim == 3 else w


def _terms(
    name: str, query: np.ndarray, key: np.ndarray, w: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The products of all features in logs, and their signs, ``[T, S, num_features]``."""
    w = w if MAPS[name].projected else None
    log_q, sign_q = MAPS[name].of_queries(query, w, "softmax")
    log_k, sign_k = MAPS[name].of_keys(key, w, "softmax")
    return log_q[:, None] + log_k, sign_q[:, None] * sign_k


def _attend_row(
    row: Rows, log: np.ndarray, sign: np.ndarray, seen: np.ndarray, value: np.ndarray
) -> None:
    """Writes one row, of ``[S, num_features]`` and ``[S, D]``; zeros where nothing is seen."""
    log, sign, value = log[seen], sign[seen], value[seen]
    shift = log.real.max(initial=-np.inf)
    if shift == -np.inf:
        return
    terms = sign * np.exp(log - shift)
    sizes, total = abs(terms).sum(axis=-1), terms.sum()
    row.out[:] = terms.sum(axis=-1) @ value / total
    row.condition[:] = sizes.sum() / abs(total)
    row.size[:] = sizes @ abs(value) / abs(total) + abs(row.out) * row.condition


def slope(program: Program, x: Arrays, name: str, direction: np.ndarray) -> np.ndarray:
    """The derivative of the outputs along a direction of one array, to the last digit."""
    step = 1e-100
    moved = x | {name: x[name].astype(np.float64) + 1j * step * direction}
    return attend(program, moved).out.imag / step
