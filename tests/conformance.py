"""Couplings and feature maps that the conformance suite tests; a new one is one line here."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from tests import formulas

# Options of draw_projection, by name.
COUPLINGS = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
    "cross_polytope": {"coupling": "cross_polytope"},
    "cross_polytope-pair": {"coupling": "cross_polytope", "norms": "pair"},
    "cross_polytope-antithetic": {"coupling": "cross_polytope", "norms": "antithetic"},
    "cross_polytope-shared": {"coupling": "cross_polytope", "norms": "shared"},
    "simplex-antithetic": {"coupling": "simplex", "norms": "antithetic"},
    "simplex_plus": {"coupling": "simplex_plus"},
    "simplex_plus-square": {"coupling": "simplex_plus", "block": "square"},
}
# Couplings whose rows a rotation leaves exactly standard normal, so that nothing is biased.
ROTATIONS = {
    "haar": tuple(COUPLINGS),
    # The rows of a Givens rotation are uniform on the sphere, but sums of them are not.
    "givens": ("iid", "orthogonal", "cross_polytope"),
    "hadamard": ("iid",),
}
# Options of theory for each coupling. simplex_plus depends on the norms and has no closed form.
ORACLES = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
}


class Map(NamedTuple):
    """A feature map ``phi(x, w, kernel, phases)``; only the phase map uses the phases."""

    phi: Callable
    formula: Callable  # The same map in float64; see formulas.py.
    width: Callable = lambda m: m
    kernels: tuple = ("gaussian", "softmax")
    oracle: bool = False  # True if theory.kernel_mse knows its name.


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
    # elu + 1 is not the feature map of any particular kernel.
    "elu": Map(_one_kernel(simrf_jax.elu_features), formulas.elu, kernels=(None,)),
}
# Exact kernels of [..., n, dim] and [..., p, dim], by name.
KERNELS = {
    "gaussian": simrf_jax.gaussian_kernel,
    "softmax": simrf_jax.softmax_kernel,
    "relu": simrf_jax.relu_kernel,
}
MAPS_AND_KERNELS = [
    (name, kernel) for name, entry in FEATURE_MAPS.items() for kernel in entry.kernels
]


def feature_map(name, kernel):
    """Returns the function ``phi(x, w, phases=None)`` of a feature map for a kernel."""
    return lambda x, w, phases=None: FEATURE_MAPS[name].phi(x, w, kernel, phases)
