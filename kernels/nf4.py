"""Weights as 4-bit NormalFloats: one table of sixteen values for all, and one scale for each group of inputs.

Formula. ``w[o, i] = scale[o, g] · NF4[code[o, i]]`` with ``g = i // group``; the scale is the largest magnitude of its
group. The table is QLoRA's (Dettmers et al. 2023, appendix E): quantiles of a normal distribution, eight above zero and
seven below, each side evenly spaced in probability from the median to 0.9677083, over the largest one; zero is exact.

Bytes. Codes are packed as those of :mod:`strataflux.kernels.lowbit`, scales are float16. QLoRA's own code keeps scales
in float32, or rounds them again to 8 bits. Nothing here is compiled.
"""

from typing import Final

import torch
from torch import Tensor

__all__ = ["NF4", "NF4_BITS", "dequantize_nf4"]

NF4_BITS: Final = 4

NF4: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What each code stands for, ascending; numbers that float32 holds."""


def dequantize_nf4(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Float32 weights [rows, inputs], on the device of the codes.

    Args:
        codes: [rows, inputs] uint8, one a byte.
        scales: [rows, inputs / group] float16.
        group: inputs that share a scale.

    Raises:
        ValueError: the shapes contradict each other.
    """
    rows, groups = scales.shape
    if codes.shape != (rows, groups * group):
        raise ValueError(f"codes {list(codes.shape)} and scales {list(scales.shape)} of groups of {group}")
    values = torch.tensor(NF4, device=codes.device)[codes.view(rows, groups, group).long()]
    return (values * scales.float()[..., None]).view(codes.shape)
