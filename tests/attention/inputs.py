"""Queries, keys, values and projections to attend with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax import Projection, calibrate, draw_projection

# Kinds of features that a kernel treats in different ways.
KINDS = ("positive", "calibrated", "calibrated pairs")


def inputs(
    length=9,
    key_length=None,
    heads=2,
    key_heads=None,
    dim=8,
    width=None,
    scale=1.0,
    seed=0,
    batch=(),
):
    rng = np.random.default_rng(seed)
    key_length, key_heads = key_length or length, key_heads or heads
    query = scale * rng.normal(size=(*batch, length, heads, dim))
    key = scale * rng.normal(size=(*batch, key_length, key_heads, dim))
    value = rng.normal(size=(*batch, key_length, key_heads, width or dim))
    return tuple(x.astype(np.float32) for x in (query, key, value))


def projection(num_features=11, dim=8, heads=None, coupling="simplex"):
    w = _drawn(num_features, dim, heads or 1, coupling)
    return jnp.asarray(w if heads else w[0])


@functools.cache
def _drawn(num_features, dim, heads, coupling):
    """Draws W once for all tests, even if the first of them traces, maps or shards its arrays."""
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(1), heads)
        draws = [draw_projection(key, num_features, dim, coupling=coupling) for key in keys]
    return np.stack(draws)


def map_and_rows(kind, query, key, heads=2):
    """Returns the feature map and the W of one of ``KINDS``."""
    if kind == "positive":
        return "positive", projection(11)
    w = projection(8 if kind == "calibrated pairs" else 11, heads=heads)
    pairs = Projection(w, is_paired=True)
    return calibrate(query, key), pairs if kind == "calibrated pairs" else w
