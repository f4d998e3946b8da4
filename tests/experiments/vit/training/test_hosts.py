"""Tests of agreement between the processes of a run; test_processes.py has several processes."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from experiments.harness.mistakes import UserError
from experiments.vit.training import hosts

pytestmark = pytest.mark.fast


def test_a_process_alone_agrees_with_itself():
    calls = []
    hosts.on_first(lambda: calls.append(1))
    hosts.check_same("config", {"seed": 0, "mesh": (1, 2)})
    assert calls == [1]
    assert hosts.everywhere(True)
    assert not hosts.everywhere(False)


def test_a_failure_on_the_first_is_raised_as_it_is():
    def fail():
        raise ValueError("A mistake of ours.")

    with pytest.raises(ValueError, match="of ours"):
        hosts.on_first(fail)


@pytest.fixture
def second(monkeypatch):
    """Makes this the second of two processes; the first one sends the returned record."""
    said = {}

    def broadcast(x):
        text = np.frombuffer(said["text"].encode(), np.uint8)
        return np.int32(text.size) if np.ndim(x) == 0 else text

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.stack([said["well"], x]))
    return said


def test_the_others_do_not_call_and_end_with_the_first(second):
    second["well"] = True
    hosts.on_first(pytest.fail)
    second["well"] = False
    with pytest.raises(UserError, match="first process cannot train; its output says why"):
        hosts.on_first(pytest.fail)


def test_values_that_differ_are_named_where_they_do(second):
    second |= {"well": True, "text": '{"seed": 0, "width": 8}'}
    match = r"must have one config, got in the first process \(there\) and in process 1 \(here\): "
    with pytest.raises(UserError, match=f"{match}seed is 0 there, 1 here"):
        hosts.check_same("config", {"seed": 1, "width": 8})
    hosts.check_same("config", {"seed": 0, "width": 8})
    second["well"] = False
    with pytest.raises(UserError, match="one config; the output of another says what differs"):
        hosts.check_same("config", {"seed": 0, "width": 8})
