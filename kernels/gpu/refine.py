"""Refinement from slots in place: ``y += scale ⊙ Σ_i x_i · (code_i - 8)`` over the records that are present.

:mod:`strataflux.kernels.refine` gives the record's bytes and the reference. The records lie in host memory and cross
the link once, so a program asks for a whole block of them (``rows`` records × ``words`` words of eight outputs)
before it uses any; the link is full from about 80 KiB in flight. Sums are float32. A program owns its outputs and
adds its records in list order, so equal lists give equal bits; with ``split`` > 1 several programs share an output's
records and their sums meet in whatever order they end.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.gpu.select import Selection

__all__ = ["RefinePlan", "refine"]


class RefinePlan(NamedTuple):
    """How refinement is spread: at most ``programs`` programs, blocks of ``rows`` records by ``words`` words, ``split``
    programs an output. ``split`` = 1 is deterministic.
    """

    programs: int
    rows: int = 32
    words: int = 32
    split: int = 1
    warps: int = 4


@triton.jit
def _refine(
    y: tl.tensor,
    x: tl.tensor,
    channels: tl.tensor,
    addresses: tl.tensor,
    scale: tl.tensor,
    selected: tl.tensor,
    outputs: tl.tensor,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    columns = tl.cdiv(outputs, 8 * WORDS)
    nibble = tl.arange(0, 8)
    for unit in range(tl.program_id(0), columns * SPLIT, tl.num_programs(0)):
        word = unit % columns * WORDS + tl.arange(0, WORDS)
        total = tl.zeros((WORDS, 8), tl.float32)
        for first in range(unit // columns * ROWS, selected, ROWS * SPLIT):
            row = first + tl.arange(0, ROWS)
            address = tl.load(addresses + row, mask=row < selected, other=0)
            channel = tl.load(channels + row, mask=row < selected, other=0)
            # An absent record's input must not come near the sum: it may be infinite.
            weight = tl.load(x + channel, mask=address != 0, other=0.0).to(tl.float32)
            # Slots begin at multiples of 256 bytes, which the compiler cannot know: only so are loads 16 bytes wide.
            source = tl.multiple_of(address[:, None].to(tl.pointer_type(tl.int32)), (256, 256)) + word[None, :]
            codes = tl.load(source, mask=(address != 0)[:, None] & (8 * word < outputs)[None, :], other=0)
            values = ((codes[:, :, None] >> (4 * nibble)[None, None, :]) & 15) - 8
            total += tl.sum(values.to(tl.float32) * weight[:, None, None], 0)
        output = 8 * word[:, None] + nibble[None, :]
        inside = output < outputs
        tl.atomic_add(y + output, total * tl.load(scale + output, mask=inside, other=0.0), mask=inside, sem="relaxed")


def refine(y: Tensor, x: Tensor, selection: Selection, scale: Tensor, plan: RefinePlan) -> None:
    """Add the refinement of the selected channels to ``y``. Queued on the current stream; no allocation.

    Args:
        y: [outputs] float32, added to atomically: the base product may add to it at the same time.
        x: [width] float32, float16 or bfloat16: the input that was selected from.
        selection: of this step; its records stay where they are until the step ends.
        scale: [outputs] float32.
        plan: how the work is spread.

    Raises:
        ValueError: shapes contradict each other.
    """
    if x.shape != (selection.width,) or y.ndim != 1 or scale.shape != y.shape:
        raise ValueError(
            f"x {list(x.shape)}, y {list(y.shape)}, scale {list(scale.shape)}: expected [{selection.width}] and twice "
            "[outputs]"
        )
    selected = selection.channels.numel()
    if not selected:
        return
    units = -(-y.numel() // (8 * plan.words)) * plan.split
    _refine[(min(plan.programs, units),)](
        y,
        x,
        selection.channels,
        selection.addresses,
        scale,
        selected,
        y.numel(),
        ROWS=plan.rows,
        WORDS=plan.words,
        SPLIT=plan.split,
        num_warps=plan.warps,
    )
