"""The fused kernels, interpreted: the estimator itself, in all that they can do."""

import dataclasses
import functools
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import simrf_jax
from simrf_jax import feature_maps, random_feature_attention
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_tpu import choice, operands
from tests import formulas
from tests.attention import devices, reference
from tests.attention.inputs import KINDS, inputs, map_and_rows, projection
from tests.tiers import slow_but

P = jax.P
in_kernel = functools.partial(random_feature_attention, implementation="pallas_tpu")
by_xla = functools.partial(random_feature_attention, implementation="xla")


@pytest.fixture(params=[150, 149], ids=["whole", "tiles"])
def length(request, monkeypatch):
    """A length that is taken in one tile, or another one that is taken in several.

    Lengths differ, because a program that was compiled with other tiles would be used again.
    """
    if request.param == 149:
        monkeypatch.setattr(operands, "LONGEST_WHOLE", operands.LANES)
        monkeypatch.setattr(operands, "LONGEST_TILE", operands.LANES)
    return request.param


@pytest.mark.fast
@pytest.mark.parametrize(
    ("length", "num_features", "dim", "tile", "heads"),
    [
        (197, 128, 64, 256, 12),
        (1024, 128, 64, 1024, 12),
        (4096, 128, 64, 4096, 2),
        (4097, 128, 64, 1408, 6),
        (8192, 128, 64, 2048, 6),
        (4096, 512, 64, 1408, 1),
        (2048, 128, 128, 2048, 3),
        (4096, 128, 128, 1024, 6),
    ],
)
def test_memory_goes_to_the_tile_before_it_goes_to_heads(length, num_features, dim, tile, heads):
    assert sizes(length, num_features, dim) == (tile, heads)


@pytest.mark.fast
def test_programs_for_a_v4_are_smaller(monkeypatch):
    monkeypatch.setattr(operands, "memory", lambda: choice.MEMORY_OF_V4)
    assert sizes(197, 128, 64) == (256, 6)
    assert sizes(4096, 128, 64) == (1024, 2)


def sizes(length, num_features, dim):
    """Returns the tile and the heads of a program for 12 heads in bfloat16."""
    tokens = jax.ShapeDtypeStruct((8, length, 12, dim), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((12, num_features, dim), jnp.float32)

    def lay_out(tokens, rows):
        call = Call.of(tokens, tokens, tokens)
        return operands.lay_out(call, rows, feature_maps.Positive())

    refs = jax.eval_shape(lay_out, tokens, rows)
    shape = operands.shape_of(refs, interpret=False)
    assert shape.query_tile == shape.key_tile
    return shape.key_tile, shape.num_heads


def assert_close(got, want, tolerance):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max())


# The map, the size and heads of its W, and the formula of its features in float64.
MAPS = {
    "positive": ("positive", (11, 8, 2), formulas.positive),
    "hyperbolic": ("hyperbolic", (11,), formulas.hyperbolic),
    "pairs": ("hyperbolic", (8,), formulas.hyperbolic),
    "optimal": (feature_maps.OptimalPositive(-0.1), (11, 8, 2), formulas.optimal_positive),
}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 2, 8])
@pytest.mark.parametrize("name", MAPS)
def test_the_estimator_in_float64(length, name, scale):
    feature_map, size, formula = MAPS[name]
    w = projection(*size)
    q, k, v = inputs(length, 140, heads=4, key_heads=2, scale=scale)
    got = in_kernel(q, k, v, w, feature_map=feature_map)
    want = reference.attention(q, k, v, w, formula=formula)
    assert_close(got, want, 1e-5)


