"""A reader can follow a call: it passes through few files, not deeply, and never back and forth."""

import functools
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import simrf_jax
from simrf_jax import random_feature_attention
from simrf_jax.fmm import fmm_attention

LIBRARY = str(pathlib.Path(simrf_jax.__file__).parent)
X = jax.ShapeDtypeStruct((2, 128, 4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)


class Flow(NamedTuple):
    """The path of a call through the library.

    Attributes:
      files: Files of the library whose functions were called.
      functions: These functions, without lambdas and comprehensions.
      depth: Most functions of the library on the stack.
      calls: Pairs of files of which the first called the second.
    """

    files: set[str]
    functions: set[tuple[str, str]]
    depth: int
    calls: set[tuple[str, str]]


def follow(function, *arguments):
    """Traces a function of abstract arrays and returns its flow."""
    stack, files, functions, calls, depth = [], set(), set(), set(), 0

    def profile(frame, event, _):
        nonlocal depth
        file = frame.f_code.co_filename
        # JAX asks for the representation of what it traces, which computes nothing.
        if not file.startswith(LIBRARY) or file.endswith("/one_line.py"):
            return
        if event == "call":
            if stack and stack[-1] != file:
                calls.add((stack[-1], file))
            stack.append(file)
            files.add(file)
            if not frame.f_code.co_name.startswith("<"):
                functions.add((file, frame.f_code.co_qualname))
            depth = max(depth, len(stack))
        elif event == "return":
            stack.pop()

    jax.clear_caches()  # What was traced before would not be called again.
    sys.setprofile(profile)
    try:
        jax.eval_shape(function, *arguments)
    finally:
        sys.setprofile(None)
    return Flow({file.removeprefix(LIBRARY) for file in files}, functions, depth, calls)


def has_circle(calls):
    """Returns whether files call each other in a circle."""
    below = {}
    for caller, called in calls:
        below.setdefault(caller, set()).add(called)
    while below:
        leaves = {file for file, called in below.items() if not called & below.keys()}
        if not leaves:
            return True
        below = {file: called for file, called in below.items() if file not in leaves}
    return False


# Most files, functions and depth: what they are today. Let them fall.
FLOWS = {
    "bidirectional": (random_feature_attention, 11, 63, 15),
    "causal": (functools.partial(random_feature_attention, is_causal=True), 12, 82, 15),
    "near and far": (
        lambda q, k, v, w: fmm_attention(q, k, v, (w,), bandwidth=4),
        14,
        80,
        17,
    ),
    "exact band": (
        lambda q, k, v, w: random_feature_attention(q, k, v, w, exact_bandwidth=4),
        14,
        101,
        17,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_a_call_can_be_followed(name):
    attend, most_files, most_functions, most_depth = FLOWS[name]
    flow = follow(attend, X, X, X, W)
    assert len(flow.files) <= most_files, sorted(flow.files)
    assert len(flow.functions) <= most_functions
    assert flow.depth <= most_depth
    assert not has_circle(flow.calls), sorted(flow.calls)


def test_circles_are_found():
    assert has_circle({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")})
    assert not has_circle({("a", "b"), ("b", "c"), ("a", "c")})
