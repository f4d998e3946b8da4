"""Each fused kernel, interpreted, in one program: the estimator, and nothing that is not seen.

``test_pallas_tpu*.py`` have all options, maps, lengths and types, most of them with the slow tests.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import attention_matrix, random_feature_attention
from simrf_jax._src.attention.pallas_tpu import operands, weights
from tests.attention.inputs import inputs, map_and_rows
from tests.attention.test_pallas_tpu import assert_close

WHERE = 134  # A position in the second tile.


class Case(NamedTuple):
    """Options of attention, the length, the map, and settings that take another way."""

    options: dict
    length: int
    kind: str
    settings: tuple = ()

    def seen(self):
        """Returns True at the queries of the first sequence that see its key at WHERE."""
        if "segment_ids" in self.options:
            return SEGMENTS[WHERE] == SEGMENTS
        return np.arange(self.length) >= (WHERE if "is_causal" in self.options else 0)


# One segment ends with a tile, and that of WHERE is inside one.
SEGMENTS = np.repeat([7, 7, 3, 9, 4, 1], [2, 126, 3, 9, 1, 12])
PACKED = {"segment_ids": np.stack([SEGMENTS, SEGMENTS[::-1]])}
CAUSAL, BAND = {"is_causal": True}, {"exact_bandwidth": 9}
TILES = tuple((operands, name, operands.LANES) for name in ("LONGEST_WHOLE", "LONGEST_TILE"))
HALVES = ((weights, "LARGEST", -jnp.inf),)
# Lengths differ, because a program that was compiled with other settings would be used again.
CASES = {
    "in one tile": Case({}, 150, "positive"),
    "in several tiles": Case({}, 151, "calibrated pairs", TILES),
    "causal": Case(CAUSAL, 150, "calibrated"),
    "causal, in units of halves": Case(CAUSAL, 151, "positive", HALVES),
    "causal, beside a band": Case(CAUSAL | BAND, 152, "calibrated pairs"),
    "packed": Case(PACKED, 153, "positive"),
    "packed, beside a band": Case(PACKED | BAND, 153, "positive"),
}
HIDDEN = [3, 127, 149]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    """Runs all tests of one case together, so that its programs are traced once."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, value in request.param.settings:
            patch.setattr(place, name, value)
        yield request.param
    programs.cache_clear()


def tokens_of(case):
    q, k, v = inputs(case.length, heads=2, key_heads=1, batch=(2,))
    bias = 2 * np.cos(np.arange(2 * 2 * case.length, dtype=np.float32))
    bias = bias.reshape(2, 2, 1, case.length)
    bias[..., HIDDEN] = -np.inf
    return q, k, v, bias


@functools.cache
def programs(name):
    """Returns attention by the kernels, and by the matrix of all weights, with gradients."""
    case = CASES[name]
    feature_map, w = map_and_rows(case.kind, *tokens_of(case)[:2], heads=1)
    options = {"scale": 0.3, "feature_map": feature_map, **case.options}

    def kernels(q, k, v, bias):
        return random_feature_attention(
            q, k, v, w, bias=bias, implementation="pallas_tpu", **options
        )

    def matrix(q, k, v, bias):
        return jnp.einsum(
            "bnts,bsd->btnd", attention_matrix(q, k, w, bias=bias, **options), v[..., 0, :]
        )

    def with_gradients(attend, counts, q, k, v, bias):
        out, pull_back = jax.vjp(lambda *tokens: attend(*tokens, bias), q, k, v)
        waves = jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        return out, pull_back(jnp.where(counts, waves, 0))

    attentions = {"kernels": kernels, "matrix": matrix}
    return {by: jax.jit(functools.partial(with_gradients, one)) for by, one in attentions.items()}


def run(case, q, k, v, bias, counts=True, by="kernels"):
    [name] = [name for name, one in CASES.items() if one is case]
    counts = np.broadcast_to(counts, q.shape)
    return programs(name)[by](counts, q, k, v, bias)


def test_the_output_and_the_gradients_of_all_weights(case):
    tokens = tokens_of(case)
    for size in (1, 6):
        scaled = (size * tokens[0], *tokens[1:])
        got, want = run(case, *scaled), run(case, *scaled, by="matrix")
        jax.tree.map(functools.partial(assert_close, tolerance=1e-5), got, want)


def test_what_is_hidden_reaches_nothing(case):
    q, k, v, bias = tokens_of(case)
    clean = run(case, q, k, v, bias)
    k[:, HIDDEN], v[:, HIDDEN] = np.nan, np.inf
    jax.tree.map(np.testing.assert_array_equal, run(case, q, k, v, bias), clean)
    for gradient in clean[1][1:]:
        np.testing.assert_array_equal(gradient[:, HIDDEN], 0)


@pytest.mark.parametrize("planted", [40, np.nan])
def test_what_is_not_seen_reaches_nothing(case, planted):
    tokens = tokens_of(case)
    counts = np.ones((2, case.length, 1, 1), bool)
    counts[0, case.seen()] = False
    counts[0, WHERE] = False
    clean_out, clean_gradients = run(case, *tokens, counts)
    for x in tokens[:3]:
        x[0, WHERE] *= planted
    out, gradients = run(case, *tokens, counts)
    others = counts[..., 0, 0]
    np.testing.assert_array_equal(out[others], clean_out[others])
    assert np.isnan(out[~others]).all() == np.isnan(planted)
    for got, want in zip(gradients, clean_gradients, strict=True):
        assert np.isfinite(got).all()
        assert_close(got[others], want[others], 1e-6)