OPTIONS = {
    "all": {},
    "lengths": {"key_value_seq_lengths": [131, 0], "query_seq_lengths": [148, 17]},
    "mask of all": {"mask": np.arange(140) % 3 > 0},
    "mask and bias of heads": {
        "mask": np.arange(140) > np.arange(4)[:, None, None],
        "bias": np.cos(np.arange(2 * 4 * 140)).reshape(2, 4, 1, 140).astype(np.float32),
    },
    "scale": {"scale": -0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_and_the_gradients_of_xla(length, kind, options):
    q, k, v = inputs(length, 140, heads=4, key_heads=2, batch=(2,))
    feature_map, w = map_and_rows(kind, q, k)
    of_outputs = jnp.sin(jnp.arange(q.size)).reshape(q.shape)

    def run(attend):
        def attention(q, k, v):
            return attend(q, k, v, w, feature_map=feature_map, **options)

        out, back = jax.vjp(attention, q, k, v)
        return out, *back(of_outputs)

    for got, want in zip(run(in_kernel), run(by_xla), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
def test_learned_features():
    q, k, v = inputs(40, heads=2)
    w = projection(11, heads=2)
    learned = feature_maps.Learned.start(w, simrf_jax.calibrate(q, k))
    learned = jax.tree.map(
        lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), learned
    )
    got, want = (attend(q, k, v, None, feature_map=learned) for attend in (in_kernel, by_xla))
    assert_close(got, want, 1e-5)


@pytest.mark.slow
def test_weighted_rows():
    q, k, v = inputs(40)
    w = simrf_jax.Projection(projection(11), jnp.linspace(-3, 1, 11))
    got, want = (attend(q, k, v, w) for attend in (in_kernel, by_xla))
    assert_close(got, want, 1e-5)


@pytest.mark.slow
def test_bfloat16(length):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(length, heads=2, dim=16, scale=2))
    w, of_outputs = projection(33, dim=16), jnp.sin(jnp.arange(q.size)).reshape(q.shape)

    def run(attend, *tokens):
        def attention(*tokens):
            return attend(*tokens, w).astype(jnp.float32)

        out, back = jax.vjp(attention, *tokens)
        return [np.asarray(x, np.float64) for x in (out, *back(of_outputs))]

    wide = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    exact, fused, plain = run(by_xla, *wide), run(in_kernel, q, k, v), run(by_xla, q, k, v)
    errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(fused, exact, strict=True)]
    assert errors[0] <= 1.1 * np.linalg.norm(plain[0] - exact[0]) / np.linalg.norm(exact[0])
    # The gradients of the sums are rounded to bfloat16, as XLA does on a TPU but not on a CPU.
    assert max(errors) <= 0.012


@pytest.mark.slow
def test_bfloat16_keys_far_from_zero(length):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x) for x in inputs(length, heads=2, dim=16))
    q, k = (x + jnp.asarray(3 * rng.normal(size=(1, 2, 16)), x.dtype) for x in (q, k))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    calibration, w = simrf_jax.calibrate(*wide[:2]), projection(33, dim=16, heads=2)

    def run(attend, *tokens):
        def loss(*tokens):
            return jnp.sum(jnp.sin(attend(*tokens, w, feature_map=calibration).astype(jnp.float32)))

        return [np.asarray(x, np.float64) for x in jax.grad(loss, (0, 1, 2))(*tokens)]

    for got, want in zip(run(in_kernel, q, k, v), run(by_xla, *wide), strict=True):
        assert np.linalg.norm(got - want) <= 0.012 * np.linalg.norm(want)


@pytest.mark.slow
def test_a_row_without_weight_is_left_out(length):
    q, k, v = inputs(length)
    w = simrf_jax.Projection(projection(11), jnp.zeros(11).at[3].set(-jnp.inf))

    def run(attend):
        out, back = jax.vjp(lambda *tokens: attend(*tokens, w), q, k, v)
        return out, *back(jnp.cos(out))

    for got, want in zip(run(in_kernel), run(by_xla), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [-1e30, float(np.finfo(np.float32).min)])
def test_a_low_bias_of_all_keys_hides_none(bias):
    q, k, v = inputs(20)
    out = in_kernel(q, k, v, projection(), bias=np.full(20, bias, np.float32))
    # Beside such a bias nothing else has digits left, so that all keys are alike.
    assert_close(out, np.broadcast_to(v.mean(axis=0), out.shape), 1e-5)


