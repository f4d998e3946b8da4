"""Mean squared error of each coupling with each feature map, relative to iid rows.

The program prints three tables for d = 64: couplings by feature maps with m = 64, row-block modes
for other m, and couplings with the ReLU map. The numbers come from the closed forms. Where there is
no closed form (simplex_plus, ReLU), they come from Monte Carlo, with standard errors.

Run: python -m benchmarks.variance
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from simrf_jax import theory

DIM, DISTANCES = 64, (0.1, 0.3, 1.0)  # Samples at larger distances have too heavy tails.
MAPS = ("positive", "hyperbolic", "trigonometric")
COUPLINGS = ("iid", "orthogonal", "simplex", "simplex_plus")
NUM_DRAWS = 2_000


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_many(key, num_features, coupling):
    def draw(key):
        return simrf_jax.draw_projection(key, num_features, DIM, coupling=coupling)

    return jax.vmap(draw)(jax.random.split(key, NUM_DRAWS))


def phi(x, w, name):
    if name == "relu":
        return simrf_jax.relu_features(x, w)
    return getattr(simrf_jax, f"{name}_features")(x, w, kernel="gaussian")


@functools.partial(jax.jit, static_argnums=(3,))
def squared_errors(projections, x, y, name):
    """Returns the mean squared error of K_hat / K for each draw.

    The mean is over the pairs of corresponding rows of x and y.
    """
    kernel = simrf_jax.relu_kernel if name == "relu" else simrf_jax.gaussian_kernel
    exact = jax.vmap(lambda a, b: kernel(a[None], b[None])[0, 0])(x, y)

    def one(w):
        estimate = jnp.sum(phi(x, w, name) * phi(y, w, name), axis=1)
        return jnp.mean(jnp.square(estimate / exact - 1))

    return jax.vmap(one)(projections)


def monte_carlo(v, coupling, name):
    """Returns the ratio of the error to the closed form for iid rows, and its standard error."""
    x, y = 0.7 * v * jnp.eye(DIM), 0.3 * v * jnp.eye(DIM)
    if name == "trigonometric":
        y = -y
    errors = squared_errors(draw_many(jax.random.key(0), DIM, coupling), x, y, name)
    exact = simrf_jax.gaussian_kernel(x[:1], y[:1])[0, 0]
    iid = theory.kernel_mse(x[0], y[0], DIM, coupling="iid", features=name) / exact**2
    return float(errors.mean() / iid), float(errors.std() / NUM_DRAWS**0.5 / iid)


def maps():
    print(f"| map | coupling | {' | '.join(f'{v}' for v in DISTANCES)} |")
    print("| --- | --- |" + " --- |" * len(DISTANCES))
    for name in MAPS:
        for coupling in ("orthogonal", "simplex"):
            ratios = theory.mse_ratio(
                np.array(DISTANCES), DIM, DIM, coupling=coupling, features=name
            )
            print(f"| {name} | {coupling} | {' | '.join(f'{r:.3g}' for r in ratios)} |")
        distances = command_line.bar(DISTANCES, name)
        ratios = [monte_carlo(v, "simplex_plus", name) for v in distances]
        cells = " | ".join(f"{mean:.3g} ({error:.1g})" for mean, error in ratios)
        print(f"| {name} | simplex_plus | {cells} |")


def blocks():
    print("| m | v | regular | square |\n| --- | --- | --- | --- |")
    for num_features, v in ((130, 0.1), (130, 0.5), (130, 1.0), (8, 0.5), (256, 0.5)):
        ratio = functools.partial(theory.mse_ratio, v, num_features, DIM, coupling="simplex")
        print(
            f"| {num_features} | {v} | {ratio(block='regular'):.4f} | {ratio(block='square'):.4f} |"
        )


def relu():
    x, y = jax.random.normal(jax.random.key(1), (2, 32, DIM))
    errors = {
        coupling: np.asarray(
            squared_errors(draw_many(jax.random.key(0), DIM, coupling), x, y, "relu")
        )
        for coupling in command_line.bar(COUPLINGS, "relu")
    }
    print("| coupling | squared error of relu_features, relative to iid (s.e.) |\n| --- | --- |")
    for coupling, e in errors.items():
        ratio = e.mean() / errors["iid"].mean()
        print(
            f"| {coupling} | {ratio:.3f} ({e.std() / NUM_DRAWS**0.5 / errors['iid'].mean():.3f}) |"
        )


def main():
    command_line.parser(__doc__).parse_args()
    for table in (maps, blocks, relu):
        table()
        print()


if __name__ == "__main__":
    main()
