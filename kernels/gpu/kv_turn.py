"""The rotation of heads by the normalised Hadamard matrix (:mod:`strataflux.kernels.hadamard`), inside of kernels.

Formula. The matrix of a head of D = 8 · D/8 channels is the Kronecker product of those of 8 and of D/8: channels as a
[8, D/8] matrix are multiplied by one from the left and by the other from the right.
"""

import triton
import triton.language as tl

__all__ = ["turn_head"]


@triton.jit
def _signs(size: tl.constexpr) -> tl.tensor:
    """Hadamard matrix [size, size] of ±1, not normalised: minus where i and j share an odd number of bits."""
    shared = tl.arange(0, size)[:, None] & tl.arange(0, size)[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return 1.0 - 2.0 * (shared & 1).to(tl.float32)


@triton.jit
def turn_head(x: tl.tensor, ROWS: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Heads [ROWS, D] float32, rotated."""
    COLUMNS: tl.constexpr = D // 8
    square = tl.reshape(x, (ROWS, 8, COLUMNS))
    left = tl.sum(square[:, None, :, :] * _signs(8)[None, :, :, None], 2)
    right = tl.sum(left[:, :, None, :] * _signs(COLUMNS)[None, None, :, :], 3)
    return tl.reshape(right, (ROWS, D)) * D**-0.5
