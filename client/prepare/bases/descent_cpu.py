"""Coordinate descent over a block of inputs, compiled; the formula is lnq.descend_block's."""

import numpy as np
from numpy.typing import NDArray

from strataflux.proto.compiled import compiled

__all__ = ["descend_rows"]


@compiled
def descend_rows(
    low: NDArray[np.float32],
    slope: NDArray[np.float32],
    among: NDArray[np.float32],
    owner: NDArray[np.int64],
    diagonal: NDArray[np.float32],
    codebook: NDArray[np.float32],
) -> None:
    """Move ``low`` [outputs, block], and ``slope`` with it; arguments as
    :func:`strataflux.client.prepare.bases.lnq.descend_block`.
    """
    for row in range(low.shape[0]):
        entries, hessian, mine = codebook[row], among[owner[row]], slope[row]
        for i in range(low.shape[1]):
            target = low[row, i] - mine[i] / diagonal[row, i]
            nearest = 0
            for entry in range(1, entries.size):
                if abs(entries[entry] - target) < abs(entries[nearest] - target):
                    nearest = entry
            moved = entries[nearest] - low[row, i]
            if moved != 0:
                _add(mine, hessian[i], moved)
                low[row, i] = entries[nearest]


@compiled
def _add(total: NDArray[np.float32], values: NDArray[np.float32], factor: np.float32) -> None:
    for j in range(total.size):
        total[j] += factor * values[j]
