"""Observers of an adapter, set by ``calibrate``, ``distillation_loss`` and ``attention_report``.

An observer sees every call of its adapter and keeps its result in a variable, which ``nnx.jit`` and
``nnx.scan`` carry.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from flax import nnx

from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import flax_calibration, flax_distillation
from simrf_jax._src.integrations.flax_attention import Request
from simrf_jax._src.integrations.flax_report import SeenCall
from simrf_jax._src.integrations.flax_versions import get_value, set_value

Path = TypeVar("Path")


class Observer(nnx.Variable):
    """A variable that updates its value with each call."""

    def observe(self, request: Request, mechanism: RandomFeatureMechanism) -> None:
        """Updates the value with a call."""
        set_value(self, self.after(get_value(self), request, mechanism))

    @abc.abstractmethod
    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Returns the value after a call."""


class CalibrationMoments(Observer):
    """Moments of the queries and keys of an adapter, during ``calibrate``."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Adds the moments of a call."""
        del mechanism
        return flax_calibration.add_moments(value, request)


class DistillationLoss(Observer):
    """The loss of an adapter's learned features, during ``distillation_loss``."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Adds the loss of a call."""
        if not isinstance(mechanism.feature_map, Learned):
            return value
        return value + flax_distillation.loss_of_call(request, mechanism)


class AttentionCalls(Observer):
    """The calls of an adapter during ``attention_report``."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Appends a call."""
        return (*value, SeenCall.of(request, mechanism))


@contextlib.contextmanager
def observing(adapters: Mapping[Path, Any], observers: Mapping[Path, Observer]) -> Iterator[None]:
    """Observes each adapter inside the context, and removes the observers afterwards."""
    try:
        for path, adapter in adapters.items():
            adapter.observer = observers[path]
        yield
    finally:
        for adapter in adapters.values():
            adapter.observer = nnx.data(None)
