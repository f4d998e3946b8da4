"""Checks how the launches and bytes of a program for GPUs are counted, and what is worse."""

import json

import pytest

from benchmarks import gpu, gpu_compile

pytestmark = pytest.mark.fast
PROGRAM = """
HloModule jit_f, is_scheduled=true

%add (p.0: f32[], p.1: f32[]) -> f32[] {
  %p.0 = f32[] parameter(0)
  %p.1 = f32[] parameter(1)
  ROOT %sum = f32[] add(%p.0, %p.1)
}

%update (p.2: f32[8,64], p.3: f32[1,64]) -> f32[8,64] {
  %p.2 = f32[8,64]{1,0} parameter(0)
  %p.3 = f32[1,64]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %updated = f32[8,64]{1,0} dynamic-update-slice(%p.2, %p.3, %zero, %zero)
}

%slices (p.4: bf16[1024,64]) -> (f32[2], bf16[16,64]) {
  %p.4 = bf16[1024,64]{1,0} parameter(0)
  %start = s32[] constant(3)
  %whole = bf16[1024,64]{1,0} bitcast(%p.4)
  %taken = bf16[16,64]{1,0} dynamic-slice(%whole, %start, %start), dynamic_slice_sizes={16,64}
  %first16 = bf16[16,64]{1,0} slice(%whole), slice={[0:16], [0:64]}
  %sum.16 = bf16[16,64]{1,0} add(%taken, %first16)
  %two = f32[2]{0} constant({1, 2})
  ROOT %both = (f32[2]{0}, bf16[16,64]{1,0}) tuple(%two, %sum.16)
}

%body (p.5: (f32[8,64], f32[1,64])) -> (f32[8,64], f32[1,64]) {
  %p.5 = (f32[8,64]{1,0}, f32[1,64]{1,0}) parameter(0)
  %a = f32[8,64]{1,0} get-tuple-element(%p.5), index=0
  %b = f32[1,64]{1,0} get-tuple-element(%p.5), index=1
  %begun = ((f32[8,64], f32[1,64]), f32[8,64]) fusion-start(%a, %b), kind=kLoop, calls=%update
  %c = f32[8,64]{1,0} fusion-done(%begun)
  ROOT %next = (f32[8,64]{1,0}, f32[1,64]{1,0}) tuple(%c, %b)
}

%small (p.6: f32[2]) -> f32[2] {
  %p.6 = f32[2]{0} parameter(0)
  ROOT %negated = f32[2]{0} negate(%p.6)
}

%large (p.7: f32[2]) -> f32[2] {
  %p.7 = f32[2]{0} parameter(0)
  %cosine = f32[2]{0} cosine(%p.7)
  ROOT %sine = f32[2]{0} sine(%cosine)
}

ENTRY %main (x: bf16[1024,64], y: (f32[8,64], f32[1,64])) -> f32[2] {
  %x = bf16[1024,64]{1,0} parameter(0)
  %y = (f32[8,64]{1,0}, f32[1,64]{1,0}) parameter(1)
  %loop = (f32[8,64]{1,0}, f32[1,64]{1,0}) while(%y), body=%body, {"known_trip_count":{"n":"5"}}
  %slice = (f32[2]{0}, bf16[16,64]{1,0}) fusion(%x), kind=kLoop, calls=%slices
  %first = f32[2]{0} get-tuple-element(%slice), index=0
  %choice = f32[2]{0} conditional(%x, %first), branch_computations={%large, %small}
  ROOT %call = f32[2]{0} custom-call(%choice), custom_call_target="kernel"
}
"""


def test_launches_and_bytes():
    cost = gpu.cost_of(PROGRAM)
    # Five updates of a row, which they also read; twice 16 rows that are read, and their sum,
    # which is written; the smaller branch; and the kernel.
    assert cost.launches == 5 + 1 + 1 + 1
    assert cost.bytes == 5 * 2 * 4 * 64 + (3 * 2 * 16 * 64 + 8) + 2 * 8 + 2 * 8


def test_what_ptxas_says(tmp_path):
    report = "0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\nUsed 168 registers,"
    (tmp_path / "attention_pass_0.ptxas").write_text(report)
    (tmp_path / "attention_pass_0.resources.txt").write_text("Resources(smem_scratch_bytes=86016,")
    (tmp_path / "attention_pass_0.sass_ctrl").write_text("HGMMA.64x64x16 R1\nFFMA R2\nHGMMA.64x8")
    [row] = gpu.kernels(tmp_path)
    assert row == {
        "kernel": "attention_pass",
        "registers": 168,
        "spilled": 12,
        "shared": 86016,
        "products": 2,
    }


def test_numbers_that_grew():
    recorded = json.loads(gpu_compile.RESULTS.read_text())
    assert gpu_compile.worse(recorded, recorded) == []
    grown = json.loads(gpu_compile.RESULTS.read_text())
    name = "kernels"
    grown[name]["launches"] += 1
    grown[name]["kernels"][0] |= {"spilled": 4, "products": 0}
    assert gpu_compile.worse(grown, recorded) == [
        f"{name}: launches is 6, 5 is recorded",
        f"{name}, kernel 0: spilled is 4, 0 is recorded",
        f"{name}, kernel 0: no HGMMA",
    ]


def test_the_contract_of_the_forward_pass():
    row = json.loads(gpu_compile.RESULTS.read_text())["kernels"]
    assert row["launches"] <= 5
    assert row["MiB"] <= 80
    assert [(kernel["spilled"], kernel["products"] > 0) for kernel in row["kernels"]] == 2 * [
        (0, True)
    ]
