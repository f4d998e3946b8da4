"""The base class of the Linen adapters: it reads Flax's calls and keeps the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from simrf_jax._src.attention import Mechanism
from simrf_jax._src.integrations import (
    flax_attention,
    flax_calibration,
    flax_drawing,
    flax_repr,
)
from simrf_jax._src.integrations.flax_attention import AttentionFn, Request


class Adapter(AttentionFn, nn.Module):
    """An attention mechanism with its cache, which Flax calls as an ``attention_fn``.

    Subclasses have the fields of ``AttentionFn`` and ``Drawing``, and ``feature_map`` or
    ``feature_maps``.
    """

    def __repr__(self) -> str:
        declared = [one for one in dataclasses.fields(self) if one.name not in ("parent", "name")]
        fields = {one.name: getattr(self, one.name) for one in declared}
        maps = "feature_maps" if "feature_maps" in fields else "feature_map"
        if fields["coupling"] is None:
            of_maps = fields[maps] if maps == "feature_maps" else (fields[maps],)
            fields["coupling"] = flax_repr.default_coupling(of_maps)
        fields[maps] = flax_repr.name_of_map(fields[maps])
        defaults = {one.name: one.default for one in declared if one.name != maps}
        shown = flax_repr.shown_fields(fields, defaults)
        return f"{type(self).__name__}({', '.join(f'{name}={x}' for name, x in shown.items())})"

    # Linen wraps only functions that are attributes of the class itself.
    __call__ = nn.compact(AttentionFn.__call__)

    def _step(self, mechanism: Mechanism, request: Request) -> jax.Array:
        """Attends to the tokens in the cache and those of a call, and updates the cache."""
        if self.is_initializing():
            # As in Flax's own attention, the tokens of the call that makes the cache do not count.
            empty = mechanism.init_for(request.call)
            self.variable("cache", "state", lambda: empty)
            return flax_attention.step(mechanism, empty, request)[0]
        if not self.has_variable("cache", "state"):
            raise ValueError(
                "decode=True needs a cache: make an empty one, "
                'cache = jax.jit(model.init)(jax.random.key(0), tokens)["cache"], and call '
                'model.apply({**variables, "cache": cache}, tokens, mutable=["cache"]). Where the '
                "layer is in a lifted transformation, it must handle the collection too, as "
                'nn.scan does with variable_axes={"cache": 0}.'
            )
        if not self.is_mutable_collection("cache"):
            raise ValueError(
                'decode=True adds the tokens to the cache: pass mutable=["cache"] to apply, and '
                "the cache that it returns to the next call."
            )
        cache: nn.Variable[Any] = self.variable("cache", "state")
        out, cache.value = flax_attention.step(mechanism, cache.value, request)
        return out

    def _drawing(self) -> flax_drawing.Drawing:
        """Returns the fields that determine the draw of W."""
        return flax_drawing.Drawing(
            self.coupling, self.block, self.rotation, self.norms, self.num_weights
        )

    def _drawn(self, name: str, draw: Callable[[], Any]) -> Any:
        """Returns an entry of the collection ``random_features``, drawn when it is created."""
        collection = "random_features"
        if not self.has_variable(collection, name) and not self.is_mutable_collection(collection):
            raise self._lacks(collection, "W")
        value = self.variable(collection, name, draw).value
        if isinstance(value, Mapping):
            raise not_of_init(collection, *self.path, name)
        return value

    def _lacks(self, collection: str, content: str) -> ValueError:
        """Returns the error for variables without a collection."""
        return ValueError(
            f"{'/'.join(self.path) or type(self).__name__}: the variables lack the collection "
            f"{collection}, which holds {content}. A trainer that keeps only init(...)['params'] "
            "loses it: keep the collection next to the parameters, and call model.apply("
            f'{{"params": params, "{collection}": {collection}}}, ...). Where the layer is in a '
            "lifted transformation, it must handle the collection too, as nn.scan does with "
            f'variable_axes={{"params": 0, "{collection}": 0}}.'
        )

    def _key(self) -> jax.Array:
        """Returns a typed key for the draw of W."""
        key = self.make_rng("features")
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return key
        return jax.random.wrap_key_data(key)  # From a jax.random.PRNGKey.


def not_of_init(*place: str) -> ValueError:
    """Returns the error for the entry of a collection that was restored as a dictionary."""
    return ValueError(
        f"{'/'.join(place)} must be the entry that init makes, got a dictionary: restore "
        "checkpoints into the variables of model.init, or into jax.eval_shape(model.init, ...)."
    )


def apply(model: nn.Module, variables: Mapping[str, Any], batch: Any, **options: Any) -> Any:
    """Returns ``model.apply`` of the variables and a batch."""
    call = "model, variables, batch, **options: model.apply(variables, {}, **options)"
    with flax_calibration.explaining(batch, call):
        return model.apply(variables, batch, **options)
