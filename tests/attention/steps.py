"""Decoding by the three mechanisms as functions of all that they hold, one call for each verb."""

from simrf_jax import Band, RandomFeatureMechanism
from simrf_jax.fmm import Blend


def init_state(
    projection,
    *,
    feature_map="positive",
    head_dim=None,
    exact_bandwidth=None,
    exact_keys=None,
    **sizes,
):
    """Returns the first state of random features, whose projection tells the width of the keys."""
    head_dim = projection.shape[-1] if head_dim is None else head_dim
    mechanism = RandomFeatureMechanism(
        projection, feature_map, exact_bandwidth=exact_bandwidth, exact_keys=exact_keys
    )
    return mechanism.init(head_dim=head_dim, **sizes)


def step(
    state,
    query,
    key,
    value,
    projection,
    *,
    feature_map="positive",
    chunk_size=None,
    exact_bandwidth=None,
    exact_keys=None,
    **options,
):
    mechanism = RandomFeatureMechanism(
        projection,
        feature_map,
        chunk_size,
        exact_bandwidth=exact_bandwidth,
        exact_keys=exact_keys,
    )
    return mechanism.step(state, query, key, value, **options)


def append(
    state, key, value, projection, *, feature_map="positive", exact_bandwidth=None, **options
):
    mechanism = RandomFeatureMechanism(projection, feature_map, exact_bandwidth=exact_bandwidth)
    return mechanism.append(state, key, value, **options)


def init_window(*, bandwidth, **sizes):
    return Band(bandwidth).init(**sizes)


def window_step(window, query, key, value, **options):
    """Steps with the bandwidth of the window."""
    return Band(window.key.shape[-3]).step(window, query, key, value, **options)


def init_fmm_state(projections, *, bandwidth, feature_maps=("positive",), **sizes):
    return _blend(projections, feature_maps, bandwidth).init(**sizes)


def fmm_step(
    state,
    query,
    key,
    value,
    projections,
    *,
    feature_maps=("positive",),
    near_weight=1.0,
    far_weights=1.0,
    chunk_size=None,
    **options,
):
    """Steps with the bandwidth of the state."""
    bandwidth = state.near.key.shape[-3]
    weights = {"near_weight": near_weight, "far_weights": far_weights}
    mechanism = _blend(projections, feature_maps, bandwidth, chunk_size, **weights)
    return mechanism.step(state, query, key, value, **options)


def _blend(projections, feature_maps, bandwidth, chunk_size=None, **weights):
    fields = (
        RandomFeatureMechanism(projection, feature_map, chunk_size)
        for projection, feature_map in zip(projections, feature_maps, strict=True)
    )
    return Blend(Band(bandwidth), tuple(fields), **weights)
