"""Residuals in 4-bit codes by definition, on any device: the oracle of the compiled search.

Codes are -7…7 with one scale per output row, ``t/32 · max|r| / 7`` for the t of 1…32 with the least squared error.
"""

import torch
from torch import Tensor

__all__ = ["residual_scales_reference", "round_residual"]

_TOP, _CANDIDATES = 7, 32


def residual_scales_reference(residual: Tensor) -> Tensor:
    """The best scale of each row of ``residual`` [outputs, inputs] float32; [outputs] float32, 0 for zeros."""
    largest = residual.abs().amax(-1, keepdim=True)
    best, scales = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for t in range(1, _CANDIDATES + 1):
        scale = largest * t / (_CANDIDATES * _TOP)
        rounded = (residual / scale.clamp(min=1e-38)).round().clamp(-_TOP, _TOP) * scale
        error = (rounded - residual).square().sum(-1, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
    return scales[:, 0]


def round_residual(residual: Tensor) -> Tensor:
    """``residual`` [outputs, inputs] as its codes restore it; a new tensor."""
    scales = residual_scales_reference(residual)[:, None]
    divisor = torch.where(scales > 0, scales, torch.inf)
    return (residual / divisor).round().clamp(-_TOP, _TOP) * scales
