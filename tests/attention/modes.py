"""Every way to attend, beside what it must give; a new one joins by one line in MODES."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax import (
    ExactKeys,
    Projection,
    banded_attention,
    feature_maps,
    random_feature_attention,
)
from simrf_jax.fmm import fmm_attention
from tests import formulas
from tests.attention import steps
from tests.attention.reference import attention, banded, beside_band, best_keys

# Runs of equal ids, one of a single token and one longer than a chunk; 3 chunks and 2 halvings.
IDS = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 2])
RUNS = np.cumsum(np.diff(IDS, prepend=0) != 0)  # Ids that come again begin another segment.
LENGTH, DIM, BANDWIDTH = len(IDS), 64, 3
SHAPE = {"length": LENGTH, "heads": 4, "key_heads": 2, "dim": DIM, "width": 3}
SCALES = (0.5, 1, 2, 4, 8, 16)
# Of signed maps: there no denominator comes near zero, and the problem is well posed.
SMALL_SCALES = (0.125, 0.25)


def token_by_token(step, state, q, k, v, mask):
    """A prompt of four tokens, and then one by one; ``step(state, q, k, v, mask=)``."""
    prompt = (x[..., :4, :, :] for x in (q, k, v))
    first, state = step(state, *prompt, mask=None if mask is None else mask[..., :4])

    def body(state, token):
        *new, shown = token
        new = (jnp.expand_dims(x, -3) for x in new)
        shown = None if shown is None else shown[..., None]
        out, state = step(state, *new, mask=shown)
        return state, jnp.squeeze(out, -3)

    tokens = [jnp.moveaxis(x[..., 4:, :, :], -3, 0) for x in (q, k, v)]
    tokens.append(None if mask is None else jnp.moveaxis(mask[..., 4:], -1, 0))
    _, rest = jax.lax.scan(body, state, tokens)
    return jnp.concatenate([first, jnp.moveaxis(rest, 0, -3)], axis=-3)


def _sizes(q, k, v):
    return {
        "batch": q.shape[:-3],
        "num_key_heads": k.shape[-2],
        "head_dim": k.shape[-1],
        "value_dim": v.shape[-1],
        "dtype": q.dtype,
    }


def _visible(length, key_length, *, causal=False, packed=False):
    seen = np.tri(length, key_length, dtype=bool) if causal else np.ones((length, key_length), bool)
    if packed:
        seen &= RUNS[:length, None] == RUNS[None, :key_length]
    return seen


class Mode(NamedTuple):
    """``attend(q, k, v, w, mask=)``, and the same for one sequence in float64."""

    attend: Callable
    expected: Callable
    shape: dict
    num_features: int = 66
    scales: tuple = SCALES
    # Softmax saturates sooner: its gradients then vanish, and are what rounding leaves of them.
    gradient_scales: tuple = (0.5, 8, 16)


def _segments(q, packed):
    ids = IDS[: q.shape[-3]]
    return {"segment_ids": np.broadcast_to(ids, (*q.shape[:-3], len(ids)))} if packed else {}


class Library(NamedTuple):
    """The library's arguments for a feature map of ``formulas``."""

    feature_map: object
    projection: Callable = lambda w: w


def weighted(w):
    """Returns W with the log weights that ``formulas.weighted`` gives its rows."""
    return Projection(w, formulas.log_weights(w))


def calibrated(dim=DIM):
    """Returns the map of ``formulas.calibrated``, with arrays for each of two key heads."""
    heads = [feature_maps.Calibrated(**formulas.calibration(dim, head)) for head in range(2)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *heads)


def learned(dim=DIM):
    """Returns the map of ``formulas.learned``, with arrays for each of two key heads."""
    heads = [formulas.learning(dim, head) for head in range(2)]
    parameters = jax.tree.map(lambda *leaves: np.stack(leaves), *heads)
    return feature_maps.Learned(calibrated(dim), **parameters)


# Those whose name is not all that they need.
LIBRARY = {
    "calibrated": Library(calibrated()),
    "elu": Library("elu", lambda w: None),
    "learned": Library(learned(), lambda w: None),
    "optimal_positive": Library(feature_maps.OptimalPositive(-0.1)),
    "weighted": Library("positive", weighted),
    "weighted_hyperbolic": Library("hyperbolic", weighted),
}


