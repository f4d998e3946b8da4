"""Vectors for the tests of the hybrid features."""

import numpy as np

import simrf_jax

KERNELS = {"softmax": simrf_jax.softmax_kernel, "gaussian": simrf_jax.gaussian_kernel}


def vectors(n=7, dim=4, scale=0.6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim), scale=scale).astype(np.float32)
