import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.harness import train_state
from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.training import sharding
from tests import platforms
from tests.experiments.vit import tiny
from tests.experiments.vit.test_train import build, make_batch, read_losses

EIGHT_HEADS = {
    "model__num_heads": 8,
    "num_steps": 6,
    "eval_interval": 6,
    "redraw_interval": 4,
    # The head starts at zero and hides the rest of the model until it has learnt something.
    "learning_rate": 0.01,
    "warmup_steps": 0,
}


def require_mesh(*sizes):
    """Skips the test if JAX has fewer devices than a mesh takes, of which -1 takes the rest."""
    platforms.require_devices(abs(math.prod(sizes)))


def mesh_of(data=1, fsdp=1, tensor=1, sequence=1):
    require_mesh(data, fsdp, tensor, sequence)
    return sharding.make_mesh(dict(zip(sharding.AXES, (data, fsdp, tensor, sequence), strict=True)))


def losses_on(folder, data, fsdp, tensor, sequence=1, **changes):
    require_mesh(data, fsdp, tensor, sequence)
    mesh = {
        "mesh__data": data,
        "mesh__fsdp": fsdp,
        "mesh__tensor": tensor,
        "mesh__sequence": sequence,
    }
    results = train.train(tiny.get_config(**EIGHT_HEADS, **mesh, **changes), folder)
    return [*read_losses(folder), results["test_loss"]]


@pytest.fixture(scope="module")
def losses_on_one_device(tmp_path_factory):
    return losses_on(tmp_path_factory.mktemp("one"), 1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (2, 1, 2, 2)])
def test_every_mesh_trains_alike(tmp_path, mesh, losses_on_one_device):
    losses = losses_on(tmp_path, *mesh)
    np.testing.assert_allclose(losses, losses_on_one_device, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_remat_and_scan_train_alike_on_a_mesh_of_all_axes(tmp_path, losses_on_one_device):
    changes = {"model__remat": "dots", "model__scan": True}
    losses = losses_on(tmp_path, -1, 2, 2, 2, **changes)
    np.testing.assert_allclose(losses, losses_on_one_device, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_microbatches_train_alike_on_a_mesh(tmp_path):
    changes = {"num_microbatches": 4}
    expected = losses_on(tmp_path / "one", 1, 1, 1, **changes)
    changes |= {"model__remat": "block", "model__scan": True}
    losses = losses_on(tmp_path / "mesh", 2, 2, 2, **changes)
    np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_arrays_lie_as_the_rules_say():
    config = tiny.get_config(model__num_heads=8, model__depth=2, model__scan=True)
    state = build(config, mesh_of(2, 2, 2)).init()

    def shards(x):
        return {shard.data.shape for shard in x.addressable_shards}

    moments = state.opt_state[1][0]
    for tree in (state.params, moments.mu, moments.nu):
        block = tree["blocks"]
        assert shards(block["attention"]["query"]["kernel"][...]) == {(2, 16, 4, 4)}
        assert shards(block["attention"]["out"]["kernel"][...]) == {(2, 4, 4, 16)}
        assert shards(block["mlp_in"]["kernel"][...]) == {(2, 16, 16)}
        assert shards(block["mlp_out"]["kernel"][...]) == {(2, 16, 16)}
        assert shards(block["mlp_norm"]["scale"][...]) == {(2, 32)}
        assert shards(tree["patch_embedding"]["kernel"][...]) == {(4, 16)}
        assert shards(tree["head"]["kernel"][...]) == {(16, 10)}
    [w] = jax.tree.leaves(state.projections)
    assert shards(w) == {(2, 4, 34, 4)}
    assert shards(state.step) == {()}
    of_params = jax.tree.map(lambda x: x.sharding, state.params)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, moments.mu), of_params)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rules", "shape", "error", "match"),
    [
        ((), (8,), ValueError, r"No sharding rule matches params/kernel of shape \(8,\)"),
        (
            (sharding.Rule("kernel", PartitionSpec("fsdp")),),
            (9,),
            UserError,
            "9 must be a multiple of .*fsdp",
        ),
        (
            (sharding.Rule("k", PartitionSpec(None, None)),),
            (9,),
            ValueError,
            r"does not fit params/kernel",
        ),
    ],
)
def test_arrays_without_a_place_are_refused(rules, shape, error, match):
    state = {"params": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    with pytest.raises(error, match=match):
        sharding.state_shardings(state, mesh_of(2, 4), rules)


@pytest.mark.fast
def test_the_first_rule_counts_and_is_for_the_last_dimensions():
    state = {"a": jnp.zeros((3, 8)), "b": jnp.zeros((4,)), "c": jnp.zeros(())}
    rules = (
        sharding.Rule("^a$", PartitionSpec("fsdp")),
        sharding.Rule("", PartitionSpec()),
        sharding.Rule("^b$", PartitionSpec("fsdp")),
    )
    shardings = sharding.state_shardings(state, mesh_of(2, 4), rules)
    shapes = {name: shardings[name].shard_shape(x.shape) for name, x in state.items()}
    assert shapes == {"a": (3, 2), "b": (4,), "c": ()}


@pytest.mark.slow
def test_microbatches_add_up_to_the_batch():
    def step(count, mesh):
        config = tiny.get_config(model__dropout_rate=0.0, clip_norm=1e9, num_microbatches=count)
        program = build(config, mesh)
        with jax.set_mesh(mesh):
            state = program.init()
            head = state.params["head"]["kernel"]
            kernel = jax.random.normal(jax.random.key(1), (32, 10))
            head[...] = jax.device_put(kernel, head.sharding)
            batch = sharding.global_batch(make_batch(), mesh, 32)
            return program.train_step(state, batch)

    whole, metrics = step(1, mesh_of())
    parts, metrics_of_parts = step(4, mesh_of(2, 4))
    chex.assert_trees_all_close(metrics_of_parts, metrics, rtol=1e-5)
    # The first moment is the gradient, but for a factor.
    gradients, of_parts = (s.opt_state[1][0].mu for s in (whole, parts))
    chex.assert_trees_all_close(of_parts, gradients, rtol=1e-5, atol=1e-6)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients)) > 1e-2


def test_microbatches_have_dropout_of_their_own():
    keys = jax.random.split(jax.random.key(0), 4)

    def draw(batch, key):
        return jax.random.uniform(key) + batch["x"].sum()

    with jax.set_mesh(mesh_of(2)):
        mean = jax.jit(functools.partial(sharding.mean_over_microbatches, draw))(
            {"x": jnp.zeros(8)}, jax.random.clone(keys)
        )
    np.testing.assert_allclose(mean, np.mean([jax.random.uniform(key) for key in keys]), rtol=1e-6)


def redrawn(scan):
    """The projections of eleven layers."""
    program = build(tiny.get_config(model__depth=11, model__scan=scan, model__width=8))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), program.state.projections)

    @jax.jit
    def draw(key):
        state = program.state._replace(projections=zeros, step=0, key=key)
        state = train_state.redraw(state, interval=0, stacked=scan)
        return jax.tree.leaves(state.projections)

    return draw(jax.random.key(0))


@pytest.mark.slow
def test_redraw_of_stacked_projections_is_that_of_the_layers():
    [stacked] = redrawn(scan=True)
    np.testing.assert_array_equal(stacked, np.stack(redrawn(scan=False)))
