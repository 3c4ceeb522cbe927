"""Round to nearest: the plainest low-bit base, asymmetric with integer zero-points.

Each group of ``group`` consecutive inputs of a row spans min…max of its weights, zero included; ``scale =
(max - min) / (2^bits - 1)`` rounded to float16, ``zero = round(-min / scale)``, ``code = clip(round(w /
scale) + zero)``. An integer zero-point keeps an exact zero and costs less accuracy than storing the
minimum: the codes then straddle zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.errors import DamagedModel
from strataflux.kernels.lowbit import BITS, dequantize, pack_codes

__all__ = ["GROUPS", "LowBitMatrix", "RtnSettings", "quantize_rtn"]

GROUPS = (64, 128)
"""Supported group lengths."""


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
    groups = weight.view(outputs, inputs // settings.group, settings.group)
    top = (1 << settings.bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / top).half()
    if not bool(scales.isfinite().all()):
        raise DamagedModel(
            name, f"weights up to {float(weight.abs().max()):.3g}", "a range that float16 scales hold", "check it"
        )
    # A group too small for a float16 scale becomes zero; its weights are then all in the residual.
    divisor = torch.where(scales > 0, scales.float(), torch.inf)
    zeros = (-low / divisor).round().clamp(0, top)
    codes = ((groups / divisor[..., None]).round() + zeros[..., None]).clamp(0, top)
    packed = pack_codes(codes.view(outputs, inputs).to(torch.uint8), settings.bits)
    return LowBitMatrix(packed, scales, zeros.to(torch.uint8), settings.bits, settings.group)
