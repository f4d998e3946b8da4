"""Assertions about random samples, which allow five standard errors from one fixed seed."""

import numpy as np


def assert_mean(samples, expected, *, axis=0, errors=5.0):
    """Asserts that the mean of independent samples is ``expected`` within standard errors."""
    samples = np.asarray(samples, np.float64)
    n = samples.shape[axis]
    assert n >= 100, f"{n} samples are too few for a standard error"
    standard_error = samples.std(axis=axis, ddof=1) / np.sqrt(n)
    off = np.abs(samples.mean(axis=axis) - expected) / standard_error
    assert np.all(off < errors), (
        f"mean {samples.mean(axis=axis)} is {np.max(off):.1f} standard errors from {expected}"
    )


def assert_less(smaller, larger, *, errors=5.0):
    """Asserts that paired samples have means in this order, by ``errors`` standard errors."""
    gap = np.asarray(larger, np.float64) - np.asarray(smaller, np.float64)
    standard_error = gap.std(ddof=1) / np.sqrt(len(gap))
    assert gap.mean() > errors * standard_error, (
        f"gap {gap.mean()} is {gap.mean() / standard_error:.1f} standard errors"
    )
