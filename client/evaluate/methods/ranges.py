"""Numbers rounded to a few levels between the smallest and the largest of a group, as KIVI and Palu do."""

import torch
from torch import Tensor

__all__ = ["RANGE_BYTES", "range_group_bytes", "round_in_range"]

RANGE_BYTES = 4
"""A group's scale and zero point in float16."""


def range_group_bytes(numbers: int, bits: int) -> int:
    """Bytes of a group: its codes, whole bytes of them, with scale and zero point."""
    return -(-numbers * bits // 8) + RANGE_BYTES


def round_in_range(x: Tensor, bits: int) -> Tensor:
    """``x`` [..., group] as 2^bits levels give it back: ``zero + scale · code`` with ``zero = min`` and
    ``scale = (max - min) / (2^bits - 1)``, both rounded to float16.
    """
    zero, largest = x.amin(-1, keepdim=True).half().float(), x.amax(-1, keepdim=True)
    scale = ((largest - zero) / (2**bits - 1)).half().float()
    # A range too small for float16 has scale 0 and is all zero point.
    codes = torch.where(scale > 0, (x - zero) / scale, 0).round().clamp_(0, 2**bits - 1)
    rounded: Tensor = zero + scale * codes
    return rounded
