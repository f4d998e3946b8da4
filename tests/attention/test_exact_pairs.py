"""Errors of attention for bands and exact keys that are data, against attention itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import ExactKeys
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inspection.all_pairs import log_kernels, score_ranks
from simrf_jax._src.attention.inspection.exact_pairs import ExactPairs, head_errors
from tests.tiers import slow_but

BATCH, LENGTH, HEADS, KEY_HEADS, DIM = 2, 9, 4, 2, 4
CASES = {
    "number": {"exact_bandwidth": 1, "exact_keys": 2},
    "positions": {"exact_bandwidth": None, "exact_keys": (0, -1)},
    "causal": {"exact_bandwidth": 2, "exact_keys": None},
    "by score": {"exact_bandwidth": 2, "exact_keys": ExactKeys(2, by="score")},
    "by score without a band": {"exact_bandwidth": None, "exact_keys": ExactKeys(3, by="score")},
    "neither": {"exact_bandwidth": None, "exact_keys": None},
    "more keys than there are": {"exact_bandwidth": 0, "exact_keys": 20},
}


def softmax(logits):
    w = np.exp(logits - logits.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


@pytest.mark.parametrize("case", slow_but(["number", "causal", "by score"], CASES))
def test_errors_are_those_of_attention(case):
    """Grouped queries, and a sequence whose last two tokens are padding."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(BATCH, LENGTH, HEADS, DIM)).astype(np.float32) * 2
    k, v = rng.normal(size=(2, BATCH, LENGTH, KEY_HEADS, DIM)).astype(np.float32)
    counts = np.ones((BATCH, LENGTH), bool)
    counts[1, -2:] = False
    v[1, -2:] = np.nan
    w = simrf_jax.draw_projection(jax.random.key(0), 8, DIM)
    by_score = isinstance(case["exact_keys"], ExactKeys)
    is_causal = case["exact_bandwidth"] == 2 or by_score
    options = {"mask": counts[:, None, None], "is_causal": is_causal}
    out = np.asarray(simrf_jax.random_feature_attention(q, k, v, w, **case, **options), np.float64)

    logits = np.einsum("btngh,bsnh->bngts", q.reshape(BATCH, LENGTH, KEY_HEADS, 2, DIM), k) / 2
    logits = logits.reshape(BATCH, HEADS, LENGTH, LENGTH).astype(np.float64)
    visible = counts[:, None, None] & (np.tri(LENGTH, dtype=bool) if is_causal else True)
    values = np.repeat(np.nan_to_num(v), 2, axis=2)
    expected = np.einsum("bnts,bsnd->btnd", softmax(np.where(visible, logits, -np.inf)), values)
    error, norm = ((x**2 * counts[..., None, None]).sum((1, 3)) for x in (out - expected, expected))

    mechanism = simrf_jax.RandomFeatureMechanism(w)
    call = Call.of(q, k, v, **options)
    estimated, exact, _, log_scale = jax.jit(log_kernels)(mechanism, call)
    estimated += log_scale
    pairs = ExactPairs.of(case["exact_bandwidth"], case["exact_keys"])
    one = dataclasses.replace(mechanism, exact_keys=ExactKeys(1, by="score"))
    ranks = jax.jit(score_ranks)(one, call) if by_score else None
    found = head_errors(estimated, exact, jnp.asarray(v), jnp.asarray(counts), pairs, ranks)
    np.testing.assert_allclose(found.relative_error, error / norm, rtol=1e-4, atol=1e-10)
    np.testing.assert_array_equal(found.num_queries, np.repeat(counts.sum(-1)[:, None], HEADS, 1))
    assert np.all(found.far_sum <= found.num_queries * (1 + 1e-6))


def test_keys_by_score_need_ranks():
    x, pairs = jnp.zeros((1, 3, 3)), ExactPairs.of(None, ExactKeys(1, by="score"))
    with pytest.raises(TypeError, match=r"ranks must be those of the keys .* by score, got None"):
        head_errors(x, x, jnp.zeros((3, 1, 2)), jnp.ones(3, bool), pairs, None)
