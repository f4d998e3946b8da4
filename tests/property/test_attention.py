"""Checks every mode of every mechanism on random cases: numbers, gradients and hidden tokens.

A failure ends with a call of the check that failed, which can be pasted after

    from tests.property.cases import Data, Program
    from tests.property.checks import CHECKS
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, note, seed, settings

from tests.property.cases import MODES, Data, Program, cases, datas
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
# tests/attention/test_every_mode.py has the same contracts of all modes, at fixed cases.
DEFAULT_MODE = ("features", "packed causal")
each_mode = pytest.mark.parametrize(("mechanism", "mode"), ALL_MODES)

# One program for each mode limits the time to compile. Together they cover each option.
FIXED_PROGRAMS = (
    Program(
        "features",
        "bidirectional",
        batch=(1, 2),
        length=8,
        key_length=7,
        heads=4,
        maps=("pair",),
        per_head=True,
        mask="bs",
        bias="ns",
        query_lengths=True,
        scale=True,
    ),
    Program(
        "features",
        "causal",
        batch=(2,),
        length=8,
        key_length=8,
        heads=4,
        maps=("direction",),
        mask="s",
        bias="bs",
        key_lengths=True,
        chunk_size=4,
    ),
    Program(
        "features",
        "packed",
        length=8,
        key_length=8,
        maps=("weighted positive",),
        per_head=True,
        bias="bns",
        query_lengths=True,
        scale=True,
        chunk_size=2,
    ),
    Program(
        "features",
        "packed causal",
        batch=(2,),
        length=8,
        key_length=8,
        heads=3,
        key_heads=1,
        maps=("trigonometric",),
        num_features=16,
        mask="bns",
        chunk_size=4,
    ),
    Program(
        "features",
        "decoding",
        batch=(2,),
        length=9,
        key_length=9,
        heads=4,
        maps=("polynomial",),
        per_head=True,
        mask="bs",
        query_lengths=True,
        key_lengths=True,
        pieces=(3, 1, 1, 1, 1, 1, 1),
        append=True,
    ),
    Program("features", "matrix", batch=(2,), key_length=7, heads=4, maps=("phase",), mask="ns"),
    Program("features", "causal matrix", key_length=4, maps=("relu",), bias="s", key_lengths=True),
    Program(
        "band",
        "bidirectional",
        batch=(2,),
        length=13,
        key_length=7,
        heads=4,
        mask="bs",
        bias="ns",
        scale=True,
        block_size=4,
        bandwidth=3,
    ),
    Program("band", "causal", length=13, key_length=13, key_lengths=True, block_size=4),
    Program("band", "packed", batch=(1, 2), length=8, key_length=8, mask="bns", bandwidth=30),
    Program("band", "packed causal", dtype="float64", length=8, key_length=8, query_lengths=True),
    Program(
        "band",
        "decoding",
        batch=(2,),
        length=8,
        key_length=8,
        mask="bs",
        bias="ns",
        bandwidth=3,
        pieces=(4, 1, 1, 1, 1),
    ),
    Program(
        "blend",
        "bidirectional",
        batch=(2,),
        maps=("positive", "elu"),
        dtype="bfloat16",
        mask="bs",
        scale=True,
        bandwidth=0,
    ),
    Program("blend", "causal", heads=4, maps=("hyperbolic",), mask="bs", scale=True, chunk_size=2),
    Program("blend", "packed", maps=("elu of a projection",), bias="s", chunk_size=1, block_size=1),
    Program("blend", "packed causal", batch=(2,), maps=("direction",), chunk_size=4, bandwidth=3),
    Program("blend", "decoding", maps=("relu", "positive"), mask="s", pieces=(1, 1, 1, 2)),
    Program(
        "joint",
        "bidirectional",
        batch=(2,),
        length=8,
        key_length=13,
        heads=4,
        per_head=True,
        mask="bs",
        bias="ns",
        query_lengths=True,
        scale=True,
        chunk_size=2,
        bandwidth=2,
    ),
    Program("joint", "causal", length=8, key_length=7, heads=4, maps=("direction",), mask="s"),
    Program(
        "joint",
        "packed",
        batch=(2,),
        length=13,
        key_length=13,
        maps=("weighted calibrated",),
        paired=True,
        bias="bs",
        chunk_size=4,
    ),
    Program(
        "joint",
        "packed causal",
        length=13,
        key_length=13,
        maps=("hyperbolic",),
        key_lengths=True,
        chunk_size=4,
        bandwidth=3,
    ),
    Program(
        "joint",
        "decoding",
        batch=(2,),
        length=8,
        key_length=8,
        mask="bs",
        scale=True,
        bandwidth=2,
        pieces=(4, 1, 1, 1, 1),
        append=True,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "mode", "check"),
    [
        pytest.param(*mode, check, marks=() if mode == DEFAULT_MODE else pytest.mark.slow)
        for mode in ALL_MODES
        for check in CHECKS
        if applies(check, *mode)
    ],
)
def test_a_few_cases(mechanism, mode, check):
    """Runs one program of each mode, because compilation takes nearly all of the time."""
    (program,) = (p for p in FIXED_PROGRAMS if (p.mechanism, p.mode) == (mechanism, mode))

    @settings(settings.get_profile("fast"))
    @given(datas(program))
    def holds(data: Data) -> None:
        run_check(check, program, data)

    holds()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_mode
def test_many_cases(mechanism, mode):
    """Runs all checks on each program, because compilation takes nearly all of the time."""
    checks = [check for check in CHECKS if applies(check, mechanism, mode)]
    draw_cases(mechanism, mode, checks, max_examples=20, data_each=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_mode
def test_cases_without_jit(mechanism, mode):
    draw_cases(mechanism, mode, ["without jit"], max_examples=3, data_each=5)


def draw_cases(
    mechanism: str, mode: str, checks: list[str], *, max_examples: int, data_each: int
) -> None:
    """Draws programs and runs checks on each of them, with several data."""

    @settings(settings.get_profile("slow"), max_examples=max_examples)
    @seed(zlib.crc32(f"{mechanism}, {mode}".encode()))
    @given(cases(mechanism, mode, data_each))
    def holds(case: tuple[Program, list[Data]]) -> None:
        program, several = case
        for data in several:
            for check in checks:
                run_check(check, program, data)

    holds()


def run_check(check: str, program: Program, data: Data) -> None:
    note(f"CHECKS[{check!r}]({program!r}, {data!r})")
    CHECKS[check](program, data)
