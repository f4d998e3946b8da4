"""Bundles and bytes that are read from a compiled program and its schedules, on known ones."""

import jax
import numpy as np
import pytest

from benchmarks import exact_kernel, schedule, tpu
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error

# Two arrays are copied to the memory of the core, of which one is multiplied; a kernel reads the
# product and an array in the device's memory, whose length is padded to whole tiles.
HALF, KERNEL = "bf16[8,197]{1,0:T(8,128)(2,1)", 'custom_call_target="tpu_custom_call"'
WINDOWS = 'backend_config={"iteration_bounds":["2","1","3"]}'
PROGRAM = f"""
HloModule jit_attend, is_scheduled=true

ENTRY %main (x: bf16[8,197], y: f32[3,200]) -> f32[3,200] {{
  %x = {HALF}}} parameter(0)
  %y = f32[3,200]{{0,1:T(8,128)}} parameter(1)
  %copy-start = ({HALF}S(1)}}, {HALF}}}, u32[]{{:S(2)}}) copy-start(%x)
  %copy-done = {HALF}S(1)}} copy-done(%copy-start)
  %fusion.5 = f32[3,200]{{1,0:T(8,128)S(1)}} fusion(%copy-done), calls=%fused, {WINDOWS}
  %fusion.50 = f32[3,200]{{1,0:T(8,128)S(1)}} fusion(%fusion.5), kind=kLoop, calls=%other
  ROOT %kernel.1 = f32[3,200]{{1,0:T(8,128)}} custom-call(%fusion.50, %y), {KERNEL}
}}
"""
SCHEDULE = """= control target key start

     0   :  { %1 = vsyncpa }
   0x1   :  { %2 = smov }
   0x2 LB: > { %3 = sadd }
   0x3   : > { %4 = vmul }
   0x4 PF: > { %5 = scmp }
   0x5   :  { %6 = vsyncpa }
"""


@pytest.mark.fast
def test_bytes_are_those_of_the_device_with_padding():
    copied = 8 * 256 * 2
    # The fastest axis of y has 3 numbers, in tiles of 128; its other axis is whole already.
    of_y, of_result = 200 * 128 * 4, 8 * 256 * 4
    assert tpu.bytes_moved(PROGRAM) == copied + of_y + of_result


@pytest.mark.fast
def test_bytes_of_a_loop_are_unknown():
    loop = '  %w = (s32[]{:T(128)}) while(%x), condition=%c, body=%b, known_trip_count":{"n":"2"}'
    bodies = "%b (t: s32[]) -> s32[] {\n}\n%c (t: s32[]) -> pred[] {\n}\n"
    head, entry = PROGRAM.split("ENTRY")
    looping = f"{head}{bodies}ENTRY{entry.replace('  ROOT', loop + chr(10) + '  ROOT')}"
    assert tpu.bytes_moved(looping) is None


@pytest.mark.fast
def test_an_operation_runs_its_loop_for_each_window(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "FOLDER", tmp_path)
    for name in ("fusion.5", "fusion.50", "kernel.1"):
        (tmp_path / f"17-{name}-71-final_bundles.txt").write_text(SCHEDULE)
    (tmp_path / "18-fusion.5-70-schedule-analysis_final_bundles.txt").write_text("total: 9")
    # Three of six bundles are in the loop, which has six windows or, unless stated, one.
    assert schedule.operation_bundles(tpu.executed(PROGRAM)) == (3 + 6 * 3) + 6
    assert schedule.bundles("kernel", steps=2) == 12


def test_the_plain_kernel_is_exact_attention():
    q, k, v = inputs(150, batch=(2,), heads=3)
    out = exact_kernel.attend(q, k, v, interpret=True)
    expected = jax.nn.dot_product_attention(*(np.asarray(x) for x in (q, k, v)))
    assert relative_error(out, expected) < 1e-5
