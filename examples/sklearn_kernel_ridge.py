"""Kernel ridge regression in linear time: the lower half of a digit from its upper half.

``Ridge`` of random features approximates ``KernelRidge``, whose time grows with the cube of the
number of training rows, and whose predictions need all of them.

Run: python -m examples.sklearn_kernel_ridge
"""

from sklearn.datasets import load_digits
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline

from simrf_jax.integrations.sklearn import RandomFeatures


def halves():
    """Returns upper halves to fit on and to predict from, and lower halves to fit and to judge by."""
    pixels = load_digits().data / 16
    return train_test_split(pixels[:, :32], pixels[:, 32:], random_state=0)


def search(upper, lower):
    """Chooses gamma and the penalty by cross-validation with few features, which is quick."""
    model = make_pipeline(RandomFeatures(128, random_state=0), Ridge())
    grid = {"randomfeatures__gamma": [0.1, 0.2, 0.4], "ridge__alpha": [0.1, 1.0]}
    return GridSearchCV(model, grid, cv=3).fit(upper, lower)


def scores(sizes=(64, 256, 1024)):
    """Returns R^2 on test data for each number of features, and that of the exact kernel.

    It is that of all pixels together, because some of them are always white.
    """
    upper, test_upper, lower, test_lower = halves()
    found = search(upper, lower)
    gamma, alpha = found.best_params_.values()
    results = {}
    for size in sizes:
        model = found.best_estimator_.set_params(randomfeatures__n_components=size)
        predicted = model.fit(upper, lower).predict(test_upper)
        results[size] = r2_score(test_lower, predicted, multioutput="variance_weighted")
    # Ridge of features has an intercept, which the kernel has for centered targets.
    mean = lower.mean(axis=0)
    exact = KernelRidge(kernel="rbf", gamma=gamma, alpha=alpha).fit(upper, lower - mean)
    predicted = mean + exact.predict(test_upper)
    return results, r2_score(test_lower, predicted, multioutput="variance_weighted")


def main():
    results, exact = scores()
    for size, score in results.items():
        print(f"{size:>5} features: R^2 = {score:.3f}")
    print(f" exact kernel: R^2 = {exact:.3f}")


if __name__ == "__main__":
    main()
