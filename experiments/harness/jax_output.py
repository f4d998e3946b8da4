"""Keeps off a program's standard error what JAX says of accelerators that a machine has not."""

from __future__ import annotations

import logging


def quiet() -> None:
    """Keeps JAX from opening every program without a TPU by saying that it has found none.

    absl's programs log such messages. JAX still says if it finds a TPU that it cannot use.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for the message that the TPU's library is not installed."""
    message = record.getMessage()
    is_about_tpu = message.startswith("Unable to initialize backend 'tpu'")
    return not (is_about_tpu and "cannot open shared object file" in message)
