"""Attention in float64, for each query and head separately and without the library's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tests.property.cases import Program
from tests.property.feature_maps import MAPS

Arrays = dict[str, np.ndarray]


class Rows(NamedTuple):
    """Outputs of attention.

    Attributes:
      out: Outputs ``[..., T, N, D]``.
      size: Sums of the sizes of all terms, ``[..., T, N, D]``; rounding errors scale with them.
      condition: Sum of the sizes of a denominator's terms divided by its own size, ``[..., T, N]``.
    """

    out: np.ndarray
    size: np.ndarray
    condition: np.ndarray


def visible(program: Program, x: Arrays, *, near: bool | None = None) -> np.ndarray:
    """Returns which keys each query sees, ``[..., N, T, S]``.

    Args:
      program: Program whose masks apply.
      x: The arrays.
      near: If true, hide keys outside the band. The default is true for banded attention alone.
    """
    p = program
    position, of_key = np.arange(p.length)[:, None], np.arange(p.key_length)
    seen = log_weights(p, x)[..., None, :].real > -np.inf
    seen = np.broadcast_to(seen, (*p.batch, p.heads, p.length, p.key_length))
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


def segments(x: Arrays) -> np.ndarray:
    """Returns the number of each token's segment, which is a stretch of equal ids."""
    ids = x["segment_ids"]
    return np.cumsum(np.diff(ids, axis=-1, prepend=ids[..., :1]) != 0, axis=-1)


def log_weights(program: Program, x: Arrays) -> np.ndarray:
    """Returns the numbers to add to each key's logits, ``[..., N, S]``; minus infinity hides it."""
    p = program
    shape = (*p.batch, p.heads, 1, p.key_length)
    weights = np.zeros(shape) + x.get("bias", 0.0)
    weights = np.where(np.broadcast_to(x.get("mask", True), shape), weights, -np.inf)
    if "key_value_seq_lengths" in x:
        lengths = x["key_value_seq_lengths"].reshape(*p.batch, 1, 1, 1)
        weights = np.where(np.arange(p.key_length) < lengths, weights, -np.inf)
    return weights[..., 0, :]


def attend(program: Program, x: Arrays) -> Rows:
    """Returns the outputs of a program. They are analytic in all arrays, which may be complex."""
    x = {name: _widened(array) for name, array in x.items()}
    if program.is_matrix:
        # With unit vectors as values, the outputs are the attention weights.
        size = program.key_length
        x["value"] = np.broadcast_to(np.eye(size)[:, None], (*x["key"].shape[:-1], size))
    fields = list(_fields(program, x))
    return Rows(
        sum(weight * rows.out for weight, rows in fields),
        sum(abs(weight) * rows.size for weight, rows in fields),
        np.max([rows.condition for _, rows in fields], axis=0),
    )


def slope(program: Program, x: Arrays, name: str, direction: np.ndarray) -> np.ndarray:
    """Returns the derivative of the outputs along a direction of one array, to the last digit."""
    step = 1e-100  # A step in the imaginary part cancels no digits.
    moved = x | {name: x[name].astype(np.float64) + 1j * step * direction}
    return attend(program, moved).out.imag / step


def _widened(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def _fields(program: Program, x: Arrays) -> Iterator[tuple[np.ndarray, Rows]]:
    """Yields the near field and each far field, with their weights ``[N, 1]``."""
    ones = np.ones(program.heads)
    if program.mechanism in ("band", "blend"):
        yield x.get("near_weight", ones)[:, None], _field(program, x, None)
    if program.mechanism != "band":
        weights = x.get("far_weights", ones[None])
        for name, weight in zip(program.maps, weights, strict=True):
            yield weight[:, None], _field(program, x, name)


def _field(program: Program, x: Arrays, name: str | None) -> Rows:
    """Attends with one feature map, or with the exact kernel inside the band."""
    p = program
    seen = visible(p, x, near=name is None)
    weights = log_weights(p, x)
    shape = (*x["query"].shape[:-1], x["value"].shape[-1])
    rows = Rows(np.zeros(shape, np.result_type(*x.values())), np.zeros(shape), np.ones(shape[:-1]))
    for *i, n in np.ndindex(*p.batch, p.heads):
        k = n // p.groups
        query, key, value = (
            x[which][*i, :, head] for which, head in (("query", n), ("key", k), ("value", k))
        )
        log, sign = _terms(p, x, name, k, query, key)
        if p.mechanism == "joint":
            exact, _ = _terms(p, x, None, k, query, key)
            distance = abs(np.arange(len(query))[:, None] - np.arange(len(key)))
            near = (distance <= p.bandwidth)[..., None]
            # All terms of a pair in the band are the exact kernel, and all but one do not count.
            log, sign = np.where(near, exact, log), np.where(near, 0, sign)
            sign[..., :1] = np.where(near, 1, sign[..., :1])
        for t in range(p.length):
            row = _row(log[t] + weights[*i, n, :, None], sign[t], value, seen[*i, n, t])
            rows.out[*i, t, n], rows.size[*i, t, n], rows.condition[*i, t, n] = row
    return rows


def _terms(
    program: Program,
    x: Arrays,
    name: str | None,
    key_head: int,
    query: np.ndarray,
    key: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms and signs of the kernel's terms, ``[T, S, num_features]``.

    Queries are ``[T, H]`` and keys are ``[S, H]``. The exact kernel has one term.
    """
    scale = x.get("scale", np.float64(program.dim**-0.5))
    if name is None:
        log = scale * (query @ key.T)[..., None]
        return log, np.ones(log.shape)
    feature_map, w = MAPS[name], None
    if feature_map.projected:
        w = x["projection"][key_head] if program.per_head else x["projection"]
    sign = np.sign(scale.real)
    root = np.sqrt(sign * scale)
    log_q, sign_q = feature_map.of_queries(sign * root * query, w, "softmax")
    log_k, sign_k = feature_map.of_keys(root * key, w, "softmax")
    log = log_q[:, None] + log_k
    if feature_map.weighted:
        log = log + (x["log_weights"][key_head] if program.per_head else x["log_weights"])
    return log, sign_q[:, None] * sign_k


def _row(log: np.ndarray, sign: np.ndarray, value: np.ndarray, seen: np.ndarray) -> Rows:
    """Attends with terms ``[S, num_features]`` to values ``[S, D]``; zeros if none is seen."""
    log, sign, value = log[seen], sign[seen], value[seen]
    shift = log.real.max(initial=-np.inf)
    if shift == -np.inf:
        nothing = np.zeros(value.shape[-1])
        return Rows(nothing, nothing, np.ones(()))
    terms = sign * np.exp(log - shift)
    total, sizes = terms.sum(), abs(terms).sum(axis=-1)
    out, condition = terms.sum(axis=-1) @ value / total, sizes.sum() / abs(total)
    return Rows(out, sizes @ abs(value) / abs(total) + abs(out) * condition, condition)
