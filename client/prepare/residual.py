"""Refinement bits: the residual ``R = W - Ŵ`` in 4-bit symmetric codes with one scale per output row.

Codes are -7…7. The scale of a row is searched over 32 candidates ``t/32 · max|r| / 7``, t = 1…32, for the
least squared error: a few large entries are better clipped than paid for by all others (DecDEC, Park et al.
2025, residual format).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.proto.compiled import compiled

__all__ = ["residual_codes", "residual_scales"]

_TOP = 7
_CANDIDATES = 32
_BLOCK = 128


def residual_scales(residual: Tensor) -> Tensor:
    """The best scale of each row of ``residual`` [outputs, inputs] float32; [outputs] float32, 0 for zeros."""
    scales = np.empty(residual.shape[0], np.float32)
    _search(residual.contiguous().numpy(), scales)
    return torch.from_numpy(scales)


@compiled
def _search(residual: NDArray[np.float32], scales: NDArray[np.float32]) -> None:
    candidate, inverse = np.empty(_CANDIDATES, np.float32), np.empty(_CANDIDATES, np.float32)
    partial, error = np.empty(_CANDIDATES, np.float32), np.empty(_CANDIDATES, np.float64)
    for row in range(residual.shape[0]):
        largest = np.max(np.abs(residual[row]))
        scales[row] = 0
        # Below this a quotient overflows; such a row is zero to every reader of float32 weights.
        if largest < np.float32(1e-35):
            continue
        for t in range(_CANDIDATES):
            candidate[t] = largest * np.float32(t + 1) / np.float32(_CANDIDATES * _TOP)
            inverse[t] = np.float32(1) / candidate[t]
        error[:] = 0
        for start in range(0, residual.shape[1], _BLOCK):
            partial[:] = 0
            _add_errors(residual[row, start : start + _BLOCK], candidate, inverse, partial)
            error += partial
        scales[row] = candidate[np.argmin(error)]


@compiled
def _add_errors(
    values: NDArray[np.float32],
    candidate: NDArray[np.float32],
    inverse: NDArray[np.float32],
    error: NDArray[np.float32],
) -> None:
    # All candidates of one value side by side: the inner loop is vectorised and no sum changes its order.
    top = np.float32(_TOP)
    for i in range(values.size):
        value = values[i]
        for t in range(_CANDIDATES):
            code = np.rint(min(top, max(-top, value * inverse[t])))
            miss = code * candidate[t] - value
            error[t] += miss * miss


def residual_codes(residual: Tensor, scales: Tensor) -> Tensor:
    """Codes [outputs, inputs] int8 in -7…7 of ``residual`` [outputs, inputs] float32 under ``scales``
    [outputs].
    """
    divisor = torch.where(scales > 0, scales, torch.inf)[:, None]
    return (residual / divisor).round().clamp(-_TOP, _TOP).to(torch.int8)
