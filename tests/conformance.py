"""What every coupling and every feature map must pass; a new one joins by one line here."""

import functools

import simrf_jax
from simrf_jax.projections.blocks import regular_sizes

# name -> options of draw_projection
COUPLINGS = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "simplex-square": {"coupling": "simplex", "block": "square"},
}


# name -> (num_features, dim) -> [(rows, cosine of their pairs) for each block]; for the variance
def full_and_rest(num_features, dim, cosine):
    full, rest = divmod(num_features, dim)
    return [(dim, cosine)] * full + [(rest, cosine)] * bool(rest)


BLOCKS = {
    "iid": lambda m, d: [],
    "orthogonal": lambda m, d: full_and_rest(m, d, 0.0),
    "simplex": lambda m, d: [(r, -1 / (r - 1)) for r in regular_sizes(m, d)],
    "simplex-square": lambda m, d: full_and_rest(m, d, -1 / (d - 1)),
}
# name -> (x, projection, kernel=...) -> features
FEATURE_MAPS = {"positive": simrf_jax.positive_features}
# name -> exact kernel of [..., n, dim] and [..., p, dim]
KERNELS = {"gaussian": simrf_jax.gaussian_kernel, "softmax": simrf_jax.softmax_kernel}


def feature_map(name, kernel):
    return functools.partial(FEATURE_MAPS[name], kernel=kernel)
