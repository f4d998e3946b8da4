"""Checks that must pass in every case.

There are two rules about hidden tokens:

- Neither the output of a query nor a gradient of it depends on tokens that the query does not see,
  not even by a single bit, whether these are finite or not.
- Visible tokens do reach a query: NaN in a visible key or value makes its output NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tests.property import expected, plants
from tests.property.cases import Data, Program, arrays
from tests.property.feature_maps import MAPS
from tests.property.library import run, run_without_jit

# Largest relative errors of outputs and of gradients. The library promises those of float32.
VALUES = {"float32": 1e-5, "bfloat16": 2e-2, "float64": 1e-13}
GRADIENTS = {"float32": 1e-4, "bfloat16": 5e-2, "float64": 1e-11}
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-9, "float64": 2**-53}
# A denominator that cancels more than this leaves too few digits to compare.
WELL_CONDITIONED = 30


def tolerance(promised: dict[str, float], program: Program, data: Data) -> float:
    """Returns the promised error; exponents of about 1,000 leave fewer digits and get more."""
    return promised[program.dtype] * (5 if data.spread > 8 else 1)


def random_cotangent(program: Program, data: Data, rows: np.ndarray, width: int) -> np.ndarray:
    """Returns a cotangent of outputs ``[..., T, N, width]`` that is zero except in some rows."""
    normal = np.random.default_rng(data.seed + 1).normal(size=(*rows.shape, width))
    return (normal * rows[..., None]).astype(np.dtype(program.dtype))


def check_values(program: Program, data: Data, run: Callable = run) -> None:
    """Compares outputs with float64, which are zeros where a query sees nothing."""
    x = arrays(program, data)
    out, _ = run(program, x, np.zeros((*x["query"].shape[:-1], output_width(program))))
    assert_values(program, data, x, out)


def check_without_jit(program: Program, data: Data) -> None:
    """Compares outputs without jit with float64, while hidden tokens are not finite."""
    x, rng = arrays(program, data), np.random.default_rng(data.seed + 3)
    places = plants.some_of(plants.hidden(program, x, rng), data, rng)
    assert_values(program, data, x, run_without_jit(program, plants.plant(x, places, data)))


def assert_values(program: Program, data: Data, x: plants.Arrays, out: np.ndarray) -> None:
    rows = expected.attend(program, x)
    narrow_matrix = program.is_matrix and program.dtype == "bfloat16"
    dtype = "float32" if narrow_matrix else program.dtype  # Matrices are float32 at least.
    assert (out.shape, out.dtype.name) == (rows.out.shape, dtype)
    nothing = ~expected.visible(program, x).any(axis=-1)
    np.testing.assert_array_equal(out[np.swapaxes(nothing, -1, -2)], 0)
    good = rows.condition < WELL_CONDITIONED
    error = np.linalg.norm((out.astype(np.float64) - rows.out)[good])
    # Where terms cancel, rounding errors are relative to the terms.
    size = np.linalg.norm((rows.size if program.is_signed else rows.out)[good])
    assert error <= tolerance(VALUES, program, data) * size


def check_gradients(program: Program, data: Data, run: Callable = run) -> None:
    """Compares gradients with float64 along random directions."""
    x = arrays(program, data)
    rows = expected.attend(program, x)
    good = rows.condition < WELL_CONDITIONED
    cotangent = random_cotangent(program, data, good, rows.out.shape[-1])
    _, gradients = run(program, x, cotangent)
    rng = np.random.default_rng(data.seed + 2)
    least = rounding_errors(program, data, x, cotangent)
    for name, gradient in gradients.items():
        gradient = gradient.astype(np.float64)
        squares = []
        for _ in range(2):
            direction = rng.normal(size=gradient.shape)
            slope = np.sum(cotangent * expected.slope(program, x, name, direction))
            squares.append((np.sum(gradient * direction) - slope) ** 2)
        error = np.sqrt(np.mean(squares))  # Its mean square is that of the gradient's error.
        relative = tolerance(GRADIENTS, program, data) * np.linalg.norm(gradient)
        assert error <= relative + least[name], name


def rounding_errors(
    program: Program, data: Data, x: plants.Arrays, cotangent: np.ndarray
) -> dict[str, float]:
    """Returns the rounding errors of gradients that vanish, such as those of saturated weights."""
    scale = abs(float(x.get("scale", program.dim**-0.5)))
    lengths = {
        name: np.linalg.norm(x[name].astype(np.float64), axis=-1) for name in ("query", "key")
    }
    longest = np.sqrt(scale) * max(one.max() for one in lengths.values())
    rows_of_w = np.linalg.norm(x.get("projection", np.zeros((1, 1))), axis=-1).max()
    exponent = 1 + longest**2 + longest * rows_of_w
    value = 1 if program.is_matrix else abs(x["value"].astype(np.float64)).max()
    once = 10 * ROUNDING[program.dtype] * np.linalg.norm(cotangent.astype(np.float64)) * value
    # The rounding error of an exponent and its derivative both grow with its size.
    units = {"query": exponent / data.spread, "projection": exponent, "scale": exponent / scale}
    units |= {"key": units["query"], "value": 1 / value}
    return {name: once * exponent * units.get(name, 1) for name in x}


def check_unseen(find: plants.Finder, program: Program, data: Data) -> None:
    """Checks that numbers planted in places of a kind reach only queries that see them.

    The outputs of all other queries stay the same bit for bit. So do the gradients of these
    queries, and of the keys that are unrelated to queries that see a planted number.
    """
    x, rng = arrays(program, data), np.random.default_rng(data.seed + 3)
    places = plants.some_of(find(program, x, rng), data, rng)
    touched = plants.touched(program, x, places)
    cotangent = random_cotangent(program, data, ~touched, output_width(program))
    out, gradients = run(program, x, cotangent)
    with_plants, gradients_with_plants = run(program, plants.plant(x, places, data), cotangent)
    assert_same(with_plants[~touched], out[~touched], "output")
    apart = plants.apart(program, x, places, touched)
    followed = {"query": ~touched, "key": apart, "value": apart, "bias": of_bias(program, x, apart)}
    if find is plants.hidden and maps_are_differentiable(program, data):
        followed |= dict.fromkeys(SHARED, ...)
    for name in [name for name in gradients if name in followed]:
        both = (one[name][followed[name]] for one in (gradients_with_plants, gradients))
        assert_same(*both, f"gradient of {name}")


# Arguments that all tokens share. A replaced row that any query sees changes their gradients.
SHARED = ("projection", "log_weights", "scale", "near_weight", "far_weights")


def check_no_gradient(find: plants.Finder, program: Program, data: Data) -> None:
    """Checks that planted numbers get no gradient from queries that do not see them."""
    if not maps_are_differentiable(program, data):
        return
    x, rng = arrays(program, data), np.random.default_rng(data.seed + 3)
    places = plants.some_of(find(program, x, rng), data, rng)
    rows = ~plants.touched(program, x, places)
    cotangent = random_cotangent(program, data, rows, output_width(program))
    _, gradients = run(program, plants.plant(x, places, data), cotangent)
    planted = {"query": places.queries, "key": places.keys, "value": places.keys}
    for name in planted.keys() & gradients.keys():
        np.testing.assert_array_equal(gradients[name][planted[name]], 0, f"gradient of {name}")


def maps_are_differentiable(program: Program, data: Data) -> bool:
    """Returns whether feature maps have a gradient at all planted numbers."""
    if "0" not in data.plants or program.mechanism == "band":
        return True
    return all(MAPS[name].smooth_at_zero for name in program.maps)


def of_bias(program: Program, x: plants.Arrays, keys: np.ndarray) -> np.ndarray | None:
    """Returns the entries of the bias that belong only to these keys, ``[..., S, K]``."""
    if "bias" not in x:
        return None
    by_head = np.swapaxes(keys.repeat(program.groups, axis=-1), -1, -2)[..., None, :]
    shape = (1,) * (by_head.ndim - x["bias"].ndim) + x["bias"].shape
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return by_head.all(axis=shared, keepdims=True).reshape(x["bias"].shape)


def assert_same(actual: np.ndarray, desired: np.ndarray, name: str) -> None:
    """Checks that two arrays are finite and equal bit for bit."""
    actual, desired = (one.astype(np.float64) for one in (actual, desired))
    assert np.isfinite(desired).all(), f"{name} is not finite, even without anything planted"
    np.testing.assert_array_equal(actual, desired, name)


def check_seen(program: Program, data: Data) -> None:
    """Plants NaN in one key or value and checks that exactly the queries that see it get NaN."""
    x, rng = arrays(program, data), np.random.default_rng(data.seed + 3)
    place = plants.one_key(program, rng)
    touched = plants.touched(program, x, place)
    for name in [name for name in ("key", "value") if name in x]:
        with_nan = x | {
            name: np.where(place.keys[..., None], np.nan, x[name]).astype(x[name].dtype)
        }
        out, _ = run(program, with_nan, np.zeros((*touched.shape, output_width(program))))
        np.testing.assert_array_equal(np.isnan(out).any(axis=-1), touched, f"NaN in {name}")


def output_width(program: Program) -> int:
    return program.key_length if program.is_matrix else program.width


CHECKS: dict[str, Callable[[Program, Data], None]] = {
    "values": check_values,
    "gradients": check_gradients,
    "without jit": check_without_jit,
    "seen": check_seen,
    "hidden": functools.partial(check_unseen, plants.hidden),
    "another sequence": functools.partial(check_unseen, plants.another_sequence),
    "another head": functools.partial(check_unseen, plants.another_head),
    "no gradient where hidden": functools.partial(check_no_gradient, plants.hidden),
    "future": functools.partial(check_unseen, plants.future),
    "no gradient in the future": functools.partial(check_no_gradient, plants.future),
    "another segment": functools.partial(check_unseen, plants.segment),
    "out of band": functools.partial(check_unseen, plants.out_of_band),
}
