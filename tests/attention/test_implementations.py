"""The register of implementations: who takes a call, and what is said if nobody does."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import RandomFeatureMechanism, random_feature_attention
from simrf_jax._src.attention import implementations
from tests.attention.inputs import inputs, projection

pytestmark = pytest.mark.fast


def attend(**options):
    return random_feature_attention(*inputs(5), projection(), **options)


def entry(platform, reason=None):
    """Returns an implementation for which all attention is zero."""
    return types.SimpleNamespace(
        PLATFORM=platform,
        reason_against=lambda estimator, call, is_asked: reason,
        attend=lambda estimator, call: jnp.zeros_like(call.value),
    )


@pytest.fixture
def register(monkeypatch):
    entries = {}
    monkeypatch.setattr(implementations, "ENTRIES", entries)
    return entries


def test_the_first_of_several_that_can_takes_the_call():
    expected = attend(feature_map="relu", implementation="xla")
    for several in (("pallas_tpu", "xla"), ["pallas_tpu", "xla"]):
        out = attend(feature_map="relu", implementation=several)
        np.testing.assert_array_equal(out, expected)


def test_one_takes_calls_on_its_platform(register):
    register |= {"pallas_tpu": entry("cpu"), "xla": implementations.xla}
    assert np.all(attend() == 0)
    assert np.any(attend(implementation="xla") != 0)
    register["pallas_tpu"] = entry("gpu")
    assert np.any(attend() != 0)
    assert np.all(attend(implementation="pallas_tpu") == 0)


def test_if_none_can_each_says_why(register):
    register |= {"pallas_tpu": entry("cpu", "it is Sunday"), "xla": entry("cpu", "it rains")}
    message = (
        'implementation="pallas_tpu" cannot do this call: it is Sunday; '
        'implementation="xla" cannot do this call: it rains.'
    )
    with pytest.raises(ValueError, match=message):
        attend(implementation=("pallas_tpu", "xla"))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ((), "must be a name, several or None, got none"),
        (
            ("xla", "cuda"),
            "Each implementation must be one of 'xla', 'pallas_tpu', 'pallas_gpu', got 'cuda'",
        ),
        (["xla", None], "Each implementation must be one of .* got None"),
        (3, "must be one of .* got 3"),
    ],
)
def test_refuses_names(asked, match):
    with pytest.raises(ValueError, match=match):
        RandomFeatureMechanism(projection(), implementation=asked)
    with pytest.raises(ValueError, match=match):
        attend(implementation=asked)