def far(name="positive", *, causal=False, packed=False, decode=False, **shape):
    """Random-feature attention, with one feature map."""

    library = LIBRARY.get(name, Library(name))

    def attend(q, k, v, w, mask=None):
        w, feature_map = library.projection(w), library.feature_map
        if decode:
            state = steps.init_state(w, feature_map=feature_map, **_sizes(q, k, v))
            step = functools.partial(steps.step, projection=w, feature_map=feature_map)
            return token_by_token(step, state, q, k, v, mask)
        options = {"is_causal": causal, **_segments(q, packed)}
        if causal or packed:
            options["chunk_size"] = 4
        return random_feature_attention(q, k, v, w, feature_map=feature_map, mask=mask, **options)

    def expected(q, k, v, w, log_weights=None):
        visible = _visible(len(q), len(k), causal=causal or decode, packed=packed)
        return attention(
            q,
            k,
            v,
            None if name == "elu" else w,
            visible=visible,
            log_weights=log_weights,
            formula=getattr(formulas, name),
        )

    signed = name == "trigonometric"
    return Mode(
        attend,
        expected,
        SHAPE | shape,
        num_features=400 if signed else 66,
        scales=SMALL_SCALES if signed else SCALES,
    )


def near(*, causal=False, packed=False, decode=False, **shape):
    """Banded attention, exact."""

    def attend(q, k, v, w, mask=None):
        if decode:
            window = steps.init_window(bandwidth=BANDWIDTH, **_sizes(q, k, v))
            return token_by_token(steps.window_step, window, q, k, v, mask)
        options = {"is_causal": causal, "block_size": 4, **_segments(q, packed)}
        return banded_attention(q, k, v, bandwidth=BANDWIDTH, mask=mask, **options)

    def expected(q, k, v, w, log_weights=None):
        return banded(
            q,
            k,
            v,
            BANDWIDTH,
            is_causal=causal or decode,
            log_weights=log_weights,
            segment_ids=RUNS if packed else None,
        )

    return Mode(attend, expected, SHAPE | shape, gradient_scales=(0.5, 4))


def both(*, causal=False, packed=False, decode=False, **shape):
    """Near and far field blended."""
    options = {"causal": causal, "packed": packed, "decode": decode}
    parts = near(**options), far(**options)
    blend = {"near_weight": 0.7, "far_weights": (0.4,)}

    def attend(q, k, v, w, mask=None):
        if decode:
            state = steps.init_fmm_state((w,), bandwidth=BANDWIDTH, **_sizes(q, k, v))
            step = functools.partial(steps.fmm_step, projections=(w,), **blend)
            return token_by_token(step, state, q, k, v, mask)
        chunks = {"chunk_size": 4} if causal or packed else {}
        return fmm_attention(
            q,
            k,
            v,
            (w,),
            bandwidth=BANDWIDTH,
            mask=mask,
            is_causal=causal,
            **_segments(q, packed),
            **chunks,
            **blend,
        )

    def expected(*arguments, log_weights=None):
        near, far = (part.expected(*arguments, log_weights=log_weights) for part in parts)
        return 0.7 * near + 0.4 * far

    return Mode(attend, expected, SHAPE | shape, gradient_scales=(0.5, 4))


# The third is no position, the fourth one that is given already.
KEYS = (0, 5, LENGTH + 3, 5)
BEST = ExactKeys(2, by="score")


