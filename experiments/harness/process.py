"""Settings of a process: the memory that glibc keeps, and messages of libraries to hide."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import sys
import warnings

import absl.logging


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


def quiet_jax() -> None:
    """Hides JAX's message that there is no TPU, which absl programs would log at every start.

    JAX still reports a TPU that it finds and cannot use.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_keep_jax_record)


def _keep_jax_record(record: logging.LogRecord) -> bool:
    """Returns False for the message that the TPU library is not installed."""
    message = record.getMessage()
    is_about_tpu = message.startswith("Unable to initialize backend 'tpu'")
    return not (is_about_tpu and "cannot open shared object file" in message)


# Orbax's files that log the errors they raise.
_RAISING = ("async_checkpointer.py", "checkpoint_manager.py", "future.py", "metadata/checkpoint.py")


def quiet_orbax() -> None:
    """Hides the tracebacks that Orbax, TensorStore and asyncio print after a failed save or read.

    They are long, and some come at interpreter exit. ``Checkpoints`` and ``load`` raise the error
    itself. Other error messages of Orbax are still logged.
    """
    absl.logging.get_absl_handler().addFilter(_keep_orbax_record)
    # After a failed write, the writes that have not begun cause this warning.
    warnings.filterwarnings("ignore", r"coroutine '.*write_fragment' was never awaited")
    hook = sys.unraisablehook

    def pass_on(unraisable: sys.UnraisableHookArgs) -> None:
        # Reads and writes go on after the first failure, which has closed asyncio's event loop.
        abandoned = "Event loop is closed|Encountered error while reading array index"
        if not re.match(abandoned, str(unraisable.exc_value)):
            hook(unraisable)

    sys.unraisablehook = pass_on


def _keep_orbax_record(record: logging.LogRecord) -> bool:
    """Returns False for a message about an error that is also raised."""
    if record.name == "asyncio":
        return "exception was never retrieved" not in record.getMessage()
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.ERROR and not record.pathname.endswith(_RAISING)
