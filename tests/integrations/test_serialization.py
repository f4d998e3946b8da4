"""``flax.serialization`` writes and reads every record of the library that holds arrays."""

import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, serialization

import simrf_jax
from simrf_jax import RandomFeatureMechanism, feature_maps, hybrid
from simrf_jax._src import features, projections
from simrf_jax._src.attention.estimator import KeyChoice
from simrf_jax._src.features import FeatureMap
from simrf_jax._src.integrations.flax_serialization import RECORDS
from simrf_jax._src.projections import StructuredProjection
from simrf_jax.integrations.linen import RandomFeatureAttention


def rows(**options):
    return simrf_jax.draw_projection(jax.random.key(0), 8, 4, **options)


def calibration():
    q, k = jax.random.normal(jax.random.key(1), (2, 20, 2, 4))
    return simrf_jax.calibrate(q, k)


CASES = {
    "Calibrated": calibration,
    "Learned": lambda: feature_maps.Learned.start(rows(), calibration()),
    "Folded": lambda: feature_maps.Folded.of(calibration(), rows()),
    "OptimalPositive": lambda: feature_maps.OptimalPositive(jnp.float32(-0.1)),
    "Phase": lambda: feature_maps.Phase(jnp.linspace(0, 1, 8)),
    "GaussianHybrid": lambda: hybrid.GaussianHybrid(jnp.float32(2)),
    "Positive": feature_maps.Positive,
    "FastRows": lambda: simrf_jax.draw_fast_projection(jax.random.key(0), 8, 4).rows,
    "Projection, fast": lambda: simrf_jax.draw_fast_projection(jax.random.key(0), 8, 4),
    "Projection, paired": lambda: simrf_jax.Projection(rows(), is_paired=True),
    "Projection, weighted": lambda: rows(norms="radau"),
    "BipolarProjection": lambda: hybrid.draw_bipolar_projection(jax.random.key(0), 8, 3, 4),
    "ClusteredProjection": lambda: hybrid.ClusteredProjection(rows(), rows()[:2], rows(), 0.1),
    "RandomFeatureMechanism": lambda: RandomFeatureMechanism(
        rows(), calibration(), exact_bandwidth=2
    ),
    "RandomFeatureMechanism, exact keys": lambda: RandomFeatureMechanism(
        rows(), exact_keys=[0, -1]
    ),
    "ExactKeysState": lambda: RandomFeatureMechanism(
        rows(), exact_keys=simrf_jax.ExactKeys(2, by="score")
    ).init(num_key_heads=2, head_dim=4, value_dim=4),
    "KeyChoice": lambda: KeyChoice.of([0, -1]),
    "Band": lambda: simrf_jax.Band(2),
    "Blend": lambda: simrf_jax.fmm.Blend(
        simrf_jax.Band(2), (RandomFeatureMechanism(rows()),), jnp.full(2, 0.4), jnp.full(2, 0.6)
    ),
    "AttentionState": lambda: RandomFeatureMechanism(rows()).init(
        num_key_heads=2, head_dim=4, value_dim=4
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_is_written_and_read(name):
    record = CASES[name]()
    assert type(record).__name__ == name.split(",")[0]
    blank = jax.tree.map(jnp.zeros_like, record)
    restored = serialization.from_bytes(blank, serialization.to_bytes(record))
    assert jax.tree.structure(restored) == jax.tree.structure(record)
    for actual, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(record), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_no_class_of_the_library_is_forgotten():
    for package in (features, projections):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            found = vars(__import__(module.name, fromlist=["_"])).values()
            for kind in found:
                if inspect.isclass(kind) and issubclass(kind, FeatureMap | StructuredProjection):
                    assert inspect.isabstract(kind) or kind in RECORDS, kind


def test_refuses_the_state_of_another_record():
    state = serialization.to_state_dict(calibration())
    with pytest.raises(ValueError, match=r"The state of a Learned must have the fields \['cal"):
        serialization.from_state_dict(CASES["Learned"](), state)


@pytest.mark.parametrize("feature_map", ["positive", "angular_hybrid"])
@pytest.mark.parametrize("other", [{"num_features": 8}, {"shared": True}])
def test_an_adapter_refuses_the_projection_of_another_one(feature_map, other):
    options = {"num_features": 6, "feature_map": feature_map}
    x = jnp.ones((2, 3, 8))

    def model(**options):
        return linen.MultiHeadDotProductAttention(2, attention_fn=RandomFeatureAttention(**options))

    variables = model(**options).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"attention_fn hold W of shape \(2, 6, 4\), drawn for"):
        model(**options | other).apply(variables, x)
