"""The MLP's gate: ``x = silu(gate) ⊙ up`` for the outputs of ``gate_up``, refinement included.

Formula. ``[gate, up] = y + late``; ``silu(g) = g / (1 + exp(-g))``. ``late`` is set back to zero once it was read.
Arithmetic is float32. A float16 result is held within ±65,504: the few channels that could exceed it would otherwise
become infinite and turn every output into a NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options

__all__ = ["gate", "gate_reference"]

_BLOCK = 1024


def gate_reference(y: Tensor, late: Tensor | None) -> Tensor:
    """``x`` [width] float64, by definition; nothing is changed."""
    first, second = (y.double() if late is None else y.double() + late.double()).chunk(2)
    return silu(first) * second


@triton.jit
def _gate(
    y: tl.tensor,
    late: tl.tensor,
    x: tl.tensor,
    width: tl.tensor,
    most: tl.tensor,
    LATE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(y + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(y + width + i, mask=inside, other=0.0).to(tl.float32)
    if LATE:
        first += tl.load(late + i, mask=inside, other=0.0)
        second += tl.load(late + width + i, mask=inside, other=0.0)
        tl.debug_barrier()  # which thread loads a number is not always which one clears it
        tl.store(late + i, tl.zeros_like(first), mask=inside)
        tl.store(late + width + i, tl.zeros_like(first), mask=inside)
    value = first / (1.0 + tl.exp(-first)) * second
    tl.store(x + i, tl.minimum(tl.maximum(value, -most), most), mask=inside)


def gate(y: Tensor, late: Tensor | None, x: Tensor, *, early: bool = False) -> None:
    """Compute ``x``. Queued on the current stream; no allocation.

    Args:
        y: [2 · width] floats of any width.
        late: [2 · width] float32, added and set to zero; or None.
        x: [width] float32, float16 or bfloat16, overwritten.
        early: start while the kernel before still runs.

    Raises:
        ValueError: shapes contradict each other.
    """
    width = x.numel()
    if y.numel() != 2 * width or (late is not None and late.numel() != 2 * width):
        raise ValueError(f"y {list(y.shape)} and x {list(x.shape)}: expected [2 · width] and [width]")
    _gate[(triton.cdiv(width, _BLOCK),)](
        y,
        y if late is None else late,
        x,
        width,
        float(torch.finfo(x.dtype).max),
        LATE=late is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **early_options(x, early),
    )