@pytest.mark.slow
def test_gradients_of_everything_else_are_those_of_xla():
    q, k, v = inputs(20)
    bias = jnp.linspace(-1, 1, 20)

    def gradients(attend):
        def loss(w, bias, scale):
            return jnp.sum(jnp.sin(attend(q, k, v, w, bias=bias, scale=scale)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(projection(), bias, 0.4)

    for got, want in zip(gradients(in_kernel), gradients(by_xla), strict=True):
        assert np.abs(want).max() > 1e-3
        assert_close(got, want, 1e-6)


@pytest.mark.slow
def test_a_head_is_poisoned_by_a_key_and_a_query_by_itself(length):
    q, k, v = (jnp.asarray(x) for x in inputs(length, heads=2, batch=(2,)))
    clean = in_kernel(q, k, v, projection())
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        poisoned = np.asarray(in_kernel(q, k.at[0, 140, 1, 3].set(bad), v, projection()))
        assert np.isnan(poisoned[0, :, 1]).all()
        np.testing.assert_array_equal(poisoned[1], clean[1])
        np.testing.assert_array_equal(poisoned[0, :, 0], clean[0, :, 0])
        poisoned = np.asarray(in_kernel(q, k, v.at[0, 140, 1, 3].set(bad), projection()))
        assert np.isnan(poisoned[0, :, 1]).all()
        np.testing.assert_array_equal(poisoned[1], clean[1])
        poisoned = np.asarray(in_kernel(q.at[0, 140, 1, 3].set(bad), k, v, projection()))
        assert np.isnan(poisoned[0, 140, 1]).all()
        np.testing.assert_array_equal(np.delete(poisoned[0], 140, 0), np.delete(clean[0], 140, 0))


@pytest.mark.slow
def test_a_hidden_key_reaches_nothing(length):
    q, k, v = (jnp.asarray(x) for x in inputs(length, heads=2))
    mask = np.arange(length) != 140

    def run(k, v):
        return jax.vjp(lambda q, k, v: in_kernel(q, k, v, projection(), mask=mask), q, k, v)

    clean, back = run(k, v)
    poisoned, back_of_poisoned = run(k.at[140].set(jnp.nan), v.at[140].set(jnp.inf))
    np.testing.assert_array_equal(clean, poisoned)
    for got, want in zip(back_of_poisoned(clean), back(clean), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_not_finite_reaches_no_gradient_of_others(length, which):
    tokens = {
        name: jnp.asarray(x)
        for name, x in zip(("query", "key", "value"), inputs(length, heads=2), strict=True)
    }
    poisoned = tokens | {which: tokens[which].at[140, 1].set(jnp.nan)}

    def gradients(tokens):
        # Where the output is NaN, nobody counts it.
        def loss(tokens):
            out = in_kernel(**tokens, projection=projection())
            return jnp.sum(jnp.sin(jnp.where(counts[..., None], out, 0)))

        return jax.grad(loss)(tokens)

    counts = ~jnp.isnan(in_kernel(**poisoned, projection=projection())).any(-1)
    got, want = gradients(poisoned), gradients(tokens)
    for name in tokens:
        assert np.isfinite(got[name]).all()
        assert_close(got[name][:, 0], want[name][:, 0], 1e-6)
    if which == "query":  # The other queries of its head still count.
        assert_close(got["query"][:140], want["query"][:140], 1e-6)
        assert_close(got["value"], want["value"], 1e-6)


@pytest.mark.slow
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    length=st.integers(1, 300),
    key_length=st.integers(1, 300),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    dim=st.integers(2, 40),
    width=st.integers(1, 40),
    num_features=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_any_shape(length, key_length, key_heads, groups, dim, width, num_features, seed):
    q, k, v = inputs(length, key_length, groups * key_heads, key_heads, dim, width, seed=seed)
    w = projection(num_features, dim, key_heads)
    got = in_kernel(q, k, v, w)
    assert_close(got, by_xla(q, k, v, w), 1e-5)


@pytest.mark.slow
def test_vmap_scan_and_remat():
    q, k, v = inputs(20, batch=(3,))
    w = projection()

    @jax.checkpoint
    def attend(x, _=None):
        return in_kernel(x, k[0], v[0], w), None

    def stacked(attend):
        def loss(q):
            mapped = jax.vmap(lambda x: attend(x)[0])(q)
            return jnp.sum(jax.lax.scan(attend, mapped[0], None, length=2)[0] ** 2)

        return jax.jit(jax.grad(loss))(q)

    want = stacked(lambda x, _=None: (by_xla(x, k[0], v[0], w), None))
    assert_close(stacked(attend), want, 1e-5)


@pytest.mark.slow
def test_each_device_has_its_part():
    mesh = devices.make_mesh("auto", data=2, tensor=2, rest=2)
    q, k, v = inputs(20, heads=4, key_heads=2, batch=(2,))
    w, lengths = projection(heads=2), jnp.array([3, 20])
    options = {"batch_axis": "data", "head_axis": "tensor", "key_value_seq_lengths": lengths}

    def gradients(attend, **options):
        def loss(*tokens):
            return jnp.sum(jnp.sin(attend(*tokens, w, **options)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    want = gradients(by_xla, key_value_seq_lengths=lengths)(q, k, v)
    with jax.set_mesh(mesh):
        tokens = [jax.device_put(x, P("data", None, "tensor")) for x in (q, k, v)]
        compiled = gradients(in_kernel, **options).lower(*tokens).compile()
        got = compiled(*tokens)
    assert "all-gather" not in compiled.as_text()
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.slow
def test_inside_shard_map():
    mesh = devices.make_mesh("manual", data=2)
    q, k, v = inputs(20, batch=(2,))
    attend = jax.shard_map(
        lambda *tokens: in_kernel(*tokens, projection()),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,  # Pallas's interpreter cannot do with it.
    )
    assert_close(attend(q, k, v), by_xla(q, k, v, projection()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but([jnp.bfloat16], [jnp.float32, jnp.bfloat16]))
@pytest.mark.parametrize("size", [197, 1500])
def test_mosaic_takes_the_kernels(size, dtype):
    tokens = jax.ShapeDtypeStruct((2, size, 4, 64), dtype)

    def loss(q, k, v):
        return jnp.sum(in_kernel(q, k, v, w, bias=bias).astype(jnp.float32))

    w, bias = jnp.ones((4, 130, 64)), jnp.zeros(size)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(tokens, tokens, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


def uses_kernel(call, *arguments):
    # Wrapped, because JAX would not trace the same function twice.
    return "pallas_call" in str(jax.make_jaxpr(lambda *x: call(*x))(*arguments))


@pytest.mark.slow
def test_the_default(monkeypatch):
    q, k, v = inputs(20, batch=(2,))
    plain = functools.partial(random_feature_attention, projection=projection())
    assert not uses_kernel(plain, q, k, v)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert uses_kernel(plain, q, k, v)
    assert not uses_kernel(functools.partial(plain, implementation="xla"), q, k, v)
    assert uses_kernel(functools.partial(plain, is_causal=True), q, k, v)
    assert uses_kernel(functools.partial(plain, segment_ids=np.zeros((2, 20), int)), q, k, v)
    assert uses_kernel(functools.partial(plain, exact_bandwidth=2), q, k, v)
    assert not uses_kernel(functools.partial(plain, exact_bandwidth=257), q, k, v)
    assert not uses_kernel(functools.partial(plain, feature_map="relu"), q, k, v)
    assert not uses_kernel(functools.partial(plain, batch_axis="data"), q, k, v)
    # XLA would give each of several devices the tokens of all.
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert not uses_kernel(plain, q, k, v)
    with jax.set_mesh(devices.make_mesh("auto", data=2, tensor=1)):
        assert not uses_kernel(plain, q, k, v)
        assert uses_kernel(functools.partial(plain, batch_axis="data"), q, k, v)
        assert not uses_kernel(functools.partial(plain, batch_axis="data"), q[:1], k[:1], v[:1])


@dataclasses.dataclass(frozen=True)
class Half(feature_maps.Positive):
    """A map of a user, whose features are not those of the class that it derives from."""

    def log_features(self, x, w, *, side):
        return super().log_features(0.5 * x, w, side=side)


def test_the_default_leaves_to_xla_what_it_must(monkeypatch):
    q, k, v = inputs(20, batch=(2,))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    plain = functools.partial(random_feature_attention, projection=projection())
    assert not uses_kernel(functools.partial(plain, feature_map=Half()), q, k, v)
    wide = functools.partial(random_feature_attention, projection=jnp.ones((2, 60000, 8)))
    assert not uses_kernel(wide, q, k, v)
    length = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((*length, 2, 8), jnp.float32)] * 3
    assert "pallas_call" not in str(jax.jit(plain).trace(*shapes).jaxpr)


def test_axes_of_type_explicit_are_refused():
    mesh = devices.make_mesh("explicit", data=2)
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, P("data")) for x in inputs(batch=(2,)))
        with pytest.raises(ValueError, match="axes of type Explicit shard the arrays"):
            in_kernel(q, k, v, projection())


def test_axes_need_the_mesh_of_the_context():
    q, k, v = inputs(batch=(2,))
    mesh = devices.make_mesh("auto", data=2)
    tokens = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"no axes of type Auto of jax\.set_mesh's mesh"):
        in_kernel(*tokens, projection(), batch_axis="data")


def test_mosaic_takes_a_scale_of_each_call():
    q, k, v = (jax.ShapeDtypeStruct((3, 20, 2, 16), jnp.float32) for _ in range(3))

    def attend(scale, q, k, v):
        return in_kernel(q, k, v, jnp.ones((11, 16)), scale=scale)

    traced = jax.jit(jax.vmap(attend)).trace(jnp.ones(3), q, k, v)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


REFUSED = {
    "band": ({"exact_bandwidth": 300}, "exact_bandwidth is 300, above 256"),
    "sharded": ({"sequence_axis": "data"}, "got a call with a sequence_axis"),
    "map": ({"feature_map": "relu"}, "Relu features are not exponentials"),
    "axis": ({"batch_axis": "rows"}, r"batch_axis is \('rows',\), no axes of type Auto"),
    "size": ({"head_axis": "data"}, "of 2 devices, which do not divide 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_cannot_do(options, message):
    q, k, v = inputs(9, heads=3)
    with jax.set_mesh(devices.make_mesh("auto", data=2)), pytest.raises(ValueError, match=message):
        in_kernel(q, k, v, projection(), **options)


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="its kernels run on TPUs, and interpreted on CPUs, got"):
        in_kernel(*inputs(), projection())


MODES = {"bidirectional": {}, "causal": {"is_causal": True}, "band": {"exact_bandwidth": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("options", slow_but(["bidirectional"], MODES))
def test_other_derivatives_name_the_implementation_that_has_them(options):
    q, k, v = inputs()

    def total(q):
        return jnp.sum(in_kernel(q, k, v, projection(), **options))

    def norm_of_gradient(q):
        return jnp.sum(jnp.square(jax.grad(total)(q)))

    with pytest.raises(NotImplementedError, match=r'got a second derivative .*tion="xla"'):
        jax.grad(norm_of_gradient)(q)
    with pytest.raises(TypeError, match=r'got a derivative in forward mode .*tion="xla"'):
        jax.jvp(total, (q,), (q,))


def test_other_types_are_refused():
    q, k, v = (jnp.asarray(x, jnp.float16) for x in inputs())
    with pytest.raises(ValueError, match="are float16, not all float32 or all bfloat16"):
        in_kernel(q, k, v, projection())


def test_no_tokens_are_refused():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="an array is empty"):
        in_kernel(q, k[:0], v[:0], projection())


@pytest.mark.slow
def test_pallas_is_not_loaded_with_the_library():
    code = "import simrf_jax, sys; sys.exit('jax.experimental.pallas.tpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
