"""Calibration for both Flax APIs: the moments of adapters, and the fit of their maps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax._src import checks
from simrf_jax._src.attention.inputs.call import Call, shape_of_logits
from simrf_jax._src.attention.inputs.masks import per_key, within_lengths
from simrf_jax._src.calibration.api import check_fitted, moments
from simrf_jax._src.calibration.fit import Balance, Tilt, fit, mean_log_second_moment, turn_rows
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.feature_map import FEATURE_MAPS, OF_ADAPTERS
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations.flax_attention import Request
from simrf_jax._src.projections import DrawOptions, Projection, ProjectionLike

LOGGER = logging.getLogger("simrf_jax")
SECONDS_BETWEEN_LOGS = 10.0
HIDING_BIAS = -1e4  # Or less, relative to the largest, as padding has in additive masks.
Batch = TypeVar("Batch")
Path: TypeAlias = tuple[Any, ...]  # Names of modules, from the model to the adapter.


def adapter_map(
    feature_map: FeatureMapLike, num_key_heads: int, head_dim: int, num_features: int | None
) -> FeatureMapLike:
    """Returns the feature map of an adapter, with arrays for ``"calibrated"`` and ``"learned"``.

    The arrays are those before any calibration. The rows of learned features are zeros until W is
    drawn.

    Raises:
      ValueError: If a name is unknown, ``"learned"`` has no number of features, or a ``Learned``
        map has one.
    """
    if isinstance(feature_map, str):
        checks.one_of("feature_map", feature_map, (*FEATURE_MAPS, *OF_ADAPTERS))
    if isinstance(feature_map, Learned) and num_features is not None:
        raise ValueError(
            f"A Learned map has its own rows: num_features must be None, got {num_features}."
        )
    if feature_map not in ("calibrated", "learned"):
        return feature_map
    identity = Calibrated.identity(num_key_heads, head_dim)
    if feature_map == "calibrated":
        return identity
    if num_features is None:
        raise ValueError("feature_map='learned' needs num_features, the number of pairs, got None.")
    num_features = checks.positive_int("num_features", num_features)
    return Learned.start(jnp.zeros((num_features, head_dim)), identity)


def check_batches(batches: Any, name: str = "batches") -> None:
    """Raises ``TypeError`` for one batch in place of several."""
    if hasattr(batches, "shape") or isinstance(batches, Mapping | str):
        shape = f" of shape {batches.shape}" if hasattr(batches, "shape") else ""
        raise TypeError(
            f"{name} must be an iterable of batches, such as [batch], got one "
            f"{type(batches).__name__}{shape}."
        )


def no_moments(calibrated: Calibrated) -> tuple[Moments, Moments]:
    """Returns empty moments, for the heads of a map or of a stack of maps."""
    *lead, num_heads, dim = calibrated.query_mean.shape
    empty = Moments.empty(num_heads, dim, calibrated.query_mean.dtype)
    stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), empty)
    return stack, stack


def add_moments(
    sums: tuple[Moments, Moments], request: Request, mechanism: object = None
) -> tuple[Moments, Moments]:
    """Adds the queries and keys of a call, scaled as in attention, to the moments.

    Padding does not count: keys that no head sees, queries beyond their lengths and queries that a
    factored mask hides. A call without information about queries, and with equal numbers of queries
    and keys, is treated as self-attention: then queries at hidden keys do not count either.
    """
    del mechanism  # Other observers read it.
    query, key = jax.lax.stop_gradient((request.call.query, request.call.key))
    queries, keys = moments(query, key, request.call.logit_scale, *real_tokens(request))
    sums = sums[0].merge(queries), sums[1].merge(keys)
    # Where a mask cannot be honored, attention returns NaN, and its moments are NaN too.
    return jax.tree.map(lambda x: jnp.where(request.is_valid(), x, jnp.nan), sums)


def real_tokens(request: Request) -> tuple[jax.Array, jax.Array]:
    """Returns ``[..., T]`` and ``[..., S]``, False at queries and keys that are padding."""
    call = request.call
    batch, length = call.query.shape[:-3], call.query.shape[-3]
    key_length = call.key.shape[-3]
    keys = jnp.ones((*batch, key_length), bool)
    if call.mask is not None:
        keys &= _seen_by_some_head(jnp.asarray(call.mask), call)
    if call.key_value_seq_lengths is not None:
        lengths = jnp.asarray(call.key_value_seq_lengths)
        keys &= within_lengths("key_value_seq_lengths", lengths, batch, key_length)
    if call.bias is not None:
        bias = jnp.where(keys[..., None, None, :], jnp.asarray(call.bias, jnp.float32), -jnp.inf)
        if call.is_causal:
            largest = jax.lax.cummax(bias, axis=bias.ndim - 1)
        else:
            largest = jnp.max(bias, axis=-1, keepdims=True, initial=-jnp.inf)
        # A key with a NaN in its bias counts, because attention returns NaN for it.
        is_low = (bias <= largest + HIDING_BIAS) | (bias == -jnp.inf)
        keys &= _seen_by_some_head(~is_low, call)
    if request.real is not None:
        queries = jnp.any(request.real[..., 0], axis=-1)
    elif call.query_seq_lengths is not None:
        lengths = jnp.asarray(call.query_seq_lengths)
        queries = within_lengths("query_seq_lengths", lengths, batch, length)
    else:
        queries = keys if length == key_length else jnp.ones((*batch, length), bool)
    return jnp.broadcast_to(queries, (*batch, length)), keys


def _seen_by_some_head(visible: jax.Array, call: Call) -> jax.Array:
    """Returns ``[..., S]``, True at keys that some head sees, for a mask equal for all queries."""
    seen = jnp.any(per_key(visible, shape_of_logits(call.query, call.key)), axis=-2)
    return seen.reshape(seen.shape[max(0, seen.ndim - (call.key.ndim - 2)) :])


def logged(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields the batches, and logs their number every ten seconds.

    Raises:
      ValueError: If there are none.
    """
    last, number = time.monotonic(), 0
    for number, batch in enumerate(batches, 1):
        yield batch
        if time.monotonic() - last >= SECONDS_BETWEEN_LOGS:
            LOGGER.info("calibrate: %d batches", number)
            last = time.monotonic()
    if not number:
        raise ValueError("batches must have a batch, got none. An iterator is empty after one use.")


