"""Random cases, each a program and data to run it on. Compilation takes most of the time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.property.feature_maps import MAPS

MODES = {
    "features": (
        "bidirectional",
        "causal",
        "packed",
        "packed causal",
        "decoding",
        "matrix",
        "causal matrix",
    ),
    "band": ("bidirectional", "causal", "packed", "packed causal", "decoding"),
    "blend": ("bidirectional", "causal", "packed", "packed causal", "decoding"),
    "joint": ("bidirectional", "causal", "packed", "packed causal", "decoding"),
}
BLENDS = (
    ("positive",),
    ("relu",),
    ("direction",),
    ("hyperbolic",),
    ("elu",),
    ("trigonometric",),
    ("positive", "elu"),
)


# Maps that the library refuses beside an exact band. It trusts functions of users.
OTHER_KERNELS = ("relu", "elu")


class _Brief:
    """A dataclass whose repr leaves out fields with their default values."""

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        told = (f"{k}={v!r}" for k, v in given.items() if v != defaults[k])
        return f"{type(self).__name__}({', '.join(told)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Makes hypothesis print the same repr."""
        del cycle
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True, repr=False)
class Program(_Brief):
    """Everything that is known when attention is compiled.

    Attributes:
      mechanism: "features", "band", "blend" of both, or both "joint" under one normalizer.
      mode: One of ``MODES``.
      batch: Leading shape.
      length: Number T of queries.
      key_length: Number S of keys.
      heads: Number N of query heads.
      key_heads: Number K of key heads.
      dim: Width H of queries and keys.
      width: Width D of values.
      maps: Names of the feature maps. Only a blend has more than one.
      num_features: Number of rows of W.
      per_head: True if each key head has its own W.
      paired: True if W has rows and their negatives, as cross-polytopes have.
      dtype: Type of queries, keys and values.
      mask: Axes of the mask, some of "bns" for batch, heads and keys; "" for no mask.
      bias: Axes of the bias, in the same notation.
      query_lengths: True if query_seq_lengths are given.
      key_lengths: True if key_value_seq_lengths are given.
      scale: True if the scale is given.
      chunk_size: The library's argument ``chunk_size``.
      block_size: The library's argument ``block_size``.
      bandwidth: The library's argument ``bandwidth``.
      pieces: Number of tokens in each step of decoding.
      append: True if decoding makes its states by ``append`` where it can.
    """

    mechanism: str
    mode: str
    batch: tuple[int, ...] = ()
    length: int = 5
    key_length: int = 5
    heads: int = 2
    key_heads: int = 2
    dim: int = 3
    width: int = 2
    maps: tuple[str, ...] = ("positive",)
    num_features: int = 5
    per_head: bool = False
    paired: bool = False
    dtype: str = "float32"
    mask: str = ""
    bias: str = ""
    query_lengths: bool = False
    key_lengths: bool = False
    scale: bool = False
    chunk_size: int | None = None
    block_size: int | None = None
    bandwidth: int = 1
    pieces: tuple[int, ...] = ()
    append: bool = False

    @property
    def is_causal(self) -> bool:
        return "causal" in self.mode or self.mode == "decoding"

    @property
    def is_packed(self) -> bool:
        return "packed" in self.mode

    @property
    def is_matrix(self) -> bool:
        return "matrix" in self.mode

    @property
    def is_signed(self) -> bool:
        return self.mechanism != "band" and any(MAPS[name].signed for name in self.maps)

    @property
    def is_projected(self) -> bool:
        return self.mechanism != "band" and any(MAPS[name].projected for name in self.maps)

    @property
    def is_weighted(self) -> bool:
        return self.mechanism != "band" and any(MAPS[name].weighted for name in self.maps)

    @property
    def groups(self) -> int:
        """Returns the number of query heads for each key head."""
        return self.heads // self.key_heads


@dataclasses.dataclass(frozen=True, repr=False)
class Data(_Brief):
    """Everything that is not known when attention is compiled.

    Attributes:
      seed: Seed of everything that ``arrays`` draws.
      spread: Standard deviation of queries and keys.
      size: Standard deviation of values.
      shown: Share of the keys that the mask and the bias show.
      plants: Numbers that are planted in queries, keys and values; None plants nothing.
      everywhere: If true, plant in all places of a kind, otherwise in about half of them.
      whole: If true, plant in whole vectors, otherwise in their last entry.
    """

    seed: int = 0
    spread: float = 1.0
    size: float = 1.0
    shown: float = 1.0
    plants: tuple[str | None, str | None, str | None] = ("nan", "nan", "nan")
    everywhere: bool = True
    whole: bool = True


