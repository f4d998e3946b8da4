"""Calibration of all adapters of a Linen model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core.meta import AxisMetadata
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict

from simrf_jax._src.calibration.api import check_options
from simrf_jax._src.calibration.fit import Balance, Tilt
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.linen.adapter import apply, not_of_init


def calibrate(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    call: Callable[..., Any] = apply,
    center: bool = True,
    balance: Balance = True,
    tilt: Tilt | None = "log",
) -> dict[str, Any]:
    """Calibrates all adapters of a model, in one pass over some batches.

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

    At level INFO, the logger ``simrf_jax`` gets the number of batches every ten seconds, and how
    well each adapter is fitted: for each key head, the mean over queries and keys of the log second
    moment of estimates from one row of W relative to the kernel, in nats, before and after.
    Estimates from m iid rows have a relative variance of about its exponential over m. For a
    progress bar, pass ``tqdm.tqdm(batches)``.

    Args:
      model: A model that holds adapters. ``nn.scan`` over layers and ``nn.vmap`` need
        ``"calibration": 0`` and ``"calibration_moments": 0`` in their ``variable_axes``.
      variables: Variables of the model, with the collection ``calibration``, which ``init``
        creates.
      batches: Batches of the model's inputs, for example some of the training data. A warning says
        if they have fewer tokens than a head has dimensions.
      call: ``call(model, variables, batch, mutable=[...])`` returns the output and the changed
        collections, by default ``model.apply``. It is compiled by ``jax.jit``, once for each
        function.
      center: True to subtract the means; see ``simrf_jax.calibrate``.
      balance: True, ``"diagonal"`` or False; see ``simrf_jax.calibrate``.
      tilt: ``"log"``, ``"mean"``, ``"isotropic"`` or None; see ``simrf_jax.calibrate``.

    Returns:
      The variables with a new collection ``calibration``, and with turned W or learned rows. The
      calibration gets no gradient unless ``jax.grad`` differentiates with respect to it, and
      redraws do not change it.

    Raises:
      TypeError: If center is neither True nor False, or batches is one array.
      ValueError: If an option is unknown, no adapter has a map to calibrate, an adapter decodes or
        saw no tokens, queries or keys are not finite, or a mask cannot be honored.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import RandomFeatureAttention, calibrate
      >>> adapter = RandomFeatureAttention(130, feature_map="calibrated")
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=adapter)
      >>> x = jax.random.normal(jax.random.key(0), (2, 100, 512))
      >>> variables = attention.init(jax.random.key(1), x)
      >>> variables = calibrate(attention, variables, [x, 2 * x])
      >>> attention.apply(variables, x).shape
      (2, 100, 512)
    """
    check_options(center=center, balance=balance, tilt=tilt)
    flax_calibration.check_batches(batches)
    if not variables.get("calibration"):
        raise ValueError(
            "The variables have no collection calibration: make the model's "
            'RandomFeatureAttention(...) with feature_map="calibrated" or "learned", and call init.'
        )

    boxes = jax.tree.leaves(
        variables.get("random_features", {}), is_leaf=lambda node: hasattr(node, "draw_options")
    )
    for box in boxes:
        flax_calibration.check_tilt(tilt, getattr(box, "draw_options", None))

    flat = flatten_dict(variables["calibration"], keep_empty_nodes=True)
    for place, one in flat.items():
        if not isinstance(one, Calibrated) and one is not empty_node:
            raise not_of_init("calibration", *place[:-1])
    adapters = {place[:-1]: one for place, one in flat.items() if isinstance(one, Calibrated)}
    sums = unflatten_dict(
        {(*path, "moments"): flax_calibration.no_moments(one) for path, one in adapters.items()}
    )
    add = _compiled(model, call)
    for batch in flax_calibration.logged(batches):
        sums = add(variables, sums, batch)

    moments = flatten_dict(sums)
    maps = flax_calibration.fit_adapters(
        {path: (before, moments[*path, "moments"]) for path, before in adapters.items()},
        center=center,
        balance=balance,
        tilt=tilt,
    )
    flat |= {(*path, "feature_map"): one for path, one in maps.items()}
    fitted = {**variables, "calibration": unflatten_dict(flat)}
    for collection, name in ROWS:
        entries = flatten_dict(fitted.get(collection, {}), keep_empty_nodes=True)
        turned = {
            (*path, name): _turned(entries[*path, name], before, maps[path])
            for path, before in adapters.items()
            if (*path, name) in entries
        }
        if turned:
            fitted[collection] = unflatten_dict(entries | turned)
    return fitted


# Collection and name of each array of rows that is turned with the axes of a calibration.
ROWS = (
    ("random_features", "projection"),
    ("params", "query_rows"),
    ("params", "key_rows"),
)


def _turned(rows: Any, before: Calibrated, after: Calibrated) -> Any:
    """Returns rows turned with the axes, in their original box."""
    if isinstance(rows, AxisMetadata):
        return rows.replace_boxed(_turned(rows.unbox(), before, after))
    return flax_calibration.turn_projection(rows, before, after)


def _compiled(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of variables, sums and a batch, compiled once for equal models."""
    try:
        hash(model)
    except TypeError:  # It has a list, as nn.Sequential([...]) does, so jit cannot recognize it.
        return jax.jit(functools.partial(_add, model, call))
    return functools.partial(_add_compiled, model, call)


def _add(model: nn.Module, call: Callable[..., Any], variables: Any, sums: Any, batch: Any) -> Any:
    """Adds the moments of a batch."""
    given = {**variables, "calibration_moments": sums}
    _, updates = call(model, given, batch, mutable=["calibration_moments"])
    return updates["calibration_moments"]


_add_compiled = jax.jit(_add, static_argnums=(0, 1))
