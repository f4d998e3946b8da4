import dataclasses

import jax
import jax.numpy as jnp

import simrf_jax
from experiments.swap.configs import paper
from experiments.swap.learning import Schedule

LEARNED = {"num_steps": 3, "batch_size": 2, "learning_rate": 0.1}
SCHEDULE = Schedule(**LEARNED)
MODEL = {"width": 8, "depth": 2, "num_heads": 2}


def get_config(**changes):
    """Returns a config of tiny models; model__width stands for model.width."""
    config = paper.get_config()
    training = {
        "batch_size": 4,
        "num_steps": 3,
        "warmup_steps": 1,
        "num_fit": 5,
        "num_features": (4, 8),
        "tuned_features": 6,
        "tuned_steps": (0, 2),
        "learned": LEARNED,
    }
    vision = training | {"exact_keys": 2}
    config.update(
        {
            "parts": ("digits", "char_lm"),
            "methods": ("positive_simplex", "hyperbolic"),
            "tuned_methods": ("hyperbolic",),
            "seeds": (0, 1),
            "predicted": {
                "dim": 4,
                "num_queries": 2,
                "num_keys": 3,
                "num_features": 8,
                "num_draws": 30,
                "lengths": (0.1, 0.2),
            },
            "predicted_heads": {"num_queries": 2, "num_draws": 30, "num_features": (4, 8)},
            "encoder": {
                "num_fit_texts": 2,
                "num_test_texts": 3,
                "length": 6,
                "bandwidth": 1,
                "exact_keys": 2,
                "num_features": (4, 8),
                "learned": LEARNED,
            },
            "kinds": {
                "num_fit_texts": 3,
                "num_test_texts": 2,
                "lengths": (6, 8),
                "num_features": 4,
                "learned": LEARNED,
            },
            "digits": vision | {"model": MODEL | {"patch_size": 4, "mlp_dim": 8}},
            "fashion_mnist": vision | {"model": MODEL | {"patch_size": 7, "mlp_dim": 8}},
            "char_lm": training
            | {
                "context": 600,
                "test_batch_size": 31,
                "bandwidth": 3,
                "exact_keys": 2,
                "model": MODEL,
            },
        }
    )
    for name, value in changes.items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    return config


@dataclasses.dataclass(frozen=True)
class Scaled(simrf_jax.FeatureMap):
    """Positive features of queries times a factor for each vector dimension, an array."""

    factor: jax.Array
    is_finite = True

    def log_features(self, x, projection, *, side):
        """Returns the features of x times the factor, which keys divide by."""
        factor = jnp.broadcast_to(self.factor, x.shape)
        scaled = x * factor if side == "query" else x / factor
        positive = simrf_jax.feature_maps.Positive()
        return positive.log_features(scaled, projection, side=side)


def fit_scaled(layer, bandwidth):
    """Returns a map that gives queries and keys the same mean square in each dimension."""
    del bandwidth
    of_queries, of_keys = (jnp.mean(jnp.square(x), axis=(0, 1, 2)) for x in layer[:2])
    return Scaled((of_keys / of_queries) ** 0.25)
