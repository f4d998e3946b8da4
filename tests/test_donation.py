"""Every module, map and state of the library can be donated: no buffer is in two of its leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import simrf_jax
from simrf_jax import feature_maps, models
from simrf_jax.calibration import fit_mixture
from simrf_jax.integrations import linen as linen_adapters
from simrf_jax.integrations import nnx as nnx_adapters

HEADS, DIM, ROWS = 2, 4, 8
WIDTH = HEADS * DIM


def batch():
    return jax.random.normal(jax.random.key(0), (2, 16, WIDTH))


def tokens():
    return jax.random.normal(jax.random.key(1), (3, 2, 16, HEADS, DIM))


def draw(**options):
    return simrf_jax.draw_projection(jax.random.key(2), ROWS, DIM, **options)


def donate(tree):
    """Gives all arrays to a compiled function, which then owns their buffers."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    assert leaves
    jax.block_until_ready(jax.jit(lambda x: jax.tree.map(lambda y: y, x), donate_argnums=0)(leaves))
    assert all(x.is_deleted() for x in leaves if x.size)


def calibration(**options):
    q, k, _ = tokens()
    return simrf_jax.calibrate(q, k, **options)


def fitted_mixture():
    q, k, _ = tokens()
    mixture = fit_mixture(jax.random.key(3), q, k, 2)
    w = simrf_jax.calibration.draw_mixture_projection(jax.random.key(4), mixture.centers[0], ROWS)
    return mixture, w


RECORDS = {
    "identity": lambda: feature_maps.Calibrated.identity(HEADS, DIM),
    "calibrated": calibration,
    "not balanced": lambda: calibration(balance=False),
    "not centered": lambda: calibration(center=False, tilt=None),
    "learned": lambda: feature_maps.Learned.start(draw(), calibration()),
    "folded": lambda: feature_maps.Folded.of(calibration(), draw()),
    "folded positive": lambda: feature_maps.Folded.of(feature_maps.Positive(), draw()),
    "radau": lambda: draw(norms="radau"),
    "fast": lambda: simrf_jax.draw_fast_projection(jax.random.key(5), ROWS, DIM),
    "bipolar": lambda: simrf_jax.hybrid.draw_bipolar_projection(jax.random.key(6), ROWS, 3, DIM),
    "mixture": fitted_mixture,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_records(name):
    donate(RECORDS[name]())


FEATURE_MAPS = [
    "positive", "hyperbolic", "trigonometric", "phase", "relu", "elu", "angular_hybrid",
    "calibrated", "learned",
]  # fmt: skip


def num_features(name):
    return None if name == "elu" else ROWS


def nnx_attention(name, decode=False):
    adapter = nnx_adapters.RandomFeatureAttention(
        HEADS, DIM, num_features(name), feature_map=name, decode=decode, rngs=nnx.Rngs(0)
    )
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=nnx.Rngs(1)
    )


def linen_attention(name, **options):
    adapter = linen_adapters.RandomFeatureAttention(num_features(name), name, **options)
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_nnx_modules(name):
    model = nnx_attention(name)
    x = batch()
    if name in ("calibrated", "learned"):
        fitted = nnx_attention(name)
        nnx_adapters.calibrate(fitted, [x])
        donate(nnx.state(fitted))
    decoder = nnx_adapters.view(
        nnx_attention(name), only=nnx_adapters.RandomFeatureAttention, decode=True, batch_size=2
    )
    donate(nnx.state(decoder))

    @jax.jit
    def attend(state):
        return nnx.merge(nnx.graphdef(model), state)(x)

    expected = attend(nnx.state(model))
    step = jax.jit(lambda state: (attend(state), state), donate_argnums=0)
    out, _ = step(nnx.state(model))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_linen_variables(name):
    model, x = linen_attention(name), batch()
    if name in ("calibrated", "learned"):
        fresh = model.init(jax.random.key(0), x)
        donate(linen_adapters.calibrate(model, fresh, [x]))
    donate(model.init(jax.random.key(0), x))
    donate(linen_attention(name, decode=True).init(jax.random.key(0), x))


@pytest.mark.slow
def test_a_map_of_the_caller_stays_the_callers():
    own, x = calibration(), batch()
    rngs = nnx.Rngs(0)
    layers = [
        nnx_adapters.RandomFeatureAttention(HEADS, DIM, ROWS, feature_map=own, rngs=rngs)
        for _ in range(2)
    ]
    donate([nnx.state(layer) for layer in layers])
    model = nn.MultiHeadDotProductAttention(
        HEADS, attention_fn=linen_adapters.RandomFeatureAttention(ROWS, own)
    )
    donate([model.init(jax.random.key(0), x), model.init(jax.random.key(1), x)])
    learned = feature_maps.Learned.start(draw(), own)
    donate(
        nnx.state(
            nnx_adapters.RandomFeatureAttention(HEADS, DIM, None, feature_map=learned, rngs=rngs)
        )
    )
    phases = feature_maps.Phase(jnp.linspace(0, 1, ROWS))
    far = nnx_adapters.FMMAttention(HEADS, DIM, ROWS, 2, feature_maps=(phases,), rngs=rngs)
    donate(nnx.state(far))
    assert not any(x.is_deleted() for x in jax.tree.leaves([own, learned, phases]))


@pytest.mark.parametrize("feature_map", ["positive", "calibrated"])
def test_the_vit_and_the_near_field(feature_map):
    config = models.ViTConfig(
        image_size=(8, 8), channels=1, num_classes=3, patch_size=4, width=8, depth=2, num_heads=2,
        mlp_dim=8, num_features=ROWS, feature_map=feature_map,
    )  # fmt: skip
    donate(nnx.state(models.ViT(config, rngs=nnx.Rngs(0))))
    donate(nnx.state(nnx_adapters.FMMAttention(HEADS, DIM, ROWS, 2, rngs=nnx.Rngs(0))))


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [None, 2])
@pytest.mark.parametrize("mechanism", ["random features", "band", "blend"])
def test_states_of_decoding(mechanism, bandwidth):
    far = simrf_jax.RandomFeatureMechanism(draw(), exact_bandwidth=bandwidth)
    attend = {
        "random features": far,
        "band": simrf_jax.Band(2),
        "blend": simrf_jax.fmm.Blend(simrf_jax.Band(2), (far,), 0.5, 0.5),
    }[mechanism]
    state = attend.init(
        batch=(2,), num_key_heads=HEADS, head_dim=DIM, value_dim=DIM, dtype=jnp.float32
    )
    step = jax.jit(attend.step, donate_argnums=0)
    _, after = step(state, *tokens())
    _, after = step(after, *tokens())
    donate(after)