@contextlib.contextmanager
def explaining(batch: Any, call: str) -> Iterator[None]:
    """Notes in errors of a model that it got all parts of a batch as one argument.

    Args:
      batch: The batch.
      call: A function, with braces in the place of the argument, that could pass them apart.
    """
    try:
        yield
    except Exception as error:
        if isinstance(batch, tuple | list | dict):
            parts = "**batch" if isinstance(batch, dict) else "*batch"
            error.add_note(
                f"The model got a batch, a {type(batch).__name__}, as one argument. To pass its "
                f"parts, use call=lambda {call.format(parts)}."
            )
        raise


def fit_adapters(
    adapters: Mapping[Path, tuple[Calibrated, tuple[Moments, Moments]]],
    *,
    center: bool,
    balance: Balance,
    tilt: Tilt | None,
) -> dict[Path, Calibrated]:
    """Returns the calibration of each adapter, and logs how well it fits.

    Fewer tokens than a head has dimensions make a warning.

    Args:
      adapters: The map so far and the moments of each adapter, by its path in the model.
      center: See ``simrf_jax.calibrate``.
      balance: See ``simrf_jax.calibrate``.
      tilt: See ``simrf_jax.calibrate``.
    """
    fitted = {}
    for path, (before, sums) in adapters.items():
        fitted[path] = fit_stack(sums, center=center, balance=balance, tilt=tilt)
        _log_fit(".".join(map(str, path)), before, fitted[path], sums)
    _warn_of_few_tokens([one for _, sums in adapters.values() for one in sums])
    return fitted


