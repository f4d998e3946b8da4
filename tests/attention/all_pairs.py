"""The kernel matrices of random features and of softmax, written out in float64."""

import numpy as np

from tests import formulas


def log_features(q, k, w, *, scale=None, formula=formulas.positive):
    """Log features and signs of each head in float64, ``[N, T, 1, m]`` and ``[N, 1, S, m]``."""
    q, k = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q, k))
    k = k.repeat(len(q) // len(k), axis=0)
    w = np.asarray(w, np.float64).reshape(-1, *w.shape[-2:])
    w = w.repeat(len(q) // len(w), axis=0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    root = np.sqrt(abs(scale))
    scaled = (q * np.sign(scale) * root, k * root)
    both = [[formula(one[n], w[n], "softmax") for n in range(len(q))] for one in scaled]
    (log_q, sign_q), (log_k, sign_k) = (map(np.stack, zip(*one, strict=True)) for one in both)
    return log_q[:, :, None] + log_k[:, None], sign_q[:, :, None] * sign_k[:, None]


def estimated(q, k, w, *, visible=True, **options):
    """Un-normalized rows in float64, and their shift in logs, ``[N, T, S]`` and ``[N, T, 1]``."""
    log, sign = log_features(q, k, w, **options)
    log = np.where(np.broadcast_to(visible, log.shape[:-1])[..., None], log, -np.inf)
    shift = log.max(axis=(-2, -1), keepdims=True)
    shift = np.where(shift == -np.inf, 0, shift)
    return (sign * np.exp(log - shift)).sum(axis=-1), shift[..., 0]


def softmax(q, k, *, scale=None, visible=True):
    """The same of the softmax kernel."""
    q, k = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q, k))
    k = k.repeat(len(q) // len(k), axis=0)
    logits = q @ k.swapaxes(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = np.where(np.broadcast_to(visible, logits.shape), logits, -np.inf)
    shift = logits.max(axis=-1, keepdims=True)
    shift = np.where(shift == -np.inf, 0, shift)
    return np.exp(logits - shift), shift


def normalized(kernel):
    """Rows that sum to one, or zeros."""
    total = kernel.sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0, kernel / np.where(total == 0, 1, total))
