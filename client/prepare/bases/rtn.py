"""Round to nearest: the plainest low-bit base, asymmetric with integer zero-points.

Each group of ``group`` consecutive inputs of a row spans min…max of its weights, zero included. For a shrink factor c,

    scale = c · (max - min) / (2^bits - 1), rounded to float16
    zero  = round(-c · min / scale)
    code  = clip(round(w / scale) + zero, 0, 2^bits - 1)

Of seven factors 1.00, 0.95 … 0.70 the one with the least ``Σ |error|^p`` is taken, p = 2.5: at 3 bits a few clipped
ends cost less than a coarser grid for all. The exponent, between squares and cubes, keeps large errors rarer than
squares would (GPTQ's reference search uses 2.4). An integer zero-point keeps zero exact and costs less accuracy than
storing the minimum does.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.errors import DamagedModel
from strataflux.kernels.lowbit import BITS, dequantize, pack_codes
from strataflux.proto.compiled import compiled

__all__ = ["EXPONENT", "FACTORS", "GROUPS", "LEAST_FACTOR", "LowBitMatrix", "RtnSettings", "quantize_rtn"]

GROUPS = (64, 128)
"""Supported group lengths."""

FACTORS, LEAST_FACTOR, EXPONENT = 7, 0.7, 2.5
"""The search: how many shrink factors, the least of them, and p."""

_SHRINK = torch.linspace(1.0, LEAST_FACTOR, FACTORS)


@dataclass(frozen=True)
class RtnSettings:
    """What the base is made of.

    Raises:
        MisuseError: on construction, naming the setting and what is supported.
    """

    bits: int = 3
    group: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise MisuseError("bits", f"{self.bits}", "2, 3 or 4", "choose one of these")
        if self.group not in GROUPS:
            raise MisuseError("group", f"{self.group}", "64 or 128", "choose one of these")

    def to_json(self) -> dict[str, Any]:
        """Everything that decides which codes a weight gets, for a model's identity."""
        search = {"factors": FACTORS, "least_factor": LEAST_FACTOR, "exponent": EXPONENT}
        return {"name": "rtn", "bits": self.bits, "group": self.group, "zero_points": "integer", "search": search}


@dataclass(frozen=True)
class LowBitMatrix:
    """A packed matrix; see :mod:`strataflux.kernels.lowbit` for the bytes."""

    codes: Tensor
    """[outputs, inputs · bits / 8] uint8."""
    scales: Tensor
    """[outputs, inputs / group] float16."""
    zeros: Tensor
    """[outputs, inputs / group] uint8."""
    bits: int
    group: int

    def dequantized(self) -> Tensor:
        """[outputs, inputs] float32."""
        return dequantize(self.codes, self.scales, self.zeros, self.bits, self.group)


def quantize_rtn(name: str, weight: Tensor, settings: RtnSettings) -> LowBitMatrix:
    """Quantize ``weight`` [outputs, inputs] float32; ``name`` is for errors.

    Raises:
        MisuseError: the inputs are not a multiple of the group.
        DamagedModel: a group's range exceeds float16.
    """
    outputs, inputs = weight.shape
    if inputs % settings.group:
        raise MisuseError(
            "group", f"{settings.group} for {name} with {inputs} inputs", "a divisor of the inputs", "use 64"
        )
    groups = weight.view(outputs, inputs // settings.group, settings.group).contiguous()
    top = (1 << settings.bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low)[..., None] * _SHRINK / top).half()
    # The first option has the largest scale of all.
    if not bool(scales[..., 0].isfinite().all()):
        raise DamagedModel(
            name, f"weights up to {float(weight.abs().max()):.3g}", "a range that float16 scales hold", "check it"
        )
    # A group too small for a float16 scale becomes zero; its weights are then all in the residual.
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    zeros = (-low[..., None] * _SHRINK * inverse).round().clamp(0, top)
    best = torch.empty((*groups.shape[:2], 1), dtype=torch.int64)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    options = (scales.float().numpy(), inverse.numpy(), zeros.numpy())
    _quantize(groups.numpy(), *options, top, best[..., 0].numpy(), codes.view(groups.shape).numpy())
    scale, zero = scales.gather(-1, best)[..., 0], zeros.gather(-1, best)[..., 0].to(torch.uint8)
    return LowBitMatrix(pack_codes(codes, settings.bits), scale, zero, settings.bits, settings.group)


@compiled
def _quantize(
    groups: NDArray[np.float32],
    scales: NDArray[np.float32],
    inverse: NDArray[np.float32],
    zeros: NDArray[np.float32],
    top: int,
    best: NDArray[np.int64],
    codes: NDArray[np.uint8],
) -> None:
    """Choose for each of ``groups`` [rows, groups, group] one of its options [rows, groups, options]."""
    error = np.empty(scales.shape[2], np.float32)
    limit = np.float32(top)
    for row in range(groups.shape[0]):
        for group in range(groups.shape[1]):
            values, factors, offsets = groups[row, group], inverse[row, group], zeros[row, group]
            error[:] = 0
            _add_errors(values, scales[row, group], factors, offsets, limit, error)
            chosen = np.argmin(error)
            best[row, group] = chosen
            for i in range(values.size):
                code = np.rint(values[i] * factors[chosen]) + offsets[chosen]
                codes[row, group, i] = np.uint8(min(limit, max(np.float32(0), code)))


@compiled
def _add_errors(
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    inverse: NDArray[np.float32],
    zeros: NDArray[np.float32],
    top: np.float32,
    error: NDArray[np.float32],
) -> None:
    # Options side by side, as in the residual's search: vectorised, and no sum changes its order.
    for i in range(values.size):
        value = values[i]
        for c in range(error.size):
            code = min(top, max(np.float32(0), np.rint(value * inverse[c]) + zeros[c]))
            miss = abs((code - zeros[c]) * scales[c] - value)
            error[c] += miss * miss * np.sqrt(miss)  # miss ** EXPONENT, without a call to pow
