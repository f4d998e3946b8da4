import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax.fmm import fmm_attention
from tests import formulas
from tests.attention import reference
from tests.attention.inputs import inputs, projection
from tests.versions import enable_x64

# One computation, which compiles faster than its operations one by one.
fmm_jit = jax.jit(fmm_attention, static_argnames=("bandwidth", "feature_maps", "is_causal"))
MAPS = ("positive", "elu")
NEAR, FAR = np.array([0.7, 0.2], np.float32), np.array([[0.5, 1.0], [0.1, 0.4]], np.float32)


def expected(q, k, v, w, bandwidth, *, is_causal=False):
    """Written out in float64 for ``[T, 2, H]``, with the weights above."""
    t, s = len(q), len(k)
    visible = np.tri(t, s, dtype=bool) if is_causal else None
    near = reference.banded(q, k, v, bandwidth, is_causal=is_causal)
    far = [
        reference.attention(q, k, v, each, visible=visible, formula=formula)
        for each, formula in zip((w, None), (formulas.positive, formulas.elu), strict=True)
    ]
    return NEAR[:, None] * near + sum(
        weight[:, None] * x for weight, x in zip(FAR, far, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("scale", "tolerance"), [(0.5, 1e-5), (4, 1e-5), (16, 5e-5)])
def test_near_and_two_far_fields_against_float64(scale, tolerance, is_causal):
    q, k, v = inputs(60, key_heads=1, width=3, scale=scale)
    w = projection(30)
    actual = fmm_jit(
        q,
        k,
        v,
        (w, None),
        bandwidth=4,
        near_weight=NEAR,
        far_weights=FAR,
        feature_maps=MAPS,
        is_causal=is_causal,
    )
    error = reference.relative_error(actual, expected(q, k, v, w, 4, is_causal=is_causal))
    assert error < tolerance


@pytest.mark.slow
def test_weights_that_are_numbers():
    q, k, v = inputs()
    w = projection()
    far = fmm_jit(q, k, v, (w,), bandwidth=2, near_weight=0)
    near = fmm_jit(q, k, v, [w], bandwidth=2, far_weights=0)
    both = fmm_jit(q, k, v, [w], bandwidth=2, near_weight=2, far_weights=[3])
    np.testing.assert_allclose(both, 2 * near + 3 * far, rtol=1e-5)
    # By feature map, though there are as many heads.
    first = fmm_jit(q, k, v, [w, w], bandwidth=2, far_weights=[3, 0], feature_maps=MAPS)
    np.testing.assert_allclose(first, near + 3 * far, rtol=1e-5)
    assert reference.relative_error(far, reference.attention(q, k, v, w)) < 1e-5
    assert reference.relative_error(near, reference.banded(q, k, v, 2)) < 1e-5


@pytest.mark.slow
def test_masks_lengths_and_segments_reach_both_fields():
    q, k, v = inputs(20, batch=(2,))
    k[:, 15:], v[:, 15:] = np.nan, np.inf
    w = projection()
    mask = np.arange(20).reshape(1, 1, 1, 20) < 15
    lengths = {"query_seq_lengths": np.array([15, 9]), "key_value_seq_lengths": np.array([15, 9])}
    segment_ids = np.tile(np.arange(20) // 6, (2, 1))
    for is_causal in (False, True):
        options = {"bandwidth": 3, "is_causal": is_causal}
        out = fmm_jit(
            q, k, v, (w,), mask=mask, segment_ids=segment_ids, scale=0.3, **lengths, **options
        )
        for b, length in enumerate((15, 9)):
            for start in range(0, length, 6):
                some = slice(start, min(start + 6, length))
                one = fmm_jit(q[b, some], k[b, some], v[b, some], (w,), scale=0.3, **options)
                np.testing.assert_allclose(out[b, some], one, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(out[1, 9:], 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_against_float64(is_causal):
    q, k, v = inputs(12)
    w = projection()

    def loss(q, k, v, near, far):
        out = fmm_attention(
            q,
            k,
            v,
            (w, None),
            bandwidth=2,
            near_weight=near,
            far_weights=far,
            feature_maps=MAPS,
            is_causal=is_causal,
        )
        return jnp.sum(jnp.sin(out))

    arguments = (q, k, v, NEAR, FAR)
    actual = jax.jit(jax.grad(loss, range(5)))(*arguments)
    with enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arguments)
        rng = np.random.default_rng(3)
        directions = [rng.normal(size=x.shape) for x in wide]
        for index, direction in enumerate(directions):
            ends = []
            for sign in (-1, 1):
                moved = list(wide)
                moved[index] = moved[index] + sign * 1e-4 * direction
                q_, k_, v_, near, far = (np.asarray(x) for x in moved)
                ends.append(np.sin(_blend(q_, k_, v_, w, near, far, is_causal)).sum())
            slope = (ends[1] - ends[0]) / 2e-4
            np.testing.assert_allclose(np.vdot(actual[index], direction), slope, rtol=1e-4)


def _blend(q, k, v, w, near_weight, far_weights, is_causal):
    visible = np.tri(len(q), len(k), dtype=bool) if is_causal else None
    near = reference.banded(q, k, v, 2, is_causal=is_causal)
    positive = reference.attention(q, k, v, w, visible=visible)
    elu = reference.attention(q, k, v, None, visible=visible, formula=formulas.elu)
    return sum(
        weight[:, None] * x
        for weight, x in zip((near_weight, *far_weights), (near, positive, elu), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_what_is_not_finite_reaches_no_gradient_of_weights(poisoned):
    """The last token is seen by its own query alone, whose output is in no loss."""
    arrays = dict(zip(("query", "key", "value"), inputs(12), strict=True))
    bad = arrays | {poisoned: arrays[poisoned].copy()}
    bad[poisoned][-1] = np.nan

    @jax.jit
    def with_gradients(arrays):
        def loss(near, far):
            weights = {"near_weight": near, "far_weights": far}
            out = fmm_attention(
                **arrays, projections=(projection(),), bandwidth=2, is_causal=True, **weights
            )
            return jnp.sum(out[:-1] ** 2), out

        return jax.grad(loss, (0, 1), has_aux=True)(NEAR, FAR[:1])

    gradients, out = with_gradients(bad)
    assert np.isnan(out[-1]).any()
    for a, e in zip(gradients, with_gradients(arrays)[0], strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.slow
def test_bfloat16_under_jit_and_vmap():
    q, k, v = inputs(20, batch=(3,))
    w = projection()
    attend = jax.vmap(lambda q, k, v: fmm_attention(q, k, v, (w,), bandwidth=3, near_weight=0.5))
    narrow = jax.jit(attend)(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)))
    assert narrow.dtype == jnp.bfloat16
    assert reference.relative_error(narrow, attend(q, k, v)) < 2e-2


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (ValueError, {"feature_maps": MAPS}, "one for each feature map .* got 1 for 2"),
        (TypeError, {"feature_maps": "elu"}, "feature_maps must be a tuple or a list, got str"),
        (TypeError, {"projections": projection}, "projections must be a tuple or a list"),
        (ValueError, {"near_weight": np.ones(3)}, r"near_weight .* \[heads\] = \(2,\), got .*3"),
        (
            ValueError,
            {"far_weights": np.ones((3, 1))},
            r"far_weights .* \[feature maps, heads\] = \(1, 2\), got shape \(3, 1\)",
        ),
        (TypeError, {"near_weight": 1j}, "near_weight must be a floating type"),
        (ValueError, {"bandwidth": -1}, "bandwidth must be at least 0"),
        (ValueError, {"mask": jnp.ones((9, 9), bool)}, "may differ between queries"),
    ],
)
def test_refuses(error, options, match):
    q, k, v = inputs()
    options = {"projections": (projection(),), "bandwidth": 2, **options}
    with pytest.raises(error, match=match):
        fmm_attention(q, k, v, options.pop("projections"), **options)
