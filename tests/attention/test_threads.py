"""Many threads that compile and attend at the same time."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest

import simrf_jax
from tests.attention.inputs import inputs

CALLS = {
    "bidirectional": simrf_jax.random_feature_attention,
    "causal": functools.partial(simrf_jax.random_feature_attention, is_causal=True, chunk_size=2),
    "exact band": functools.partial(simrf_jax.random_feature_attention, exact_bandwidth=2),
    "trigonometric": functools.partial(
        simrf_jax.random_feature_attention, feature_map="trigonometric"
    ),
}


def attend(number):
    """Attends to a length that few other calls have, so that most calls compile."""
    name = list(CALLS)[number % len(CALLS)]
    q, k, v = inputs(3 + number // len(CALLS), heads=2, dim=4)
    w = simrf_jax.draw_projection(jax.random.key(number), 5 + number % 3, 4)
    return np.asarray(CALLS[name](q, k, v, w))


@pytest.mark.slow
def test_twenty_threads_get_what_one_gets():
    expected = [attend(number) for number in range(60)]
    jax.clear_caches()
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        together = list(threads.map(attend, range(60)))
    for one, other in zip(together, expected, strict=True):
        np.testing.assert_array_equal(one, other)
