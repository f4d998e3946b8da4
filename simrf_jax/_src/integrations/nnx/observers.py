"""The adapters of an NNX model, and observers of their calls.

An observer is a variable, which ``nnx.jit`` and ``nnx.scan`` carry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from flax import nnx

from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.variables import Observer

Path: TypeAlias = tuple[Any, ...]  # Names of modules, from the model to the adapter.
Key = TypeVar("Key")


def find_adapters(
    model: nnx.Module,
    verb: str,
    *,
    having: Callable[[RandomFeatureAttention], bool],
    missing: str,
) -> dict[Path, RandomFeatureAttention]:
    """Returns some adapters of a model, by their paths.

    Args:
      model: The model.
      verb: Verb for the purpose, such as "calibrate".
      having: True for the adapters to return.
      missing: Sentence about a model without any.

    Raises:
      ValueError: If there is none, or one decodes.
    """
    adapters = {
        path: node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, RandomFeatureAttention) and having(node)
    }
    if not adapters:
        raise ValueError(missing)
    if any(adapter.decode for adapter in adapters.values()):
        raise ValueError(f"An adapter has decode=True: {verb} the model without it.")
    return adapters


@contextlib.contextmanager
def observing(
    adapters: Mapping[Key, RandomFeatureAttention], observers: Mapping[Key, Observer]
) -> Iterator[None]:
    """Observes each adapter inside the context, and removes the observers afterwards."""
    try:
        for path, adapter in adapters.items():
            adapter.observer = observers[path]
        yield
    finally:
        for adapter in adapters.values():
            adapter.observer = nnx.data(None)
