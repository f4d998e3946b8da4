"""Mean squared error of positive estimators that have equally many features.

The program prints one table for d = 64 and 128 features, by trials with standard errors, relative
to positive features of iid rows. Hyperbolic features of 64 rows are 128 features. The rows of the
last estimator are 128 and a zero row.

Run: python -m benchmarks.equal_features
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from simrf_jax import FeatureMap, feature_maps, theory
from simrf_jax._src.features import as_feature_map
from simrf_jax._src.projections import ProjectionLike

DIM, NUM_FEATURES = 64, 128
DISTANCES = (0.3, 0.5, 1.0, 1.5)  # Samples at larger distances have too heavy tails.
NUM_DRAWS, NUM_PARTS = 8_000, 16


class Estimator(NamedTuple):
    """A feature map, and how its rows are drawn.

    Attributes:
      feature_map: Name of the feature map.
      num_rows: Number of rows of W.
      options: Options of ``draw_projection``.
    """

    feature_map: str
    num_rows: int
    options: dict[str, Any]

    @property
    def rows(self) -> str:
        """Returns the coupling of the rows, and the law of their norms if it is not chi."""
        return ", ".join(self.options.values())


POSITIVE, OPTIMAL = "positive", "optimal positive"
CROSS = {"coupling": "cross_polytope"}
ESTIMATORS = (
    Estimator(POSITIVE, NUM_FEATURES, {"coupling": "iid"}),
    Estimator(POSITIVE, NUM_FEATURES, {"coupling": "orthogonal"}),
    Estimator(POSITIVE, NUM_FEATURES, {"coupling": "simplex"}),
    Estimator(POSITIVE, NUM_FEATURES, {"coupling": "simplex_plus"}),
    Estimator("hyperbolic", NUM_FEATURES // 2, {"coupling": "orthogonal"}),
    Estimator(POSITIVE, NUM_FEATURES, CROSS),
    Estimator(POSITIVE, NUM_FEATURES, CROSS | {"norms": "pair"}),
    Estimator(POSITIVE, NUM_FEATURES, CROSS | {"norms": "antithetic"}),
    Estimator(POSITIVE, NUM_FEATURES, CROSS | {"norms": "shared"}),
    Estimator(OPTIMAL, NUM_FEATURES, {"coupling": "simplex"}),
    Estimator(OPTIMAL, NUM_FEATURES, CROSS),
    Estimator(OPTIMAL, NUM_FEATURES, CROSS | {"norms": "antithetic"}),
    Estimator(POSITIVE, NUM_FEATURES + 1, CROSS | {"norms": "radau"}),
)


def map_of(estimator: Estimator, v: float) -> FeatureMap:
    if estimator.feature_map == OPTIMAL:
        return feature_maps.OptimalPositive(theory.optimal_parameter(v**2, DIM))
    return as_feature_map(estimator.feature_map)


def squared_error(estimator: Estimator, w: ProjectionLike, v: float) -> jax.Array:
    """Returns (K_hat / K - 1)^2 at |x + y| = v, as a mean over all axes."""
    phi = map_of(estimator, v).features(v / 2 * jnp.eye(DIM), w)
    ratios = jnp.sum(jnp.square(phi), axis=1) / jnp.exp(v**2 / 4)
    return jnp.mean(jnp.square(ratios - 1))


def squared_errors(estimator: Estimator) -> np.ndarray:
    """Returns the squared errors of many draws, ``[draws, distances]``."""

    @jax.jit
    @jax.vmap
    def one(key):
        w = simrf_jax.draw_projection(key, estimator.num_rows, DIM, **estimator.options)
        return jnp.stack([squared_error(estimator, w, v) for v in DISTANCES])

    parts = jax.random.split(jax.random.key(0), (NUM_PARTS, NUM_DRAWS // NUM_PARTS))
    parts = command_line.bar(parts, f"{estimator.feature_map}, {estimator.rows}")
    return np.concatenate([np.asarray(one(keys), np.float64) for keys in parts])


def main():
    command_line.parser(__doc__).parse_args()
    print(f"| features | rows | {' | '.join(map(str, DISTANCES))} |")
    print("| --- | --- |" + " --- |" * len(DISTANCES))
    iid = np.expm1(np.square(DISTANCES)) / NUM_FEATURES
    for estimator in ESTIMATORS:
        ratios = squared_errors(estimator) / iid
        errors = ratios.std(axis=0) / NUM_DRAWS**0.5
        cells = (
            f"{mean:.3g} ({error:.1g})"
            for mean, error in zip(ratios.mean(axis=0), errors, strict=True)
        )
        print(f"| {estimator.feature_map} | {estimator.rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
