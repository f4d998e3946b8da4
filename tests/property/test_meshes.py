"""Checks attention over the axes of random meshes against float64: outputs and gradients."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, note, seed, settings
from hypothesis import strategies as st

from tests.attention.devices import make_mesh
from tests.property.cases import Data, Program, datas, programs
from tests.property.checks import check_gradients, check_values
from tests.property.library import COMPILER_OPTIONS, DIFFERENTIABLE, Arrays, attend
from tests.versions import enable_x64

P = jax.P
MECHANISMS = ("features", "band", "blend", "joint")
MODES = ("bidirectional", "causal", "packed", "packed causal")
# Of mesh axes: Auto ones whose length is named or left to XLA, or those of a shard_map.
KINDS = ("explicit", "auto", "unnamed", "manual")
EXAMPLES = 8  # 512 in all.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes, and what arrays have to do with them.

    Attributes:
      kind: One of ``KINDS``.
      sizes: Numbers of devices along "batch", "length" and "heads".
    """

    kind: str
    sizes: tuple[int, int, int]

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip(("batch", "length", "heads"), self.sizes, strict=True))

    @property
    def names(self) -> dict[str, str]:
        """Returns what the user says of the length."""
        return {"sequence_axis": "length"} if self.kind in ("auto", "manual") else {}

    def specs(self, program: Program, x: Arrays) -> dict[str, P]:
        """Returns how each array is sharded."""
        key_heads = "heads" if program.key_heads % self.axes["heads"] == 0 else None
        rows = P(key_heads) if program.per_head else P()
        specs = {
            "query": P("batch", "length", "heads"),
            "key": P("batch", "length", key_heads),
            "value": P("batch", "length", key_heads),
            "projection": rows,
            "log_weights": rows,
            "near_weight": P("heads"),
            "far_weights": P(None, "heads"),
            "scale": P(),
            "query_seq_lengths": P("batch"),
            "key_value_seq_lengths": P("batch"),
            "segment_ids": P("batch", "length"),
        }
        for name, axes in (("mask", program.mask), ("bias", program.bias)):
            of_heads = "heads" if "n" in axes else None
            spec = ("length",) if axes == "s" else (of_heads, None, "length")
            specs[name] = P("batch", *spec) if "b" in axes else P(*spec)
        return {name: specs[name] for name in x}


@st.composite
def cases(draw: st.DrawFn, mechanism: str, mode: str, kind: str) -> tuple[Program, Data, Layout]:
    """Draws a program whose axes the devices of a mesh can share, data, and the mesh."""
    sizes = draw(
        st.tuples(*(st.sampled_from(options) for options in ((1, 2), (2, 1, 4, 8), (1, 2)))).filter(
            lambda sizes: 1 < np.prod(sizes) <= 8
        )
    )
    program = draw(programs(mechanism, mode))
    length = draw(st.sampled_from((8, 16)))
    # A band over devices needs as many keys as queries.
    is_cross = (mechanism, mode) == ("features", "bidirectional") and draw(st.booleans())
    program = dataclasses.replace(
        program,
        batch=(2,),
        length=length,
        key_length=24 - length if is_cross else length,
        heads=4,
        key_heads=draw(st.sampled_from((2, 4, 1))),
    )
    return program, draw(datas(program)), Layout(kind, sizes)


@functools.lru_cache(maxsize=2)
def compiled(program: Program, layout: Layout, names: tuple[str, ...]) -> Any:
    """Returns the mesh, and attention with its gradients over its devices."""
    mesh = make_mesh(
        layout.kind if layout.kind in ("explicit", "manual") else "auto", **layout.axes
    )
    specs = layout.specs(program, dict.fromkeys(names))

    def call(x: Arrays) -> jax.Array:
        return attend(program, x, **layout.names)

    if layout.kind == "manual":
        out = P("batch", "length", "heads")
        call = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=out)

    def with_gradients(moving: Arrays, fixed: Arrays, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda moving: call(moving | fixed), moving)
        return out, pullback(cotangent.astype(out.dtype))[0]

    return mesh, specs, jax.jit(with_gradients, compiler_options=COMPILER_OPTIONS)


def run(
    layout: Layout, program: Program, x: Arrays, cotangent: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Runs attention and its backward pass over the devices of a mesh, as ``library.run`` does."""
    with enable_x64(program.dtype == "float64"):
        mesh, specs, with_gradients = compiled(program, layout, tuple(x))
        specs = specs | {"cotangent": P("batch", "length", "heads")}
        arrays = {
            name: jax.device_put(jnp.array(array), jax.NamedSharding(mesh, specs[name]))
            for name, array in (x | {"cotangent": cotangent}).items()
        }
        cotangent = arrays.pop("cotangent")
        moving = {name: arrays.pop(name) for name in DIFFERENTIABLE if name in arrays}
        return jax.tree.map(np.asarray, with_gradients(moving, arrays, cotangent))


@pytest.mark.slow
@pytest.mark.devices(8)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_many_meshes(mechanism, mode, kind):
    phases = (Phase.explicit, Phase.generate)  # A simpler case would take minutes to find.

    @settings(settings.get_profile("slow"), max_examples=EXAMPLES, phases=phases)
    @seed(zlib.crc32(f"{mechanism}, {mode}, {kind}".encode()))
    @given(cases(mechanism, mode, kind))
    def holds(case: tuple[Program, Data, Layout]) -> None:
        program, data, layout = case
        note(f"check_gradients({program!r}, {data!r}, partial(run, {layout!r}))")
        check_values(program, data, functools.partial(run, layout))
        check_gradients(program, data, functools.partial(run, layout))

    holds()


@pytest.mark.devices(8)
def test_a_branch_that_some_devices_take_waits_for_no_others():
    """XLA had put a collective into the branch for large keys, which some devices never reached."""
    program = Program(
        mechanism="features",
        mode="causal",
        batch=(2,),
        length=16,
        key_length=16,
        heads=4,
        key_heads=4,
        dim=8,
        width=1,
        maps=("hyperbolic",),
        num_features=16,
        per_head=True,
        dtype="bfloat16",
        mask="s",
        chunk_size=1,
    )
    data = Data(seed=87, spread=2.0, size=1e-25, shown=0.7, plants=("0", "2", "0"), whole=False)
    layout = Layout(kind="auto", sizes=(2, 2, 1))
    check_gradients(program, data, functools.partial(run, layout))
