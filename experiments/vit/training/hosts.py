"""Agreement between the processes of one run, on one host or on many."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness import config_fields
from experiments.harness.mistakes import UserError


def everywhere(here: bool) -> bool:
    """Returns whether ``here`` is true in all processes; each process must call this."""
    return bool(multihost_utils.process_allgather(np.array(here)).all())


def on_first(call: Callable[[], None]) -> None:
    """Calls a function in the first process; if it raises there, all processes end.

    Raises:
      UserError: In the other processes, if the first one raises.
    """
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - It is raised again once all processes know.
            failure = error
    went_well = everywhere(failure is None)
    if failure is not None:
        raise failure
    if not went_well:
        raise UserError("The first process cannot train; its output says why.")


def check_same(what: str, ours: Mapping[str, Any]) -> None:
    """Refuses values that differ between processes, which would train on different things.

    Args:
      what: Names the values in the message.
      ours: The values of this process; they can be written as JSON.

    Raises:
      UserError: In all processes; that of a process whose values are not those of the first one
        names the differences.
    """
    theirs = json.loads(_from_first(json.dumps(ours)))
    differ = config_fields.differences(theirs, json.loads(json.dumps(ours)))
    if everywhere(not differ):
        return
    if differ:
        raise UserError(
            f"All processes must have one {what}, got in the first process (there) and in process "
            f"{jax.process_index()} (here): {'; '.join(differ)}."
        )
    raise UserError(f"All processes must have one {what}; the output of another says what differs.")


def _from_first(text: str) -> str:
    """Returns the text of the first process."""
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    content = content if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(content))).decode()