def joint(
    name="positive",
    *,
    causal=False,
    packed=False,
    decode=False,
    bandwidth=BANDWIDTH,
    keys=None,
    **shape,
):
    """An exact band, exact keys or both, and random features for the rest, one normalizer."""
    band = {"exact_bandwidth": bandwidth}
    if keys is not None:
        band["exact_keys"] = keys if keys is BEST else np.array(keys)
    library = LIBRARY.get(name, Library(name))

    def attend(q, k, v, w, mask=None):
        w, feature_map = library.projection(w), library.feature_map
        if decode:
            state = steps.init_state(w, feature_map=feature_map, **band, **_sizes(q, k, v))
            step = functools.partial(steps.step, projection=w, feature_map=feature_map, **band)
            return token_by_token(step, state, q, k, v, mask)
        options = {"is_causal": causal, **_segments(q, packed), **band}
        if causal or packed or bandwidth is not None:
            options["chunk_size"] = 4
        return random_feature_attention(q, k, v, w, feature_map=feature_map, mask=mask, **options)

    def expected(q, k, v, w, log_weights=None):
        visible = _visible(len(q), len(k), causal=causal or decode, packed=packed)
        exact_keys = () if keys is None else keys
        if keys is BEST:
            exact_keys = best_keys(
                k,
                BEST.count,
                visible=visible,
                delay=0 if bandwidth is None else bandwidth + 1,
                log_weights=log_weights,
            )
        return beside_band(
            q,
            k,
            v,
            w,
            -1 if bandwidth is None else bandwidth,
            visible=visible,
            log_weights=log_weights,
            exact_keys=exact_keys,
            formula=getattr(formulas, name),
        )

    signed = name == "trigonometric"
    return Mode(
        attend,
        expected,
        SHAPE | shape,
        num_features=400 if signed else 66,
        scales=SMALL_SCALES if signed else SCALES,
        gradient_scales=(0.5, 4) if keys is None else (0.5, 1),
    )


MODES = {
    "bidirectional": far(),
    "cross": far(key_length=7, batch=(2,)),
    "multi-query": far(key_heads=1, batch=(2, 1)),
    "causal": far(causal=True),
    "causal, cross": far(causal=True, key_length=7, batch=(2, 1)),
    "packed": far(packed=True, batch=(2,)),
    "packed, causal": far(packed=True, causal=True, batch=(2, 1)),
    "decoding": far(decode=True, batch=(2,)),
    "near": near(),
    "near, cross, causal": near(causal=True, key_length=7, batch=(2,)),
    "near, packed": near(packed=True, batch=(2, 1)),
    "near, decoding": near(decode=True),
    "near and far": both(batch=(2,)),
    "near and far, packed, causal": both(packed=True, causal=True),
    "near and far, decoding": both(decode=True, batch=(2, 1)),
    "exact band": joint(),
    "exact band, cross": joint(key_length=17, batch=(2,)),
    "exact band, causal": joint(causal=True, batch=(2, 1)),
    "exact band, causal, cross": joint(causal=True, key_length=7),
    "exact band, packed": joint(packed=True, batch=(2,)),
    "exact band, packed, causal": joint(packed=True, causal=True),
    "exact band, decoding": joint(decode=True, batch=(2,)),
    "exact keys, cross": joint(keys=KEYS, bandwidth=None, key_length=7, batch=(2,)),
    "exact keys, causal": joint(keys=KEYS, bandwidth=None, causal=True),
    "exact keys, packed": joint(keys=KEYS, bandwidth=None, packed=True, batch=(2, 1)),
    "exact keys, band, packed, causal": joint(keys=KEYS, packed=True, causal=True, batch=(2,)),
    "best keys, causal, cross": joint(keys=BEST, bandwidth=None, causal=True, key_length=7),
    "best keys, band, packed, causal": joint(keys=BEST, packed=True, causal=True, batch=(2, 1)),
    "best keys, decoding": joint(keys=BEST, bandwidth=None, decode=True, batch=(2,)),
    "best keys, band, decoding": joint(keys=BEST, bandwidth=2, decode=True),
}
OTHER_MAPS = (
    "hyperbolic",
    "relu",
    "elu",
    "trigonometric",
    "optimal_positive",
    "weighted",
    "weighted_hyperbolic",
    "calibrated",
    "learned",
)
WITH_OTHER_MAPS = {
    f"{name}, {feature_map}": far(feature_map, **options)
    for feature_map in OTHER_MAPS
    for name, options in {
        "causal": {"causal": True},  # test_feature_maps.py has the bidirectional ones.
        "packed": {"packed": True},
        "decoding": {"decode": True},
    }.items()
} | {
    f"exact band, {name}, {feature_map}": joint(feature_map, **options)
    for feature_map in ("hyperbolic", "trigonometric", "calibrated", "learned")
    for name, options in {
        "bidirectional": {},
        "packed": {"packed": True},
        "decoding": {"decode": True},
    }.items()
}
