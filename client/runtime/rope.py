"""Rotary position embedding by halves: elements i and i + d/2 of a head turn by the same angle.

The angle is the position times frequency i, ``theta^(-2i/d)`` over the divisor of that frequency.
"""

import torch
from torch import Tensor

from strataflux.client.runtime.models import ModelConfig

__all__ = ["llama3_divisors", "rotary_table", "rotate"]


def rotary_table(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] float32, both halves filled alike, the sine's first half
    negated.

    With them a rotation is two products and one exchange of halves.
    """
    half = config.head_dim // 2
    # In float64: at position 100,000 a float32 angle is already off by 0.004.
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if config.rope_divisors:
        frequency = frequency / torch.tensor(config.rope_divisors, dtype=torch.float64)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    cosine, sine = angle.cos().float(), angle.sin().float()
    return torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``heads`` [..., head_dim] turned by one row of :func:`rotary_table`; a new tensor."""
    return heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Frequency divisors of Llama 3.1's context extension, head_dim / 2 numbers.

    Wavelengths below ``original_context / high`` stay, those above ``original_context / low`` are stretched
    by ``factor``, and those between are blended (Llama 3.1 reference code, ``apply_scaling``).
    """
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * torch.pi * theta ** (2 * i / head_dim)
        blend = (original_context / wavelength - low) / (high - low)
        blend = min(1.0, max(0.0, blend))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return tuple(divisors)
