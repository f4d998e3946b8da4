import jax
import jax.numpy as jnp
import pytest

from benchmarks.flops import matmul_flops
from experiments.vit.metrics import flops
from tests.experiments.vit import tiny
from tests.experiments.vit.test_train import build
from tests.experiments.vit.training.test_sharding import mesh_of


def trace(**changes):
    """A training step of 32 images, and the shape of its model."""
    program = build(tiny.get_config(**changes))
    image = jax.ShapeDtypeStruct((32, 8, 8, 1), jnp.float32)
    label = jax.ShapeDtypeStruct((32,), jnp.int32)
    with jax.set_mesh(program.mesh):
        traced = program.train_step.trace(program.state, {"image": image, "label": label})
        return traced, program.model


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model__depth": 3, "model__scan": True, "model__pooling": "token"},
        {"model__attention": "exact"},
        {"num_microbatches": 2},
    ],
)
def test_the_count_is_that_of_the_products_of_a_step(changes):
    traced, model = trace(**changes)
    assert matmul_flops(traced.jaxpr, "cuda") == 32 * flops.train_flops(model)


@pytest.mark.slow
def test_the_count_of_calibrated_features_is_that_of_a_step_but_for_two_products_with_w():
    traced, model = trace(model__feature_map="calibrated", calibrate_interval=1)
    with_w = 2 * model.num_features * model.width * (model.width // model.num_heads)
    assert (
        matmul_flops(traced.jaxpr, "cuda")
        == 32 * flops.train_flops(model) + 2 * model.depth * with_w
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "least"), [(False, 1.0), (True, 0.5)])
def test_xla_counts_these_and_what_is_elementwise_but_a_scanned_layer_once(scan, least):
    changes = {"model__depth": 2, "model__width": 128, "model__mlp_dim": 512}
    traced, model = trace(model__scan=scan, **changes)
    ratio = traced.lower().cost_analysis()["flops"] / (32 * flops.train_flops(model))
    assert least < ratio < least + 0.1


@pytest.mark.fast
@pytest.mark.cpu
def test_the_peak_is_that_of_all_devices(monkeypatch):
    assert flops.peak(mesh_of(8)) is None
    monkeypatch.setitem(flops.PEAK_FLOPS, "cpu", 2e12)
    assert flops.peak(mesh_of(2, 4)) == 16e12
