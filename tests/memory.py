"""Growth of memory, objects and compilations over many calls of a function."""

import gc
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax

from tests import platforms
from tests.versions import unregister_event_duration_listener


class Growth(NamedTuple):
    """Growth over many calls.

    Attributes:
      private: Bytes of private memory of the process.
      arrays: Number of live JAX arrays.
      objects: Number of Python objects that the garbage collector tracks.
      compilations: Number of programs that XLA compiled.
    """

    private: int
    arrays: int
    objects: int
    compilations: int


def private_bytes() -> int:
    """Returns the private memory of this process, in use or swapped out, on Linux."""
    # The resident set would not do, because other processes evict pages of libraries from it.
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def growth(call: Callable[[], object], *, count: int, warm_up: int) -> Growth:
    """Calls a function many times and returns the growth after a warm-up.

    Args:
      call: Function whose result is waited for and dropped.
      count: Number of calls after the warm-up.
      warm_up: Number of calls before, which fill caches.
    """
    compilations = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(duration)

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return private_bytes(), len(jax.live_arrays()), len(gc.get_objects())

    for _ in range(warm_up):
        jax.block_until_ready(call())
    measure()  # The first measurement itself takes memory.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        before = measure()
        for _ in range(count):
            jax.block_until_ready(call())
        after = measure()
    finally:
        unregister_event_duration_listener(listen)
    private, arrays, objects = (b - a for a, b in zip(before, after, strict=True))
    return Growth(private, arrays, objects, len(compilations))


def assert_flat(call: Callable[[], object], *, count: int, warm_up: int = 20) -> None:
    """Fails if many calls on the CPU compile anything or leave anything in memory."""
    platforms.require_cpu()
    found = growth(call, count=count, warm_up=warm_up)
    assert (found.arrays, found.compilations) == (0, 0), found
    assert found.objects < 100 + count // 50, found
    # glibc keeps a few MiB more, or less, whatever is called; a leak grows with each repetition.
    private = [found.private]
    allowed = 2**22 + 2**9 * count
    while min(private) >= allowed and len(private) < 4:
        private.append(growth(call, count=count, warm_up=0).private)
    assert min(private) < allowed, f"{found} and in repetitions {private}"
