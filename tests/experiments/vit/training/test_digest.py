"""Digests of arrays, whatever their sharding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.vit.training import digest, sharding
from tests import platforms

pytestmark = pytest.mark.fast
DTYPES = ["bool", "int8", "uint8", "bfloat16", "float16", "int32", "uint32", "float32"]


def random_array(seed, shape, dtype="float32"):
    """An array of random bits."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(2, size=shape).astype(bool)
    bits = rng.bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    return np.frombuffer(bits, jnp.dtype(dtype)).reshape(shape)


def digest_of(x):
    return digest.digests({"x": jnp.asarray(x)})["x"]


def python_digest(x):
    """The same by Python's integers, one element after the other."""

    def mix(word):
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) % 2**32
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) % 2**32
        return word ^ (word >> 16)

    words = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}").tolist()
    return "".join(
        f"{sum(mix(word ^ mix(i ^ salt)) for i, word in enumerate(words)) % 2**32:08x}"
        for salt in (0x243F6A88, 0x85A308D3)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4, 5)])
def test_it_is_a_sum_of_hashes_of_words_and_positions(shape, dtype):
    x = random_array(0, shape, dtype)
    assert digest_of(x) == python_digest(x)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
def test_every_flipped_bit_changes_both_lanes(dtype):
    x = random_array(1, (3, 5), dtype)
    before = digest_of(x)
    for bit in range(8 * x.nbytes):
        flipped = bytearray(x.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        after = digest_of(np.frombuffer(bytes(flipped), x.dtype).reshape(x.shape))
        assert before[:8] != after[:8]
        assert before[8:] != after[8:]


@pytest.mark.parametrize(
    "change",
    {
        "exchanged elements": lambda x: x.reshape(-1)[[1, 0, *range(2, x.size)]].reshape(x.shape),
        "exchanged rows": lambda x: x[[1, 0, *range(2, len(x))]],
        "shifted": lambda x: np.roll(x, 1, axis=1),
        "negated": lambda x: -x,
        "zeros": np.zeros_like,
        "signed zeros": lambda x: np.zeros_like(x) * -1.0,
        "a row that is zero": lambda x: np.where(np.arange(len(x))[:, None] == 2, 0, x),
        "longer": lambda x: np.concatenate([x, np.zeros_like(x)]),
    }.items(),
    ids=lambda change: change[0],
)
def test_a_change_of_many_elements_changes_it(change):
    x = np.random.default_rng(2).standard_normal((8, 6), np.float32)
    others = [x, np.zeros_like(x)] if change[0] == "signed zeros" else [x]
    assert digest_of(change[1](x)) not in map(digest_of, others)


def test_each_lane_of_random_arrays_collides_as_random_numbers_do():
    arrays = np.random.default_rng(3).standard_normal((2**15, 3, 2), np.float32)
    sums = np.asarray(jax.vmap(digest._digest)(arrays))
    # 2^29 pairs of 2^32 values: an eighth of a collision is expected.
    for lane in (0, 1):
        assert len({*sums[:, lane].tolist()}) >= len(arrays) - 2
    assert abs(np.corrcoef(sums.T.astype(float))[0, 1]) < 5 / math.sqrt(len(arrays))


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, ("data", "fsdp"))]
)
def test_it_does_not_depend_on_the_sharding(devices, spec):
    x = random_array(4, (16, 8, 3), "bfloat16")
    size = {"data": devices // min(devices, 2), "fsdp": min(devices, 2), "tensor": 1, "sequence": 1}
    platforms.require_devices(devices)
    mesh = sharding.make_mesh(size, jax.devices()[:devices])
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    assert digest.digests({"x": sharded})["x"] == python_digest(x)


@pytest.mark.devices(8)
def test_no_device_gathers_the_array():
    mesh = sharding.make_mesh({"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1})
    sharded = jax.device_put(np.zeros((64, 128)), NamedSharding(mesh, PartitionSpec("data")))
    program = digest._digest.lower(sharded).compile().as_text()
    (parameter,) = {
        line.split("param: ")[1].split(")")[0] for line in program.splitlines() if "ENTRY" in line
    }
    assert parameter == "f32[8,128]"
    gathered = [line for line in program.splitlines() if "all-" in line and "f32" in line]
    assert not gathered


def test_keys_have_the_digest_of_their_data():
    key = jax.random.key(5)
    assert digest_of(key) == python_digest(np.asarray(jax.random.key_data(jax.random.key(5))))
