"""The fast path of :mod:`strataflux.kernels.lowbit_gemv` for one input (lowbit_gemv_stream.cu).

That module gives the formula, the bytes and the reference. Here weights come through rings in shared memory, which are
filled before the kernel before has ended. A block takes more shared memory than it needs, so that no two are on one
multiprocessor: those of a launch that starts early would gather on the few that are free first. So errands find no
place beside it: a product that has some is one of the blocks of lowbit_gemv.cu.
"""

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from strataflux.kernels.cuda_build import CudaFunction, device_capability, load_function, multiprocessors
from strataflux.kernels.gpu.host_memory import device_attribute
from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights, StreamPlan

__all__ = ["fits", "gemv_stream", "shared_bytes", "stream_instance"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_PIECE: Final = 16


def stream_instance(weights: LowbitWeights, plan: StreamPlan, *, add: bool) -> str:
    """The C++ template instance that a product with this plan runs."""
    numbers = weights.bits, _groups(weights), plan.warps, plan.stages, int(add)
    return f"lowbit_stream<{','.join(map(str, numbers))}>"


def _groups(weights: LowbitWeights) -> int:
    return STRIP // weights.group if weights.group else 0


def shared_bytes(weights: LowbitWeights, plan: StreamPlan, blocks: int) -> int:
    """Shared memory of a block where so many share the product: rings, the input, and sums that wait for the end."""
    tiles, strips = weights.words.shape[:2]
    stage = 32 * weights.bits + 4 * _groups(weights)
    ring = plan.stages * stage + (0 if weights.group else (plan.stages + 1) * (2 << weights.bits))
    sums = -(-tiles // blocks) * plan.warps * _PIECE * 4
    return _PIECE * (plan.warps * ring + 32 * strips) + sums


def fits(weights: LowbitWeights, plan: StreamPlan, device: int) -> bool:
    """Whether a block of a device has the shared memory for it: wide inputs take two bytes a channel."""
    blocks = _blocks(weights, plan, device)
    return shared_bytes(weights, plan, blocks) <= device_attribute("shared_bytes_of_a_block", device)


def _blocks(weights: LowbitWeights, plan: StreamPlan, device: int) -> int:
    return min(weights.words.shape[0], multiprocessors(device) * plan.share)


def gemv_stream(weights: LowbitWeights, x: Tensor, y: Tensor, *, add: bool, plan: StreamPlan) -> None:
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
    device = x.get_device()
    blocks = _blocks(weights, plan, device)
    size = max(shared_bytes(weights, plan, blocks), _crowding_bytes(device, plan.share))
    function = _function(stream_instance(weights, plan, add=add), size, device)
    pointers = [np.uint64(tensor.data_ptr()) for tensor in (weights.words, weights.meta, x, y)]
    sizes = [np.int32(size) for size in (weights.rows, weights.inputs, strips, tiles, blocks, plan.ahead)]
    arguments: list[np.generic] = [*pointers, *sizes]
    early = plan.early and device_capability(device) >= (9, 0)
    function.launch(blocks, 32 * plan.warps, arguments, early=early, shared_bytes=size)


@cache
def _function(instance: str, size: int, device: int) -> CudaFunction:
    function = load_function(_SOURCE, instance, device)
    function.allow_shared(size)
    return function


@cache
def _crowding_bytes(device: int, share: int) -> int:
    """Shared memory of a block of which ``share`` fit on a multiprocessor, and no more."""
    return device_attribute("shared_bytes_per_multiprocessor", device) // (share + 1) // _PIECE * _PIECE + _PIECE
