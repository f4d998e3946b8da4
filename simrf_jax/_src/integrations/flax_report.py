"""Reports of the attention of a whole model, for both Flax APIs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.attention.inspection.report import report_of
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_attention import Request


class LayerReport(NamedTuple):
    """The attention of one layer; ``attention_report`` of both APIs documents the fields."""

    relative_error: np.ndarray
    output_error: np.ndarray
    row_sum_mean: np.ndarray
    effective_rank: np.ndarray
    softmax_effective_rank: np.ndarray
    mean_squared_distance: np.ndarray
    features_needed: np.ndarray
    num_features: int


_COLUMNS = {
    "relative_error": "error",
    "output_error": "of output",
    "effective_rank": "rank",
    "softmax_effective_rank": "softmax",
    "mean_squared_distance": "|x+y|^2",
    "features_needed": "needed",
}


class ModelReport(dict[str, LayerReport]):
    """The reports of all layers of a model, by the path of the adapter; prints as a table."""

    def __str__(self) -> str:
        width = max(map(len, ("layer", *self)))
        head = "".join(f"{name:>11}" for name in _COLUMNS.values())
        lines = [f"{'layer':<{width}}{'head':>6}{head}{'features':>11}"]
        for name, layer in self.items():
            for n in range(layer.relative_error.size):
                numbers = "".join(f"{getattr(layer, field)[n]:>11.3g}" for field in _COLUMNS)
                lines.append(f"{name:<{width}}{n:>6}{numbers}{layer.num_features:>11}")
        return "\n".join(lines)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeenCall:
    """A recorded call of an adapter, which lifted transformations may stack.

    Attributes:
      mechanism: The attention, with its arrays.
      request: The call.
      is_valid: False if the call had a traced mask that would raise an error if it were known.
      batch_ndim: Number of axes of the batch of one call; a stack of layers has more.
    """

    mechanism: RandomFeatureMechanism
    request: Request
    is_valid: jax.Array
    batch_ndim: int = dataclasses.field(metadata={"static": True})

    def layers(self) -> Iterator[tuple[str, SeenCall]]:
        """Yields the calls of a stack of layers one by one, with the suffixes of their names."""
        query = self.request.call.query
        lead = query.shape[: query.ndim - 3 - self.batch_ndim]
        for place in np.ndindex(lead):
            name = "".join(f"[{index}]" for index in place)
            yield name, jax.tree.map(lambda leaf, at=place: leaf[at] if at else leaf, self)


def add_call(
    calls: tuple[SeenCall, ...], request: Request, mechanism: RandomFeatureMechanism
) -> tuple[SeenCall, ...]:
    """Appends the parts of a call that a report needs, without gradients."""
    is_valid, call, ndim = request.is_valid(), request.call, request.call.query.ndim - 3
    if request.real is not None:
        # Hidden queries are NaN, which only attention handles.
        call = dataclasses.replace(call, query=jnp.where(request.real, call.query, 0))
    request = jax.tree.map(jnp.asarray, Request(call, request.real, ()))
    return *calls, jax.lax.stop_gradient(SeenCall(mechanism, request, is_valid, ndim))


def report_of_calls(
    calls: Sequence[tuple[str, Sequence[SeenCall]]], relative_error: float
) -> ModelReport:
    """Returns the reports of all layers of a model.

    Args:
      calls: Names of the adapters, and the calls that each has seen.
      relative_error: Relative squared error of the kernel, for the number of features needed.

    Raises:
      ValueError: If an adapter has seen no call or a mask that it cannot honor, or relative_error
        is not positive.
    """
    reports = ModelReport()
    for name, seen in calls:
        check_seen(name, seen)
        for number, one in enumerate(seen):
            which = f" (call {number})" if len(seen) > 1 else ""
            for place, layer in one.layers():
                reports[f"{name}{place}{which}"] = _report(layer, relative_error)
    return reports


def check_seen(name: str, seen: Sequence[SeenCall]) -> None:
    """Raises ``ValueError`` if an adapter has seen no call, or a mask that it cannot honor."""
    if not seen:
        raise ValueError(
            f"The adapter {name!r} saw no call: call the whole model. A lifted transformation "
            "around it must pass the calls on: nn.scan and nn.vmap by attention_calls in their "
            "variable_axes, nnx.scan and nnx.vmap by an axis of the layers that is not None."
        )
    if not all(bool(jnp.all(one.is_valid)) for one in seen):
        raise ValueError(f"The mask of the adapter {name!r} cannot be honored: its output is NaN.")


def _report(seen: SeenCall, relative_error: float) -> LayerReport:
    """Returns the report of one layer."""
    mechanism, request = seen.mechanism, seen.request
    counts, _ = flax_calibration.real_tokens(request)
    real = counts[..., None, :]
    if request.real is not None:
        real &= jnp.swapaxes(request.real[..., 0], -1, -2)
    report = report_of(mechanism, request.call, real=real)
    counts = report.softmax_effective_rank != 0  # False where no query of a sequence sees a key.
    queries, keys = _moments(request)
    return LayerReport(
        relative_error=_mean(report.relative_error, counts),
        output_error=_mean(cast(np.ndarray, report.output_error), counts),
        row_sum_mean=_mean(report.row_sum_mean, counts),
        effective_rank=_mean(report.effective_rank, counts),
        softmax_effective_rank=_mean(report.softmax_effective_rank, counts),
        mean_squared_distance=_mean_squared_distance(queries, keys),
        features_needed=_features_needed(queries, keys, relative_error),
        num_features=_num_features(mechanism),
    )


def _mean(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the mean over the batch, ``[N]``, of entries where ``counts`` is True."""
    x, counts = (one.reshape(-1, one.shape[-1]) for one in (x, counts))
    return np.where(counts, x, 0).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)


def _moments(request: Request) -> tuple[Moments, Moments]:
    """Returns the moments of the queries and of the keys of each query head."""
    call = request.call
    heads, dim = call.query.shape[-2:]
    key = jnp.repeat(call.key, heads // call.key.shape[-2], axis=-2)
    empty = Moments.empty(heads, dim, jnp.dtype(jnp.float32))
    each_head = dataclasses.replace(call, key=key, query=call.query.astype(jnp.float32))
    return flax_calibration.add_moments((empty, empty), request._replace(call=each_head))


def _mean_squared_distance(queries: Moments, keys: Moments) -> np.ndarray:
    """Returns the mean of |x + y|^2 for each head."""
    spread = sum(np.trace(_covariance(x), axis1=-2, axis2=-1) for x in (queries, keys))
    mean = np.asarray(queries.mean, np.float64) + np.asarray(keys.mean, np.float64)
    return spread + np.sum(mean**2, axis=-1)


def _covariance(x: Moments) -> np.ndarray:
    count = np.maximum(np.asarray(x.num_vectors, np.float64), 1)
    return np.asarray(x.scatter, np.float64) / count[:, None, None]


def _features_needed(queries: Moments, keys: Moments, relative_error: float) -> np.ndarray:
    # Imported here because theory imports SciPy.
    from simrf_jax._src.selection.choice import required_features

    covariances = _covariance(queries), _covariance(keys)
    return np.asarray(required_features(*covariances, relative_error=relative_error))


def _num_features(mechanism: RandomFeatureMechanism) -> int:
    """Returns the number of rows of W, or of learned rows."""
    w: Any = mechanism.projection
    rows = getattr(mechanism.feature_map, "query_rows", None) if w is None else w
    return 0 if rows is None else rows.shape[-2]
