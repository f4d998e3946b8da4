"""Error of attention in float32 and bfloat16 against the same estimator in float64.

The error is the relative Frobenius error of one head on 256 tokens, bidirectional and causal, with
d = 64 and m = 130. Queries and keys are normal with standard deviation s.

Run: python -m benchmarks.attention_accuracy
"""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line

SCALES = (0.5, 1, 2, 4, 8, 16)


def estimator(query, key, value, projection, is_causal):
    """Returns the attention output of one head in float64, evaluating every pair of tokens."""
    query, key, value, w = (np.asarray(x, np.float64) for x in (query, key, value, projection))
    query, key = query * query.shape[-1] ** -0.25, key * key.shape[-1] ** -0.25
    log_a = (query @ w.T)[:, None] + (key @ w.T - np.sum(key**2, axis=-1, keepdims=True) / 2)[None]
    if is_causal:
        log_a = np.where(np.tri(len(query), dtype=bool)[..., None], log_a, -np.inf)
    weights = np.exp(log_a - log_a.max(axis=(1, 2), keepdims=True)).sum(axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def main():
    command_line.parser(__doc__).parse_args()
    length, num_features, dim = 256, 130, 64
    w = simrf_jax.draw_projection(jax.random.key(1), num_features, dim)
    print("| s | float32 | causal | bfloat16 | causal |\n| --- | --- | --- | --- | --- |")
    q, k, v = jax.random.normal(jax.random.key(0), (3, length, 1, dim))
    cases = [*itertools.product(SCALES, (jnp.float32, jnp.bfloat16), (False, True))]
    errors = collections.defaultdict(list)
    for scale, dtype, is_causal in command_line.bar(cases, "cases"):
        inputs = [x.astype(dtype) for x in (scale * q, scale * k, v)]
        out = simrf_jax.random_feature_attention(*inputs, w, is_causal=is_causal)
        actual = out[:, 0].astype(jnp.float32)
        expected = estimator(*(x[:, 0].astype(jnp.float32) for x in inputs), w, is_causal)
        errors[scale].append(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    for scale, row in errors.items():
        print(f"| {scale} | {' | '.join(f'{error:.1e}' for error in row)} |")


if __name__ == "__main__":
    main()
