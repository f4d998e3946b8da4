"""Tests of the representations of the library's records, which are one line without numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import calibration, feature_maps
from simrf_jax._src import one_line
from simrf_jax.integrations import linen

pytestmark = pytest.mark.fast


def key():
    return jax.random.key(0)


SIZES = {"batch": (3,), "num_key_heads": 2, "head_dim": 4, "value_dim": 5}
WINDOW = "Window(key=float32[3, 7, 2, 4], value=float32[3, 7, 2, 5], log_weights=float32[3, 7, 2])"
SUMS = "AttentionState(sums=float32[3, 2, 6, 6], maxima=float32[3, 2, 6])"
MATRICES = "query_matrix=float32[2, 4, 4], key_matrix=float32[2, 4, 4]"
FITTED = (
    f"Calibrated(query_mean=float32[2, 4], key_mean=float32[2, 4], {MATRICES}, "
    "variances=float32[2, 4])"
)
DRAWN = (
    "DrawOptions(coupling='orthogonal', block='regular', rotation='haar', norms='chi', "
    "num_sweeps=None, kernel=Gaussian())"
)


def state(mechanism):
    return mechanism.init(**SIZES)


@pytest.mark.slow
def test_records_are_shown_in_one_line():
    w = simrf_jax.draw_projection(key(), 6, 4)
    fast = simrf_jax.draw_fast_projection(key(), 130, 64)
    calibrated = feature_maps.Calibrated.identity(2, 4)
    query = jax.random.normal(key(), (1, 10, 2, 4))
    random_features = simrf_jax.RandomFeatureMechanism(w, chunk_size=64)
    records = [
        (fast.rows, "FastRows(130 x 64, simplex, float32)"),
        (
            fast,
            "Projection(rows=FastRows(130 x 64, simplex, float32), is_paired=False, draw_options="
            f"{DRAWN.replace('orthogonal', 'simplex').replace('haar', 'hadamard')})",
        ),
        (
            simrf_jax.draw_fast_projection(key(), 7, 5, coupling="orthogonal", block="square").rows,
            "FastRows(7 x 5, orthogonal, square, float32)",
        ),
        (
            jax.vmap(lambda one: simrf_jax.draw_fast_projection(one, 6, 4))(
                jax.random.split(key())
            ).rows,
            "FastRows(2 x 6 x 4, simplex, float32)",
        ),
        (
            simrf_jax.Projection(fast.rows, jnp.zeros(130, jnp.bfloat16)),
            "Projection(rows=FastRows(130 x 64, simplex, float32), "
            "log_weights=bfloat16[130], is_paired=False)",
        ),
        (
            simrf_jax.hybrid.draw_bipolar_projection(key(), 6, 2, 4),
            "BipolarProjection(hyperbolic=float32[6, 4], trigonometric=float32[6, 4], "
            f"weights=float32[2, 4], draw_options={DRAWN})",
        ),
        (
            simrf_jax.hybrid.ClusteredProjection(w, jnp.ones((3, 4)), jnp.ones((2, 4))),
            "ClusteredProjection(projection=float32[6, 4], query_centers=float32[3, 4], "
            "key_centers=float32[2, 4], spread=0.0)",
        ),
        (feature_maps.Positive(), "Positive(kernel='softmax')"),
        (feature_maps.OptimalPositive(-0.1), "OptimalPositive(parameter=-0.1, kernel='softmax')"),
        (
            feature_maps.OptimalPositive(np.array([-0.1, -0.2])),
            "OptimalPositive(parameter=float64[2], kernel='softmax')",
        ),
        (feature_maps.Phase(jnp.zeros(6)), "Phase(phases=float32[6], kernel='softmax')"),
        (calibrated, FITTED),
        (
            feature_maps.Learned.start(w, calibrated),
            f"Learned(calibration={FITTED}, query_rows=float32[2, 6, 4], key_rows=float32[2, 6, 4],"
            " query_offsets=float32[2, 6], key_offsets=float32[2, 6], log_weights=float32[2, 6])",
        ),
        (
            calibration.fit_mixture(key(), query, query, 3),
            f"Mixture(feature_map={FITTED}, centers=float32[2, 3, 4])",
        ),
        (
            feature_maps.Positive().log_features(query, w, side="key"),
            "LogFeatures(exponent=float32[1, 10, 2, 6], log_scale=float32[1, 10, 2, 1])",
        ),
        (
            random_features,
            "RandomFeatureMechanism(projection=float32[6, 4], "
            "feature_map=Positive(kernel='softmax'), chunk_size=64)",
        ),
        (
            simrf_jax.fmm.Blend(simrf_jax.Band(7), (random_features,), far_weights=jnp.ones(1)),
            f"Blend(near=Band(bandwidth=7, block_size=None, sequence_axis=None), "
            f"far=[{random_features!r}], near_weight=1.0, far_weights=float32[1])",
        ),
        (state(random_features), SUMS),
        (state(simrf_jax.Band(7)), WINDOW),
        (
            state(simrf_jax.RandomFeatureMechanism(w, exact_bandwidth=7)),
            f"ExactBandState(near={WINDOW}, far={SUMS})",
        ),
        (
            state(
                simrf_jax.RandomFeatureMechanism(w, exact_keys=simrf_jax.ExactKeys(7, by="score"))
            ),
            f"ExactKeysState(kept={WINDOW.replace('Window', 'KeptKeys')[:-1]}, "
            f"score=float32[3, 7, 2]), far={SUMS})",
        ),
        (
            state(simrf_jax.fmm.Blend(simrf_jax.Band(7), (random_features,))),
            f"BlendState(near={WINDOW}, far=[{SUMS}])",
        ),
        (
            linen.RandomProjection(w, simrf_jax.DrawOptions(coupling="orthogonal")),
            f"RandomProjection(value=float32[6, 4], draw_options={DRAWN})",
        ),
    ]
    for record, expected in records:
        assert repr(record) == expected


def test_a_feature_map_of_a_user_is_shown_in_one_line():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Mine(simrf_jax.FeatureMap):
        shift: jax.Array

        def log_features(self, x, projection, *, side):
            raise NotImplementedError

    @dataclasses.dataclass(frozen=True, eq=False)
    class Named(Mine):
        def __repr__(self):
            return "my own"

    assert repr(Mine(jnp.zeros(3))) == f"{Mine.__name__}(shift=float32[3])"
    assert repr(Named(jnp.zeros(3))) == "my own"


def test_traced_arrays_and_placeholders_are_shown():
    shown = []

    @jax.jit
    def trace(record):
        shown.append(repr(record))
        return record.row_norms

    fast = simrf_jax.draw_fast_projection(key(), 130, 64).rows
    trace(fast)
    assert shown == ["FastRows(130 x 64, simplex, float32)"]
    placeholders = jax.tree.map(lambda _: None, fast)
    assert repr(placeholders) == (
        "FastRows(dim=64, coupling='simplex', block='regular', num_zero_rows=0)"
    )


def test_tuples_of_arrays_are_shown_by_their_types():
    @dataclasses.dataclass
    class Record:
        parts: tuple
        count: int = 1

    record = Record((np.zeros((2, 3)), [jnp.zeros(4)], "x", np.float64(2)))
    expected = "Record(parts=[float64[2, 3], [float32[4]], 'x', np.float64(2.0)], count=1)"
    assert one_line.representation(record) == expected
