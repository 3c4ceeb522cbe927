"""How many channels a budget selects, and the selection of many inputs at once; nothing here is compiled.

:mod:`strataflux.kernels.select` gives the formula and the fast path for one input.
"""

from collections.abc import Collection

import torch
from torch import Tensor

__all__ = ["CHUNK", "largest_mask", "largest_masks", "quota", "selected_count"]

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
    return largest_masks(x, (k,))[k]


def largest_masks(x: Tensor, budgets: Collection[int]) -> dict[int, Tensor]:
    """:func:`largest_mask` of each of ``budgets``, with one look for the largest."""
    masks = {k: torch.zeros_like(x, dtype=torch.bool) for k in budgets}
    for start in range(0, x.shape[-1], CHUNK):
        magnitude = torch.nan_to_num(x[..., start : start + CHUNK].abs(), nan=0.0, posinf=torch.inf)
        width = magnitude.shape[-1]
        most = quota(max(budgets), width)
        # Fewer are the first of more only if they come in order.
        chosen = magnitude.topk(most, -1, sorted=len(budgets) > 1).indices
        for k, mask in masks.items():
            mask[..., start : start + CHUNK].scatter_(-1, chosen[..., : quota(k, width)], True)
    return masks
