"""Nothing hidden on another device reaches an output or a gradient here, finite or not."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import banded_attention, random_feature_attention
from simrf_jax.fmm import fmm_attention
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection

LENGTH, DEVICES, DIM = 8, 4, 4
P = jax.P
SEGMENTS = np.array([0, 0, 0, 1, 1, 1, 1, 2])
SHOWN = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
# name -> what stands in a key and in its value, where a query must not see them
POISONS = {
    "nan": (np.nan, np.nan),
    "inf": (np.inf, -np.inf),
    "nan in the value": (1.0, np.nan),
    "inf in the key": (np.inf, 1.0),
    "huge": (1e30, 3e38),
}


def near(q, k, v, w, **options):
    return banded_attention(q, k, v, bandwidth=5, **options)


def both(q, k, v, w, **options):
    return fmm_attention(q, k, v, (w,), bandwidth=3, **options)


def far(q, k, v, w, **options):
    return random_feature_attention(q, k, v, w, **options)


def joint(q, k, v, w, **options):
    return random_feature_attention(q, k, v, w, exact_bandwidth=1, **options)


class Case(NamedTuple):
    """Attention, what it is given, and which positions must not see which keys.

    Attributes:
      attend: Attention by q, k, v and W.
      options: Its options; those that are arrays are sharded like the keys.
      poisoned: Positions of keys that are replaced.
      blind: Positions of queries that do not see them.
    """

    attend: Callable
    options: dict
    poisoned: list
    blind: list


CAUSAL, PACKED = {"is_causal": True}, {"segment_ids": SEGMENTS}
HIDDEN = {"mask": SHOWN[None, None]}
EVERYONE = list(range(LENGTH))
CASES = {
    "hidden": Case(far, HIDDEN, [2, 5], EVERYONE),
    "hidden, causal": Case(far, HIDDEN | CAUSAL, [2, 5], EVERYONE),
    "hidden, packed": Case(far, HIDDEN | PACKED, [2, 5], EVERYONE),
    "hidden, near": Case(near, HIDDEN, [2, 5], EVERYONE),
    "hidden, near and far": Case(both, HIDDEN | CAUSAL, [2, 5], EVERYONE),
    "beyond the length": Case(far, {"key_value_seq_lengths": np.array([5])}, [5, 6, 7], EVERYONE),
    "beyond the length, near": Case(
        near, {"key_value_seq_lengths": np.array([5])}, [5, 6, 7], EVERYONE
    ),
    "future": Case(far, CAUSAL, [5], [0, 1, 2, 3, 4]),
    "future, near": Case(near, CAUSAL, [5], [0, 1, 2, 3, 4]),
    "future, near and far": Case(both, CAUSAL, [5], [0, 1, 2, 3, 4]),
    "outside the band": Case(near, {}, [7], [0, 1]),
    "hidden, exact band": Case(joint, HIDDEN, [2, 5], EVERYONE),
    "future, exact band": Case(joint, CAUSAL, [5], [0, 1, 2, 3, 4]),
    "segment before, exact band": Case(joint, PACKED, [1], [3, 4, 5, 6, 7]),
    "segment before": Case(far, PACKED, [1], [3, 4, 5, 6, 7]),
    "segment after": Case(far, PACKED, [5], [0, 1, 2]),
    "segment before, causal": Case(far, PACKED | CAUSAL, [1], [3, 4, 5, 6, 7]),
    "segment before, near": Case(near, PACKED, [1], [3, 4, 5, 6, 7]),
    "segment after, near": Case(near, PACKED, [5], [0, 1, 2]),
    "segment before, near and far": Case(both, PACKED | CAUSAL, [1], [3, 4, 5, 6, 7]),
}

# How the options that are arrays are sharded.
SPECS = {
    "mask": P(None, None, "length"),
    "segment_ids": P("length"),
    "key_value_seq_lengths": P(),
}
DEFAULT = (
    "hidden, causal",
    "future",
    "segment before, near",
    "segment before, exact band",
)


@functools.cache
def program(name):
    """The outputs of blind queries, and the gradients of their sum, over all devices."""
    case, w = CASES[name], projection(5, DIM)
    arrays = {name: jnp.asarray(x) for name, x in case.options.items() if name in SPECS}
    rest = {name: x for name, x in case.options.items() if name not in arrays}

    def part(q, k, v, arrays):
        return case.attend(q, k, v, w, sequence_axis="length", **arrays, **rest)

    call = jax.shard_map(
        part,
        mesh=make_mesh("manual", length=DEVICES),
        in_specs=(P("length"),) * 3 + ({name: SPECS[name] for name in arrays},),
        out_specs=P("length"),
    )

    def loss(q, k, v):
        out = call(q, k, v, arrays)[np.array(case.blind)]
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CASES],
)
def test_what_is_not_seen_changes_nothing(name, poison):
    case = CASES[name]
    rows = np.array(case.blind)  # Of other positions not even the gradients need be finite.
    q, k, v = inputs(LENGTH, dim=DIM)
    run = program(name)
    (_, expected), clean = run(q, k, v)
    in_key, in_value = POISONS[poison]
    k, v = k.copy(), v.copy()
    k[case.poisoned], v[case.poisoned] = in_key, in_value
    (_, out), gradients = run(q, k, v)
    np.testing.assert_array_equal(out, expected)
    for name, gradient, other in zip("qkv", gradients, clean, strict=True):
        np.testing.assert_array_equal(gradient[rows], other[rows], err_msg=name)