def _warn_of_few_tokens(sums: Iterable[Moments]) -> None:
    """Warns if some head has fewer tokens than dimensions, unless their number is traced."""
    known = [one for one in sums if not isinstance(one.num_vectors, jax.core.Tracer)]
    few = [(float(jnp.min(one.num_vectors)), one.mean.shape[-1]) for one in known]
    if few := [(count, dim) for count, dim in few if count < dim]:
        warnings.warn(
            "The features are fitted to covariances of as few as {:g} tokens, fewer than the {} "
            "dimensions of a head: give more batches.".format(*min(few)),
            stacklevel=3,
        )


def _log_fit(
    name: str, before: Calibrated, after: Calibrated, sums: tuple[Moments, Moments]
) -> None:
    """Logs the mean log second moment of each key head, unless values are traced."""
    if not LOGGER.isEnabledFor(logging.INFO) or checks.is_traced((before, after, sums)):
        return
    lead = before.query_mean.shape[:-2]

    def nats(calibration: Calibrated) -> np.ndarray:
        every = (calibration, *sums)
        heads = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) + 1 :]), every)
        return np.asarray(mean_log_second_moment(*heads)).reshape(*lead, -1)

    of_maps = nats(before), nats(after)
    for layer in np.ndindex(lead):
        numbers = (" ".join(f"{number:.3g}" for number in heads[layer]) for heads in of_maps)
        place = name + "".join(f"[{index}]" for index in layer)
        message = "calibrate: %s: mean log second moment by key head: before %s; after %s"
        LOGGER.info(message, place or "adapter", *numbers)


def fit_stack(
    sums: tuple[Moments, Moments], *, center: bool, balance: Balance, tilt: Tilt | None
) -> Calibrated:
    """Returns the calibration for the moments of an adapter, or of a stack of them.

    Raises:
      ValueError: If the adapter has seen no tokens, or some that were not finite. Traced values are
        not checked.
    """
    _check_sums(*sums)
    lead = sums[0].mean.shape[:-1]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), sums)
    fitted = _fit(*flat, center=center, balance=balance, tilt=tilt)
    check_fitted(fitted)
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), fitted)


_fit = jax.jit(fit, static_argnames=("center", "balance", "tilt"))


def _check_sums(queries: Moments, keys: Moments) -> None:
    """Raises ``ValueError`` for moments that are known to be empty or not finite."""
    if not checks.are_finite((queries, keys)):
        raise ValueError(
            "Queries or keys of the batches are not finite, or the mask of an adapter cannot be "
            "honored, so nothing can be fitted."
        )
    counts = (queries.num_vectors, keys.num_vectors)
    if not checks.is_traced(counts) and not np.all(np.asarray(counts) > 0):
        raise ValueError(
            "An adapter has seen no tokens, so nothing can be fitted: call the whole model. A "
            "lifted transformation around the adapter must pass its moments on: nn.scan and "
            "nn.vmap by calibration_moments in their variable_axes, nnx.scan and nnx.vmap by an "
            "axis of the layers that is not None."
        )


def turn_projection(
    w: ProjectionLike, before: Calibrated | None, after: Calibrated
) -> ProjectionLike:
    """Returns W of an adapter, turned with the axes of its calibration; see ``turn_rows``.

    A W that all heads share stays unchanged, because each head has its own axes. So do the rows of
    fast projections, which are products of signs.
    """
    record = Projection.of(w)
    rows: Any = record.rows
    if not record.is_dense or rows.ndim != after.query_matrix.ndim:
        return w
    turned = turn_rows(jnp.asarray(rows), before, after)
    return dataclasses.replace(record, rows=turned) if record is w else turned


def check_tilt(tilt: Tilt | None, options: DrawOptions | None) -> None:
    """Raises ``ValueError`` if W was drawn with norms that do not allow a tilt."""
    if tilt is not None and options is not None and options.has_fixed_norms:
        raise ValueError(
            f"tilt={tilt!r} needs rows whose norms are chi variables, got an adapter with norms="
            f"{options.norms!r}; use tilt=None, or other norms."
        )
