"""Calibration of all adapters of an NNX model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from simrf_jax._src.calibration.api import check_options
from simrf_jax._src.calibration.fit import Balance, Tilt
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_versions import get_value, set_value
from simrf_jax._src.integrations.nnx.adapter import in_state
from simrf_jax._src.integrations.nnx.observers import find_adapters, observing
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.variables import Observer


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
    center: bool = True,
    balance: Balance = True,
    tilt: Tilt | None = "log",
) -> None:
    """Calibrates all adapters of a model in place, in one pass over some batches.

    The adapters are those created with ``feature_map="calibrated"`` or ``"learned"``. Each
    accumulates the means and covariances of its queries and keys, in memory that does not depend on
    the number of batches, and then fits its feature map as ``simrf_jax.calibrate`` does. During the
    pass, the adapters compute with their current maps, from the previous calibration or plain
    positive features.

    W is turned with the axes of the fit, so that features change no more than the data did. Rows of
    learned features are turned in the same way; their other parameters do not change. Neither does
    a W that all heads share, nor that of a fast projection.

    Padding does not count: keys that a mask, lengths or a bias of 10,000 or more below the largest
    hides in all heads, and queries beyond their lengths or that a factored mask hides. A call with
    as many queries as keys and no information about its queries is taken for self-attention: then
    queries at hidden keys do not count either. In cross-attention, give lengths or a factored mask.

    The result is in ``FeatureMapState`` variables, which are part of the state and of checkpoints,
    but are not parameters. Redraws do not change the calibration.

    At level INFO, the logger ``simrf_jax`` gets the number of batches every ten seconds, and how
    well each adapter is fitted: for each key head, the mean over queries and keys of the log second
    moment of estimates from one row of W relative to the kernel, in nats, before and after.
    Estimates from m iid rows have a relative variance of about its exponential over m. For a
    progress bar, pass ``tqdm.tqdm(batches)``.

    Args:
      model: A model that holds adapters. Its mode is not changed: call ``model.eval()`` first if it
        has dropout.
      batches: Batches of the model's inputs, for example some of the training data. A warning says
        if they have fewer tokens than a head has dimensions.
      call: Function ``call(model, batch)`` that calls the model, by default ``model(batch)``. It is
        compiled by ``nnx.jit``, once for each function.
      center: True to subtract the means; see ``simrf_jax.calibrate``.
      balance: True, ``"diagonal"`` or False; see ``simrf_jax.calibrate``.
      tilt: ``"log"``, ``"mean"``, ``"isotropic"`` or None; see ``simrf_jax.calibrate``.

    Raises:
      TypeError: If center is neither True nor False, or batches is one array.
      ValueError: If an option is unknown, no adapter has a map to calibrate, an adapter decodes or
        saw no tokens, queries or keys are not finite, or a mask cannot be honored.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention, calibrate
      >>> rngs = nnx.Rngs(0)
      >>> adapter = RandomFeatureAttention(8, 64, 130, feature_map="calibrated", rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=adapter, rngs=rngs)
      >>> calibrate(attention, [jax.random.normal(rngs(), (2, 100, 512)) for _ in range(3)])
      >>> attention(jnp.ones((2, 10, 512))).shape
      (2, 10, 512)
    """
    check_options(center=center, balance=balance, tilt=tilt)
    flax_calibration.check_batches(batches)
    adapters = find_adapters(
        model,
        "calibrate",
        having=lambda adapter: isinstance(in_state(adapter.feature_map), Calibrated),
        missing="The model has no adapter to calibrate: make its RandomFeatureAttention(...) with "
        'feature_map="calibrated" or "learned".',
    )
    for adapter in adapters.values():
        flax_calibration.check_tilt(tilt, getattr(adapter.projection, "draw_options", None))
    before = {path: get_value(adapter.feature_map) for path, adapter in adapters.items()}
    sums = {
        path: Observer(flax_calibration.no_moments(own), after=flax_calibration.add_moments)
        for path, own in before.items()
    }
    with observing(adapters, sums):
        compiled = compiled_call(call)
        for batch in flax_calibration.logged(batches):
            compiled(model, batch)
    fitted = flax_calibration.fit_adapters(
        {path: (before[path], get_value(own)) for path, own in sums.items()},
        center=center,
        balance=balance,
        tilt=tilt,
    )
    new: list[tuple[Any, Any]] = [
        (adapter.feature_map, fitted[path]) for path, adapter in adapters.items()
    ]
    for path, adapter in adapters.items():
        for rows in _rows(adapter):
            w = get_value(rows)
            new.append((rows, flax_calibration.turn_projection(w, before[path], fitted[path])))
    for variable, value in new:  # An error leaves all of them as they were.
        set_value(variable, value)


def _rows(adapter: RandomFeatureAttention) -> list[nnx.Variable]:
    """Returns the variables that hold W, or the rows of learned features."""
    if adapter.learned is not None:
        return [adapter.learned.query_rows, adapter.learned.key_rows]
    return [] if adapter.projection is None else [adapter.projection]


def compiled_call(call: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    """Returns ``call``, or the call of a model with a batch, compiled by ``nnx.jit``."""
    return _compiled(call or call_model)


def call_model(model: Any, batch: Any) -> Any:
    """Returns ``model(batch)``."""
    with flax_calibration.explaining(batch, "model, batch: model({})"):
        return model(batch)


@functools.lru_cache(maxsize=8)
def _compiled(call: Callable[[Any, Any], Any]) -> Any:
    """Returns a function compiled by ``nnx.jit``, cached so that it is compiled only once."""
    return nnx.jit(call)
