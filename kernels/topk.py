"""How many channels a budget selects, and the selection of many inputs at once; nothing here is compiled.

:mod:`strataflux.kernels.select` gives the formula and the fast path for one input.
"""

import torch
from torch import Tensor

__all__ = ["CHUNK", "largest_mask", "quota", "selected_count"]

CHUNK = 1024
"""Input channels that share one budget k."""


def quota(k: int, channels: int) -> int:
    """How many of ``channels`` (1…1,024, one chunk) are selected with a budget of ``k`` per 1,024."""
    return min(channels, max(1, round(k * channels / CHUNK))) if k else 0


def selected_count(k: int, width: int) -> int:
    """How many channels of an input of ``width`` channels are selected with a budget of ``k`` per 1,024."""
    full, rest = divmod(width, CHUNK)
    return full * quota(k, CHUNK) + (quota(k, rest) if rest else 0)


def largest_mask(x: Tensor, k: int) -> Tensor:
    """Where each input's selected channels are: [..., width] bool for ``x`` [..., width].

    The same channels as :func:`strataflux.kernels.select.select_channels` selects, except that which of several equal
    magnitudes are taken is up to the device.
    """
    mask = torch.zeros_like(x, dtype=torch.bool)
    for start in range(0, x.shape[-1], CHUNK):
        magnitude = torch.nan_to_num(x[..., start : start + CHUNK].abs(), nan=0.0, posinf=torch.inf)
        chosen = magnitude.topk(quota(k, magnitude.shape[-1]), -1, sorted=False).indices
        mask[..., start : start + CHUNK].scatter_(-1, chosen, True)
    return mask
