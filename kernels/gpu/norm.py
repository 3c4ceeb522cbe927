"""The residual stream's next state and its norm, in one launch.

Formula. ``after = before + added + Σ late`` and ``x = after / sqrt(mean(after²) + epsilon) ⊙ weight``; ``added`` (what
a projection gave) may be missing, and of ``late`` (what refinement gave) there may be up to three. They are set back to
zero once they were read, so that the kernels which add to them find them empty in the next step. Sums are float32.

One program: a state is a few thousand numbers, and the launch is what takes time.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options

__all__ = ["add_norm", "add_norm_reference"]

_MOST_LATE: Final = 3


def add_norm_reference(
    before: Tensor, added: Tensor | None, late: Sequence[Tensor], weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(after, x) in float64, by definition; nothing is changed."""
    after = before.double()
    for part in (*(() if added is None else (added,)), *late):
        after = after + part.double()
    return after, after * torch.rsqrt(after.square().mean() + epsilon) * weight.double()


@triton.jit
def _add_norm(
    before: tl.tensor,
    added: tl.tensor,
    late: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    weight: tl.tensor,
    after: tl.tensor,
    x: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    ADD: tl.constexpr,
    LATE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    inside = i < width
    gain = tl.load(weight + i, mask=inside, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    state = tl.load(before + i, mask=inside, other=0.0)
    if ADD:
        state += tl.load(added + i, mask=inside, other=0.0).to(tl.float32)
    if LATE > 0:
        state += tl.load(late + i, mask=inside, other=0.0)
    if LATE > 1:
        state += tl.load(second + i, mask=inside, other=0.0)
    if LATE > 2:
        state += tl.load(third + i, mask=inside, other=0.0)
    if LATE > 0:
        tl.debug_barrier()  # which thread loads a number is not always which one clears it
        tl.store(late + i, tl.zeros_like(state), mask=inside)
    if LATE > 1:
        tl.store(second + i, tl.zeros_like(state), mask=inside)
    if LATE > 2:
        tl.store(third + i, tl.zeros_like(state), mask=inside)
    if KEEP:
        tl.store(after + i, state, mask=inside)
    # The root as a correctly rounded one: its approximation's last bits would decide ties of a selection.
    factor = 1.0 / tl.sqrt_rn(tl.sum(state * state, 0) / width + epsilon)
    tl.store(x + i, state * factor * gain, mask=inside)


def add_norm(
    before: Tensor,
    added: Tensor | None,
    late: Sequence[Tensor],
    weight: Tensor,
    after: Tensor | None,
    x: Tensor,
    epsilon: float,
    *,
    early: bool = False,
) -> None:
    """Compute ``after`` and ``x``. Queued on the current stream; no allocation.

    Args:
        before: [width] float32.
        added: [width] floats of any width, or None.
        late: up to three [width] float32, set to zero.
        weight: [width] float32.
        after: [width] float32, overwritten; None where only ``x`` is wanted.
        x: [width] float32, float16 or bfloat16, overwritten.
        epsilon: of the norm.
        early: start while the kernel before still runs.

    Raises:
        ValueError: shapes contradict each other, or there are too many.
    """
    if len(late) > _MOST_LATE:
        raise ValueError(f"{len(late)} late parts: at most {_MOST_LATE} have a kernel")
    tensors = [t for t in (before, added, *late, weight, after, x) if t is not None]
    if before.ndim != 1 or any(t.shape != before.shape for t in tensors):
        raise ValueError(f"shapes {[list(t.shape) for t in tensors]}: expected the same [width] each")
    width = before.numel()
    block = triton.next_power_of_2(width)
    _add_norm[(1,)](
        before,
        before if added is None else added,
        *late,
        *[before] * (_MOST_LATE - len(late)),
        weight,
        before if after is None else after,
        x,
        width,
        epsilon,
        ADD=added is not None,
        LATE=len(late),
        KEEP=after is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
        **early_options(x, early),
    )
