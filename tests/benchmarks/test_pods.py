"""Checks what is read from compiled programs, and the estimates for pods, on known programs."""

import doctest
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import flops, pod_compile, pods, tpu

# A program as the TPU's compiler writes it: a fusion, and a loop of seven turns around another.
HLO = """
HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %add = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"1000"}
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = f32[8]{0} fusion(%x), calls=%fused, backend_config={"estimated_cycles":"30"}
  %all-reduce.1 = (bf16[2,3]{1,0}, f32[4]{0}) all-reduce(%a, %b), to_apply=%sum
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %outer = f32[8]{0} fusion(%x), calls=%fused, backend_config={"estimated_cycles":"5"}
  %loop = (s32[], f32[8]) while(%tuple), condition=%condition, body=%body
  %gathered = (f32[2]{0}, f32[16]{0}) all-gather-start(%outer), dimensions={0}
  %call = f32[8]{0} custom-call(%outer), custom_call_target="Mystery"
}
"""


class Compiled:
    def as_text(self):
        return HLO


@pytest.mark.fast
def test_cycles_of_a_loop_count_as_often_as_it_goes_round():
    assert tpu.static_cycles(Compiled()) == (5 + 7 * 30, ["Mystery"])


@pytest.mark.fast
def test_collectives_of_a_loop_count_as_often_as_it_goes_round():
    counts, received = tpu.collectives(tpu.executed(HLO))
    assert counts == {"all-reduce": 7, "all-gather": 1}
    assert received == 7 * (2 * 3 * 2 + 4 * 4) + 16 * 4


@pytest.mark.fast
@pytest.mark.devices(8)
def test_collectives_of_a_program_that_xla_compiled():
    mesh = jax.make_mesh((8,), ("data",))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    def function(x):
        def turn(carry, _):
            return jax.lax.pcast(jax.lax.psum(carry, "data"), "data", to="varying"), None

        return jax.lax.scan(turn, x, length=5)[0]

    sharding = jax.NamedSharding(mesh, jax.P("data"))
    compiled = function.lower(
        jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)
    ).compile()
    assert tpu.collectives(tpu.executed(compiled.as_text())) == ({"all-reduce": 5}, 5 * 3 * 4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [
        ("v3:4x4:dots:scanned", 16, 32),
        ("v4:2x2x4:dots:scanned", 16, 16),
        ("v5e:16x16:none:unrolled", 256, 256),
        ("v6e:16x16:none:scanned", 256, 256),
    ],
)
def test_sizes_of_pods(name, chips, devices):
    pod = pods.Pod.parse(name)
    assert (pod.num_chips, pod.num_devices) == (chips, devices)


@pytest.mark.fast
def test_names_that_are_no_pods_are_refused():
    for name in ("v5e:16x16", "v9:4x4:none:scanned", "v3:4x4:some:scanned", "v3:4x4:none:twice"):
        with pytest.raises(ValueError, match=f"as in v5e:16x16:none:scanned, got '{name}'"):
            pods.Pod.parse(name)


class Lowered(NamedTuple):
    text: str

    def as_text(self):
        return self.text


@pytest.mark.fast
def test_no_program_is_compiled_twice(monkeypatch, tmp_path):
    compiled = []

    def program(pod, attention):
        return Lowered("exact" if attention == "exact" else "features"), {"flops": len(attention)}

    def compile_and_read(lowered):
        compiled.append(lowered.text)
        return {"cycles": len(compiled)}

    monkeypatch.setattr(pod_compile, "compile_and_read", compile_and_read)
    names, path = ["v3:4x4:none:scanned", "v4:2x2x4:none:scanned"], tmp_path / "pods.jsonl"
    monkeypatch.setattr(pod_compile, "PROGRAMS", {program: ("simplex",)})
    pod_compile.rows_of(path, names[:1])  # The first call stands for a stopped run.
    monkeypatch.setattr(pod_compile, "PROGRAMS", {program: ("simplex", "orthogonal", "exact")})
    rows = pod_compile.rows_of(path, names)
    assert compiled == ["features", "exact"] * 2
    assert [row["cycles"] for row in rows] == [1, 1, 2, 3, 3, 4]
    assert [row["flops"] for row in rows] == [7, 10, 5] * 2
    assert pod_compile.rows_of(path, names) == rows
    assert len(compiled) == 4


def rows():
    """Returns rows of a step at a tenth of a v3's peak, which is 100 operations per cycle."""
    pod = "v3:4x4:dots:scanned"
    step = {"flops": 4e13, "model_flops": 3.2e13, "bytes": 17 * 2**30, "cycles": 1e11, "seconds": 9}
    step |= {"collectives": {"all-reduce": 2}, "received": 3 * 2**20, "sha256": "a"}
    return [
        {"pod": pod, "program": "product", "attention": "", "flops": 1e12, "cycles": 1e10},
        {"pod": pod, "program": "step", "attention": "simplex", **step},
        {"pod": pod, "program": "step", "attention": "orthogonal", **step},
        {"pod": pod, "program": "redraw", "attention": "simplex", "cycles": 3e10, "seconds": 1},
        {"pod": pod, "program": "redraw", "attention": "orthogonal", "cycles": 1e10, "seconds": 2},
    ]


def lines(table):
    return table.splitlines()[2:]


@pytest.mark.fast
def test_attentions_with_one_program_share_a_line():
    assert pods.utilization(rows()[1], rows()) == pytest.approx(0.1)
    [line] = lines(pods.step_table(rows()))
    assert line.startswith("| v3:4x4, dots, scanned | simplex, orthogonal | 17.00 of 16 | no |")
    assert line.endswith("| 1.25 |  | 100000.00 | 10% | 2 all-reduce | 3 | 9 s |")


@pytest.mark.fast
def test_redraws_alone_and_with_the_step():
    [line] = lines(pods.redraw_table(rows()))
    assert line.endswith(f"| 30000.000 | 10000.000 | 3.0000 | {13 / 11:.5f} | 1 s, 2 s |")


@pytest.mark.fast
def test_a_step_in_kernels_has_bundles_and_no_estimate():
    in_kernels = rows()[1] | {"attention": "simplex in kernels", "sha256": "b", "bundles": 3e6}
    both = [*rows(), in_kernels]
    _, line = lines(pods.step_table(both))
    assert line.endswith("| 1.25 | 3.0 |  |  | 2 all-reduce | 3 | 9 s |")
    assert pods.hours_table(both, steps=100_000) == pods.hours_table(rows(), steps=100_000)


@pytest.mark.fast
def test_hours_of_a_training():
    [line] = lines(pods.hours_table(rows(), steps=100_000))
    # At a tenth of the peak of 16 chips with 123e12 per second, 3.2e13 operations take 0.1626 s.
    assert line.endswith("| 16 | 0.032 | 4.5, 2.3 | 72, 36 | 4.5 | 72 |")


@pytest.mark.fast
@pytest.mark.parametrize("module", [flops, pods])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
