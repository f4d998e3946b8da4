"""Every mode of every mechanism on random cases: its numbers, its gradients, and what it hides.

A failure ends with a call of the check that failed, which can be pasted after

    from tests.property.cases import Data, Program
    from tests.property.checks import CHECKS
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, note, seed, settings

from tests.property.cases import MODES, Data, Program, cases
from tests.property.checks import CHECKS


def applies(check: str, mechanism: str, mode: str) -> bool:
    if "future" in check:
        return "causal" in mode or mode == "decoding"
    if check == "another segment":
        return "packed" in mode
    if check == "out of band":
        return mechanism == "band"
    return check != "without jit"


ALL_MODES = [(mechanism, mode) for mechanism in MODES for mode in MODES[mechanism]]
each_mode = pytest.mark.parametrize(("mechanism", "mode"), ALL_MODES)
each_check = pytest.mark.parametrize(
    ("mechanism", "mode", "check"),
    [(*mode, check) for mode in ALL_MODES for check in CHECKS if applies(check, *mode)],
)


@pytest.mark.slow
@each_check
def test_a_few_cases(mechanism, mode, check):
    draw_cases(mechanism, mode, check, profile="fast", data_each=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_check
def test_many_cases(mechanism, mode, check):
    draw_cases(mechanism, mode, check, profile="slow", data_each=4)


@pytest.mark.slow
@each_mode
def test_cases_without_jit(mechanism, mode):
    draw_cases(mechanism, mode, "without jit", profile="fast", data_each=5)


def draw_cases(mechanism: str, mode: str, check: str, *, profile: str, data_each: int) -> None:
    """Draws programs and runs a check on each of them, with several data.

    All checks of a mode draw the same cases: the first has them compiled, the others find them so.
    """

    @settings(settings.get_profile(profile))
    @seed(zlib.crc32(f"{mechanism}, {mode}".encode()))
    @given(cases(mechanism, mode, data_each))
    def holds(case: tuple[Program, list[Data]]) -> None:
        program, several = case
        for data in several:
            note(f"CHECKS[{check!r}]({program!r}, {data!r})")
            CHECKS[check](program, data)

    holds()
