"""What every coupling and every feature map must pass; a new one joins by one line here."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from tests import formulas

# name -> options of draw_projection
COUPLINGS = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
    "simplex_plus": {"coupling": "simplex_plus"},
    "simplex_plus-square": {"coupling": "simplex_plus", "block": "square"},
}
# name -> the couplings whose rows it leaves exactly standard normal, so that nothing is biased
ROTATIONS = {
    "haar": tuple(COUPLINGS),
    # Its own rows are uniform on the sphere, sums of them are not.
    "givens": ("iid", "orthogonal"),
    "hadamard": ("iid",),
}
# name -> what theory calls it; simplex_plus has no closed form, it depends on the norms
ORACLES = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
}


class Map(NamedTuple):
    """A feature map: ``phi(x, w, kernel, phases)``, the phases for the map that takes some."""

    phi: Callable
    formula: Callable  # The same in float64; see formulas.py.
    width: Callable = lambda m: m
    kernels: tuple = ("gaussian", "softmax")
    oracle: bool = False  # Whether theory.kernel_mse knows it, by its name.


def draw_phases(key, shape):
    return jax.random.uniform(key, shape, maxval=2 * jnp.pi)


def fixed_phases(w):
    return np.random.default_rng(9).uniform(0, 2 * np.pi, np.shape(w)[0]).astype(np.float32)


def _two_kernels(features):
    return lambda x, w, kernel, phases=None: features(x, w, kernel=kernel)


def _one_kernel(features):
    return lambda x, w, kernel, phases=None: features(x, w)


def _phase_features(x, w, kernel, phases=None):
    phases = fixed_phases(w) if phases is None else phases
    return simrf_jax.phase_features(x, w, phases, kernel=kernel)


FEATURE_MAPS = {
    "positive": Map(_two_kernels(simrf_jax.positive_features), formulas.positive, oracle=True),
    "hyperbolic": Map(
        _two_kernels(simrf_jax.hyperbolic_features),
        formulas.hyperbolic,
        width=lambda m: 2 * m,
        oracle=True,
    ),
    "trigonometric": Map(
        _two_kernels(simrf_jax.trigonometric_features),
        formulas.trigonometric,
        width=lambda m: 2 * m,
        oracle=True,
    ),
    "phase": Map(
        _phase_features,
        lambda x, w, kernel: formulas.phase(x, w, kernel, fixed_phases(w)),
    ),
    "relu": Map(_one_kernel(simrf_jax.relu_features), formulas.relu, kernels=("relu",)),
    # elu + 1 is a feature map of no kernel in particular.
    "elu": Map(_one_kernel(simrf_jax.elu_features), formulas.elu, kernels=(None,)),
}
# name -> exact kernel of [..., n, dim] and [..., p, dim]
KERNELS = {
    "gaussian": simrf_jax.gaussian_kernel,
    "softmax": simrf_jax.softmax_kernel,
    "relu": simrf_jax.relu_kernel,
}
MAPS_AND_KERNELS = [
    (name, kernel) for name, entry in FEATURE_MAPS.items() for kernel in entry.kernels
]


def feature_map(name, kernel):
    """``phi(x, w)``, or ``phi(x, w, phases)``."""
    return lambda x, w, phases=None: FEATURE_MAPS[name].phi(x, w, kernel, phases)
