"""What a base makes of one matrix: codes and what turns them back into weights, in three kinds.

Nothing here is compiled, so all kinds live on any device; packing for a file happens on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strataflux.client.prepare.errors import DamagedModel
from strataflux.kernels.nf4 import NF4_BITS, dequantize_nf4

__all__ = [
    "CodebookCodes",
    "GroupCost",
    "GroupedCodes",
    "MatrixCodes",
    "NormalFloatCodes",
    "QuantizedMatrix",
    "nearest_codes",
    "power_cost",
    "round_groups",
]

GroupCost = Callable[[Tensor], Tensor]
"""The cost [rows, groups] of weight errors [rows, groups, group]; least is best."""


class QuantizedMatrix(Protocol):
    """A quantized matrix [outputs, inputs]."""

    def dequantized(self) -> Tensor:
        """[outputs, inputs] float32, on the device of the codes."""

    @property
    def bits_per_weight(self) -> float:
        """Bits of everything that is stored, codes, scales and codebooks, over the number of weights."""


@dataclass(frozen=True)
class GroupedCodes:
    """``w = scale · (code - zero)`` with a scale and an integer zero-point for each group of inputs."""

    codes: Tensor
    """[outputs, inputs] uint8, one a byte."""
    scales: Tensor
    """[outputs, inputs / group] float16."""
    zeros: Tensor
    """[outputs, inputs / group] uint8."""
    bits: int
    group: int

    def dequantized(self) -> Tensor:
        """[outputs, inputs] float32."""
        rows, groups = self.scales.shape
        codes = self.codes.view(rows, groups, self.group).float() - self.zeros.float()[..., None]
        return (codes * self.scales.float()[..., None]).view(self.codes.shape)

    @property
    def bits_per_weight(self) -> float:
        """Codes, and 24 bits a group."""
        return self.bits + 24 / self.group


@dataclass(frozen=True)
class CodebookCodes:
    """``w = codebook[row, code]``; see :mod:`strataflux.kernels.codebook`."""

    codes: Tensor
    """[outputs, inputs] uint8, one a byte."""
    codebook: Tensor
    """[outputs, 2^bits] float16, ascending."""
    bits: int

    def dequantized(self) -> Tensor:
        """[outputs, inputs] float32."""
        return self.codebook.float().gather(1, self.codes.long())

    @property
    def bits_per_weight(self) -> float:
        """Codes, and 16 bits for each codebook entry."""
        return self.bits + 16 * (1 << self.bits) / self.codes.shape[1]


@dataclass(frozen=True)
class NormalFloatCodes:
    """``w = scale · NF4[code]``; see :mod:`strataflux.kernels.nf4`."""

    codes: Tensor
    """[outputs, inputs] uint8, one a byte."""
    scales: Tensor
    """[outputs, inputs / group] float16."""
    group: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return NF4_BITS

    def dequantized(self) -> Tensor:
        """[outputs, inputs] float32."""
        return dequantize_nf4(self.codes, self.scales, self.group)

    @property
    def bits_per_weight(self) -> float:
        """Codes, and 16 bits a group."""
        return NF4_BITS + 16 / self.group


MatrixCodes = GroupedCodes | CodebookCodes | NormalFloatCodes
"""What one of the bases makes of a matrix."""


def power_cost(exponent: float) -> GroupCost:
    """``Σ |error|^exponent`` over a group."""
    return lambda error: error.abs().pow(exponent).sum(-1)


def round_groups(name: str, weight: Tensor, bits: int, group: int, shrink: Tensor, cost: GroupCost) -> GroupedCodes:
    """Round ``weight`` [outputs, inputs] float32 to nearest, each group under the best of some ranges.

    A group's range is min…max of its weights, zero included, times one of ``shrink``; what lies outside is clipped.

    Args:
        name: for errors.
        weight: the matrix; inputs are a multiple of ``group``.
        bits: of a code.
        group: inputs that share a scale.
        shrink: [options] float32, descending from 1.
        cost: picks the option of each group; of equals the first.

    Raises:
        DamagedModel: a group's range exceeds float16.
    """
    rows, inputs = weight.shape
    top = (1 << bits) - 1
    groups = weight.reshape(rows, inputs // group, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    codes = torch.zeros(groups.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = torch.zeros_like(low, dtype=torch.float16), torch.zeros_like(low, dtype=torch.uint8)
    for factor in shrink.tolist():
        scale = ((high - low) * factor / top).half()
        if not bool(scale.isfinite().all()):
            found = f"weights up to {float(weight.abs().max()):.3g}"
            raise DamagedModel(name, found, "a range that float16 scales hold", "check it")
        # A group too small for a float16 scale becomes zero; its weights are then all in the residual.
        inverse = torch.where(scale > 0, 1 / scale.float(), 0)
        zero = (-low * factor * inverse).round().clamp(0, top)
        code = ((groups * inverse[..., None]).round() + zero[..., None]).clamp(0, top)
        found_cost = cost((code - zero[..., None]) * scale.float()[..., None] - groups)
        better = found_cost < best
        best = torch.where(better, found_cost, best)
        codes = torch.where(better[..., None], code.to(torch.uint8), codes)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero.to(torch.uint8), zeros)
    return GroupedCodes(codes.reshape(rows, inputs), scales, zeros, bits, group)


def nearest_codes(weight: Tensor, codebook: Tensor) -> Tensor:
    """The index [rows, inputs] uint8 of the entry of ``codebook`` [rows, entries], ascending, nearest each weight."""
    middles = (codebook[:, 1:] + codebook[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), weight.contiguous()).to(torch.uint8)
