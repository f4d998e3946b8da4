"""Observers of an adapter: what ``calibrate``, ``distillation_loss`` and ``attention_report`` set.

An observer sees every call of its adapter and keeps what it finds as a variable, which ``nnx.jit``
and ``nnx.scan`` carry.
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
    """A variable that adds to its value what it finds in a call."""

    def observe(self, request: Request, mechanism: RandomFeatureMechanism) -> None:
        """Adds what it finds in a call."""
        set_value(self, self.after(get_value(self), request, mechanism))

    @abc.abstractmethod
    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Returns the value after a call."""


class CalibrationMoments(Observer):
    """Moments of the queries and keys of an adapter, while ``calibrate`` sums them."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Returns the moments with those of a call."""
        del mechanism
        return flax_calibration.add_moments(value, request)


class DistillationLoss(Observer):
    """The loss of an adapter's learned features, while ``distillation_loss`` calls the model."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Returns the loss with that of a call."""
        if not isinstance(mechanism.feature_map, Learned):
            return value
        return value + flax_distillation.loss_of_call(request, mechanism)


class AttentionCalls(Observer):
    """The calls that an adapter gets while ``attention_report`` calls the model."""

    def after(self, value: Any, request: Request, mechanism: RandomFeatureMechanism) -> Any:
        """Returns the calls and this one."""
        return (*value, SeenCall.of(request, mechanism))


@contextlib.contextmanager
def observing(adapters: Mapping[Path, Any], observers: Mapping[Path, Observer]) -> Iterator[None]:
    """Lets each adapter be observed inside the context, and not after it."""
    try:
        for path, adapter in adapters.items():
            adapter.observer = observers[path]
        yield
    finally:
        for adapter in adapters.values():
            adapter.observer = nnx.data(None)
