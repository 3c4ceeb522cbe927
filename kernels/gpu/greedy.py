"""The most probable token: where the largest of the logits is.

Formula. ``token = min(argmax(logits))``: of equal ones the first; a NaN ranks below every number. Programs take every
``programs``-th block, and each leaves its largest in one 64-bit word by an atomic maximum: the number's bits in an
order that integers have, above the index counted down. The program that ends last takes the word and clears it.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["GreedyScratch", "take_largest"]

_BLOCK: Final = 1024
_PROGRAMS: Final = 64
_LAST_INDEX = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-(1 << 63))


class GreedyScratch:
    """What programs of one launch leave for each other; made once."""

    def __init__(self, device: torch.device) -> None:
        self.largest = torch.full((1,), _NOTHING.value, dtype=torch.int64, device=device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=device)


@triton.jit
def _take_largest(
    logits: tl.tensor, largest: tl.tensor, tickets: tl.tensor, token: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    best = tl.full((), _NOTHING, tl.int64)
    for block in range(tl.program_id(0), tl.cdiv(width, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + index, mask=index < width, other=float("-inf")).to(tl.float32)
        bits = tl.where(value == value, value, float("-inf")).to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers order the other way round
        key = (order.to(tl.int64) << 32) | (index ^ _LAST_INDEX).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(index < width, key, _NOTHING), 0))
    tl.atomic_max(largest, best, sem="relaxed")
    if tl.atomic_add(tickets, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(tickets, 0)
        found = tl.atomic_xchg(largest, _NOTHING, sem="relaxed")
        tl.store(token, (found & _LAST_INDEX) ^ _LAST_INDEX)


def take_largest(logits: Tensor, token: Tensor, scratch: GreedyScratch) -> None:
    """Put the index of the largest of ``logits`` into ``token``. Queued on the current stream; no allocation.

    Args:
        logits: [width] floats of any width, contiguous; at least one, and fewer than 2^31.
        token: [1] int64, overwritten.
        scratch: of the device; used by one launch at a time.

    Raises:
        ValueError: shapes without a kernel.
    """
    width = logits.numel()
    if logits.ndim != 1 or not 0 < width < 1 << 31 or token.shape != (1,) or token.dtype != torch.int64:
        raise ValueError(f"logits {list(logits.shape)}, token {list(token.shape)} {token.dtype}: expected [width], [1]")
    programs = min(_PROGRAMS, triton.cdiv(width, _BLOCK))
    _take_largest[(programs,)](logits, scratch.largest, scratch.tickets, token, width, BLOCK=_BLOCK, num_warps=4)