@st.composite
def programs(draw: st.DrawFn, mechanism: str, mode: str) -> Program:
    """Draws a program; hypothesis shrinks each choice to its first option."""

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    decoding, banded = mode == "decoding", mechanism == "band"
    self_attention = decoding or "packed" in mode
    in_chunks = mechanism == "joint" or (not banded and (self_attention or mode == "causal"))
    length = pick(5, 1, 2, 8, 13, 20)
    heads, key_heads = pick((2, 2), (1, 1), (4, 2), (3, 1))
    # Decoding keeps one state for all query heads that share a key head.
    by_head = () if decoding and heads > key_heads else ("ns", "bns")
    maps = {
        "features": tuple((name,) for name in MAPS),
        "band": (("positive",),),
        "blend": BLENDS,
        "joint": tuple((name,) for name in MAPS if MAPS[name].argument not in OTHER_KERNELS),
    }
    return Program(
        mechanism,
        mode,
        batch=pick((), (2,), (1, 2)),
        length=length,
        key_length=length if self_attention else pick(length, length, 7, 1),
        heads=heads,
        key_heads=key_heads,
        dim=pick(3, 8),
        width=pick(2, 1),
        maps=pick(*maps[mechanism]),
        num_features=5 if banded else pick(5, 16),
        per_head=not banded and pick(False, True),
        paired=not banded and pick(False, True),
        dtype=pick("float32", "float32", "bfloat16", "float64"),
        mask=pick("", "s", "bs", *by_head),
        bias=pick("", "", "s", "bs", *by_head),
        query_lengths=pick(False, False, True),
        key_lengths=pick(False, False, True),
        scale=pick(False, True),
        chunk_size=pick(4, None, 1, 2, 8) if in_chunks else None,
        block_size=pick(None, 1, 4) if mechanism in ("band", "blend") and not decoding else None,
        bandwidth=1 if mechanism == "features" else pick(1, 0, 3, 30),
        pieces=draw(cuts(length)) if decoding else (),
        append=decoding and mechanism in ("features", "joint") and pick(False, True),
    )


@st.composite
def cuts(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Draws the lengths of a prompt, of single tokens, and of a last piece of several tokens."""
    prompt = min(draw(st.sampled_from((0, length // 2, length, 3))), length)
    last = min(draw(st.sampled_from((0, 4))), length - prompt)
    pieces = [prompt, *[1] * (length - prompt - last), last]
    return tuple(size for size in pieces if size)


@st.composite
def datas(draw: st.DrawFn, program: Program) -> Data:
    """Draws the data of one run."""
    # Small inputs keep the denominators of signed maps away from zero, where no digits are left.
    spreads = (0.5, 0.125, 0.25, 1.0) if program.is_signed else (1.0, 0.5, 2.0, 4.0, 8.0, 16.0)
    plants = st.sampled_from(("nan", None, "inf", "-inf", "1e30", "3e38", "-3e38", "0", "2"))
    return Data(
        seed=draw(st.integers(0, 99)),
        spread=draw(st.sampled_from(spreads)),
        size=draw(st.sampled_from((1.0, 1.0, 1.0, 1e25, 1e-25))),
        shown=draw(st.sampled_from((0.7, 1.0, 0.8, 0.4, 0.0))),
        plants=draw(st.tuples(plants, plants, plants).filter(any)),
        everywhere=draw(st.booleans()),
        whole=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, mechanism: str, mode: str, count: int) -> tuple[Program, list[Data]]:
    """Draws a program and several data to run it on."""
    program = draw(programs(mechanism, mode))
    return program, draw(st.lists(datas(program), min_size=count, max_size=count, unique=True))


def arrays(program: Program, data: Data) -> dict[str, np.ndarray]:
    """Returns the arrays to call attention with, by the names of the library's arguments."""
    p, rng = program, np.random.default_rng(data.seed)
    dtype = np.dtype(jnp.dtype(p.dtype))
    wide = np.promote_types(dtype, np.float32)
    of_tokens = functools.partial(_normal, rng, dtype)
    of_all = functools.partial(_normal, rng, wide, 1.0)
    x = {
        "query": of_tokens(data.spread, *p.batch, p.length, p.heads, p.dim),
        "key": of_tokens(data.spread, *p.batch, p.key_length, p.key_heads, p.dim),
    }
    if not p.is_matrix:
        x["value"] = of_tokens(data.size, *p.batch, p.key_length, p.key_heads, p.width)
    if p.is_projected:
        x["projection"] = of_all(*(p.key_heads,) * p.per_head, p.num_features, p.dim)
        if p.paired:
            pairs = p.num_features // 2
            x["projection"][..., 1 : 2 * pairs : 2, :] = -x["projection"][..., : 2 * pairs : 2, :]
    if p.is_weighted:
        x["log_weights"] = of_all(*(p.key_heads,) * p.per_head, p.num_features)
    if p.mechanism == "blend":
        x["near_weight"], x["far_weights"] = of_all(p.heads), of_all(len(p.maps), p.heads)
    if p.mask:
        x["mask"] = rng.random(_shape_over_keys(p, p.mask)) < data.shown
    if p.bias:
        x["bias"] = of_all(*_shape_over_keys(p, p.bias))
        x["bias"][rng.random(x["bias"].shape) > data.shown] = -np.inf
    if p.scale:
        x["scale"] = rng.choice([0.05, 0.3, 1.7, -0.4]).astype(wide)
    # Lengths have an axis even for one sequence without a batch.
    lengths = functools.partial(rng.integers, low=0, size=p.batch or (1,), dtype=np.int32)
    if p.query_lengths:
        x["query_seq_lengths"] = lengths(high=p.length + 1)
    if p.key_lengths:
        x["key_value_seq_lengths"] = lengths(high=p.key_length + 1)
    if p.is_packed:
        # Ids that occur again begin another segment.
        begins = rng.random((*p.batch, p.length)) < rng.choice([0.1, 0.3, 0.8])
        x["segment_ids"] = (np.cumsum(begins, axis=-1) % 3 - 1).astype(np.int32)
    return x


def _normal(rng: np.random.Generator, dtype: np.dtype, deviation: float, *shape: int) -> np.ndarray:
    return (deviation * rng.normal(size=shape)).astype(dtype)


def _shape_over_keys(program: Program, axes: str) -> tuple[int, ...]:
    """Returns the shape of a mask or a bias, with a query axis of size 1 unless keys are alone."""
    if axes == "s":
        return (program.key_length,)
    batch = program.batch if "b" in axes else ()
    return (*batch, program.heads if "n" in axes else 1, 1, program.key_length)
