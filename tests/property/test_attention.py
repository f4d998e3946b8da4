"""Every mode of every mechanism on random cases: its numbers, its gradients, and what it hides.

A failure ends with a call of the check that failed, which can be pasted after

    from tests.property.cases import Data, Program
    from tests.property.checks import CHECKS
"""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.property.cases import MODES, cases
from tests.property.checks import CHECKS


def applies(check: str, mechanism: str, mode: str) -> bool:
    if "future" in check:
        return "causal" in mode or mode == "decoding"
    if check == "another segment":
        return "packed" in mode
    return check != "out of band" or mechanism == "band"


# The checks of a mode draw the same cases, and one after another they find them compiled.
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
@given(draw=st.data())
def test_a_few_cases(mechanism, mode, check, draw):
    _check_cases(mechanism, mode, check, draw, count=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@every_check
@settings(settings.get_profile("slow"))
@given(draw=st.data())
def test_many_cases(mechanism, mode, check, draw):
    _check_cases(mechanism, mode, check, draw, count=4)


def _check_cases(mechanism: str, mode: str, check: str, draw: st.DataObject, *, count: int) -> None:
    program, datas = draw.draw(cases(mechanism, mode, count))
    for data in datas:
        note(f"CHECKS[{check!r}]({program!r}, {data!r})")
        CHECKS[check](program, data)
