"""The fast path of :mod:`strataflux.kernels.lowbit_gemv` for one input (lowbit_gemv_stream.cu).

That module gives the formula, the bytes and the reference. Here weights come through rings in shared memory, which are
filled before the kernel before has ended: few registers are held, so the blocks of two launches, and those of errands,
find room beside each other on a multiprocessor.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from torch import Tensor

from strataflux.kernels.cuda_build import CudaFunction, device_capability, load_function, multiprocessors
from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights, StreamPlan

if TYPE_CHECKING:
    from strataflux.kernels.gpu.errands import Errands

__all__ = ["gemv_stream", "shared_bytes", "stream_instance"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_PIECE: Final = 16


def stream_instance(weights: LowbitWeights, plan: StreamPlan, *, add: bool, beside: bool = False) -> str:
    """The C++ template instance that a product with this plan runs, with errands beside it or without."""
    numbers = weights.bits, _groups(weights), plan.warps, plan.stages, int(add), int(beside)
    return f"lowbit_stream<{','.join(map(str, numbers))}>"


def _groups(weights: LowbitWeights) -> int:
    return STRIP // weights.group if weights.group else 0


def shared_bytes(weights: LowbitWeights, plan: StreamPlan, blocks: int) -> int:
    """Shared memory of a block where so many share the product: rings, the input, and sums that wait for the end."""
    tiles, strips = weights.words.shape[:2]
    stage = 32 * weights.bits + 4 * _groups(weights)
    ring = plan.stages * stage + (0 if weights.group else (plan.stages + 1) * (2 << weights.bits))
    sums = -(-tiles // blocks) * plan.warps * _PIECE * 4
    scratch = 4 * (256 + 8 * 32 * plan.warps)  # what errands take
    return max(scratch, _PIECE * (plan.warps * ring + 32 * strips) + sums)


def gemv_stream(
    weights: LowbitWeights, x: Tensor, y: Tensor, *, add: bool, plan: StreamPlan, errands: "Errands | None"
) -> None:
    """``y = w x`` or ``y += w x``; operands as :func:`~strataflux.kernels.lowbit_gemv.gemv` has checked them.

    Raises:
        ValueError: a plan for fewer inputs or more strips than these.
    """
    tiles, strips = weights.words.shape[:2]
    if x.shape[0] != 1 or plan.warps > strips:
        raise ValueError(
            f"{plan} for a batch of {x.shape[0]} and {strips} strips: streams are for one input and no more warps than "
            "strips"
        )
    device, threads = x.get_device(), 32 * plan.warps
    blocks = min(tiles, multiprocessors(device) * plan.share)
    size = shared_bytes(weights, plan, blocks)
    function = _function(stream_instance(weights, plan, add=add, beside=errands is not None), size, device)
    table, count, beside = 0, 0, 0
    if errands is not None:
        made, beside = errands.table(threads, multiprocessors(device), x.device)
        table, count = made.data_ptr(), len(errands.items)
    pointers = [np.uint64(tensor.data_ptr()) for tensor in (weights.words, weights.meta, x, y)]
    sizes = [np.int32(size) for size in (weights.rows, weights.inputs, strips, tiles, blocks, plan.ahead)]
    arguments: list[np.generic] = [*pointers, *sizes, np.uint64(table), np.int32(count), np.int32(beside)]
    early = plan.early and device_capability(device) >= (9, 0)
    function.launch(beside + blocks, threads, arguments, early=early, shared_bytes=size)


@cache
def _function(instance: str, size: int, device: int) -> CudaFunction:
    function = load_function(_SOURCE, instance, device)
    function.allow_shared(size)
    function.leave_room()
    return function
