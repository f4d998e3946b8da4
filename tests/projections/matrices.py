"""Dense matrices that fast projections stand for."""

import jax
import numpy as np
import scipy.linalg

from simrf_jax._src.projections.couplings import COUPLED


def dense(projection):
    """Multiplies the factors D S HD HD HD of a fast projection, in float64."""
    rows = projection.rows
    num_features, ambient = rows.row_norms.shape[0], rows.signs.shape[-1]
    row_blocks = COUPLED[rows.coupling].blocks(num_features, ambient, rows.block)
    blocks = [block for block, count in row_blocks for _ in range(count)]
    hadamard = scipy.linalg.hadamard(ambient) / np.sqrt(ambient)
    directions = []
    for block, signs in zip(blocks, np.asarray(rows.signs, np.float64), strict=True):
        rotation = np.eye(ambient)
        for flips in signs:
            rotation = hadamard @ np.diag(flips) @ rotation
        s = block.directions()
        directions.append(s @ rotation[: s.shape[1]])
    w = np.concatenate(directions) * np.asarray(rows.row_norms, np.float64)[:, None]
    return np.pad(w[:, : rows.dim], ((0, rows.num_zero_rows), (0, 0)))


def dense_stack(projections):
    """Multiplies the factors of each projection in a stack with one leading axis."""
    count = len(projections.rows.row_norms)
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], projections) for i in range(count)]
    return np.stack([dense(one) for one in each])
