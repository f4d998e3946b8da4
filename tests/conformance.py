"""What every coupling and every feature map must pass; a new one joins by one line here."""

import functools

import simrf_jax

# name -> options of draw_projection
COUPLINGS = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
}
# name -> (x, projection, kernel=...) -> features
FEATURE_MAPS = {"positive": simrf_jax.positive_features}
# name -> exact kernel of [..., n, dim] and [..., p, dim]
KERNELS = {"gaussian": simrf_jax.gaussian_kernel, "softmax": simrf_jax.softmax_kernel}


def feature_map(name, kernel):
    return functools.partial(FEATURE_MAPS[name], kernel=kernel)
