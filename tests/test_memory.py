import mmap

import jax
import jax.numpy as jnp
import pytest

from tests.memory import assert_flat

pytestmark = pytest.mark.fast


class _Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self):
        self.me = self


def _fresh_memory():
    """Maps new pages, because other allocations may reuse memory that the process has freed."""
    memory = mmap.mmap(-1, 2**18, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * 2**18)
    return memory


@pytest.mark.slow
def test_what_is_freed_is_flat():
    assert_flat(_Cycle, count=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "count"),
    [
        (lambda held: held.append(jnp.zeros(3)), 1),
        (lambda held: held.append([_Cycle()]), 200),
        (lambda held: held.append(_fresh_memory()), 100),
        (lambda held: jax.jit(lambda x: x + 1)(jnp.zeros(3)), 1),
    ],
    ids=["arrays", "objects", "bytes", "programs"],
)
def test_what_is_left_behind_is_seen(leak, count):
    held = []
    with pytest.raises(AssertionError, match="Growth"):
        assert_flat(lambda: leak(held), count=count, warm_up=2)
