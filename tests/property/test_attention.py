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
    return check != "out of band" or mechanism == "band"


every_check = pytest.mark.parametrize(
    ("mechanism", "mode", "check"),
    [
        (mechanism, mode, check)
        for mechanism, modes in MODES.items()
        for mode in modes
        for check in CHECKS
        if applies(check, mechanism, mode)
    ],
)


@every_check
def test_a_few_cases(mechanism, mode, check):
    run_check(mechanism, mode, check, profile="fast", count=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@every_check
def test_many_cases(mechanism, mode, check):
    run_check(mechanism, mode, check, profile="slow", count=4)


def run_check(mechanism: str, mode: str, check: str, *, profile: str, count: int) -> None:
    """Runs a check on random programs, and each program on several data.

    All checks of a mode draw the same cases: the first has them compiled, the others find them so.
    """

    @settings(settings.get_profile(profile))
    @seed(zlib.crc32(f"{mechanism}, {mode}".encode()))
    @given(cases(mechanism, mode, count))
    def holds(case: tuple[Program, list[Data]]) -> None:
        program, datas = case
        for data in datas:
            note(f"CHECKS[{check!r}]({program!r}, {data!r})")
            CHECKS[check](program, data)

    holds()
