"""4-bit NormalFloats, the frozen base of QLoRA (Dettmers et al. 2023): each weight by the nearest value of one table.

The scale of a group is the largest magnitude in it, rounded to float16 before codes are chosen. Nothing is searched and
no text is needed.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.matrices import NormalFloatCodes, nearest_codes
from strataflux.client.prepare.errors import DamagedModel
from strataflux.kernels.nf4 import NF4, NF4_BITS

__all__ = ["NF4_GROUPS", "Nf4Settings", "quantize_nf4"]

NF4_GROUPS: Final = (64, 128)
"""Supported group lengths; QLoRA's is 64."""


@dataclass(frozen=True)
class Nf4Settings:
    """What the base is made of.

    Raises:
        MisuseError: on construction, naming the setting and what is supported.
    """

    bits: int = NF4_BITS
    group: int = 64

    def __post_init__(self) -> None:
        if self.bits != NF4_BITS:
            raise MisuseError("bits", f"{self.bits} with nf4", f"{NF4_BITS}", "leave --bits away, or use another base")
        if self.group not in NF4_GROUPS:
            raise MisuseError("group", f"{self.group}", "64 or 128", "choose one of these")

    def to_json(self) -> dict[str, Any]:
        """Everything that decides which codes a weight gets, for a model's identity."""
        return {"name": "nf4", "bits": self.bits, "group": self.group, "scale": "absmax"}


def quantize_nf4(name: str, weight: Tensor, settings: Nf4Settings) -> NormalFloatCodes:
    """Quantize ``weight`` [outputs, inputs] float32, inputs a multiple of the group; ``name`` is for errors.

    Raises:
        DamagedModel: a group's largest magnitude exceeds float16.
    """
    groups = weight.view(weight.shape[0], -1, settings.group)
    scales = groups.abs().amax(-1).half()
    if not bool(scales.isfinite().all()):
        found = f"weights up to {float(weight.abs().max()):.3g}"
        raise DamagedModel(name, found, "a range that float16 scales hold", "check it")
    # A group too small for a float16 scale becomes zero; its weights are then all in the residual.
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    table = torch.tensor([NF4], device=weight.device)
    shares = (groups * inverse[..., None]).view(1, -1)
    return NormalFloatCodes(nearest_codes(shares, table).view(weight.shape), scales, settings.group)
