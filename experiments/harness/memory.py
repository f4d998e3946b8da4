"""Memory that a process keeps between the steps of a training run."""

from __future__ import annotations

import contextlib
import ctypes


def keep_freed_memory() -> None:
    """Lets glibc keep the memory that is freed.

    On a CPU, XLA allocates the temporary buffers of every step anew; by default large ones come
    from the kernel each time, page by page, which took a third of the time of a step on digits.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h.
    with contextlib.suppress(OSError, AttributeError):  # Not glibc.
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)
