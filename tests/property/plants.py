"""Places where numbers are planted, and the queries that do not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.property import expected
from tests.property.cases import Data, Program

Arrays = dict[str, np.ndarray]
Finder = Callable[[Program, Arrays, np.random.Generator], "Places"]


class Places(NamedTuple):
    """A choice of queries and of keys.

    Attributes:
      queries: Booleans ``[..., T, N]``, True where a query is replaced.
      keys: Booleans ``[..., S, K]``, True where a key and its value are replaced.
    """

    queries: np.ndarray
    keys: np.ndarray


def hidden(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns the keys that no query sees, and the queries beyond the lengths."""
    del rng
    return Places(
        _beyond(program, x), ~_by_key_head(program, expected.visible(program, x)).any((-4, -3))
    )


def future(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns all tokens from some position on."""
    start = rng.integers(0, program.length + 1)
    queries, keys = _nowhere(program)
    queries[..., start:, :] = keys[..., start:, :] = True
    return Places(queries, keys)


def segment(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns all tokens of one segment."""
    runs = expected.segments(x)
    planted = (runs == rng.integers(0, runs.max() + 1))[..., None]
    queries, keys = _nowhere(program)
    return Places(queries | planted, keys | planted)


def out_of_band(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns one token, which queries beyond the bandwidth do not see."""
    position = rng.integers(0, program.key_length)
    queries, keys = _nowhere(program)
    queries[..., position : position + 1, :] = keys[..., position, :] = True
    return Places(queries, keys)


def one_key(program: Program, rng: np.random.Generator) -> Places:
    """Returns one key of one head of one sequence."""
    places = _nowhere(program)
    places.keys[tuple(rng.integers(0, size) for size in places.keys.shape)] = True
    return places


def another_head(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns all tokens of one key head and of its query heads."""
    head = rng.integers(0, program.key_heads)
    queries, keys = _nowhere(program)
    keys[..., head] = True
    queries[..., head * program.groups : (head + 1) * program.groups] = True
    return Places(queries, keys)


def another_sequence(program: Program, x: Arrays, rng: np.random.Generator) -> Places:
    """Returns all tokens of one sequence of the batch."""
    index = tuple(rng.integers(0, size) for size in program.batch)
    queries, keys = _nowhere(program)
    queries[index] = keys[index] = True
    return Places(queries, keys)


def _nowhere(program: Program) -> Places:
    p = program
    return Places(
        np.zeros((*p.batch, p.length, p.heads), bool),
        np.zeros((*p.batch, p.key_length, p.key_heads), bool),
    )


def _beyond(program: Program, x: Arrays) -> np.ndarray:
    """Returns which queries are beyond the lengths, ``[..., T, N]``."""
    beyond = _nowhere(program).queries
    if "query_seq_lengths" in x:
        lengths = x["query_seq_lengths"].reshape(*program.batch, 1, 1)
        beyond |= np.arange(program.length)[:, None] >= lengths
    return beyond


def _by_key_head(program: Program, seen: np.ndarray) -> np.ndarray:
    """Returns which keys each query sees, ``[..., T, G, S, K]``, from ``[..., N, T, S]``."""
    p = program
    split = seen.reshape(*p.batch, p.key_heads, p.groups, p.length, p.key_length)
    return np.moveaxis(split, (-4, -3, -2, -1), (-1, -3, -4, -2))


def some_of(places: Places, data: Data, rng: np.random.Generator) -> Places:
    """Returns all of the places, or about half of them."""
    if data.everywhere:
        return places
    return Places(*(place & (rng.random(place.shape) < 0.5) for place in places))


def touched(program: Program, x: Arrays, places: Places) -> np.ndarray:
    """Returns which queries, ``[..., T, N]``, are replaced or see a replaced token."""
    seen = _by_key_head(program, expected.visible(program, x))
    touched = (seen & places.keys[..., None, None, :, :]).any(-2)  # [..., T, G, K]
    touched = np.swapaxes(touched, -1, -2).reshape(places.queries.shape)
    return (touched | places.queries) & ~_beyond(program, x)


def apart(program: Program, x: Arrays, places: Places, rows: np.ndarray) -> np.ndarray:
    """Returns which keys, ``[..., S, K]``, get no part of their gradients from touched rows.

    Touched rows do not see these keys or, in causal attention, come before them. The gradient of
    any other key may be NaN because of a touched row that is not finite, even if the row's
    cotangent is zero.
    """
    p = program
    seen = _by_key_head(p, expected.visible(p, x))
    by_group = rows.reshape(*p.batch, p.length, p.key_heads, p.groups).swapaxes(-1, -2)
    apart = ~(seen & by_group[..., None, :]).any((-4, -3))
    if p.is_causal:
        first = np.where(rows.any(-1), np.arange(p.length), p.length).min(-1)
        apart |= (np.arange(p.key_length) < first[..., None])[..., None]
    return apart & ~places.keys


def plant(x: Arrays, places: Places, data: Data) -> Arrays:
    """Returns the arrays with planted numbers in these places."""
    x = dict(x)
    planted = {"query": places.queries, "key": places.keys, "value": places.keys}
    for (name, where), content in zip(planted.items(), data.plants, strict=True):
        if name in x and content is not None:
            x[name] = x[name].copy()
            entries = slice(None) if data.whole else slice(-1, None)
            x[name][..., entries][where] = np.asarray(float(content)).astype(x[name].dtype)
    return x
