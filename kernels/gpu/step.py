"""Begin and end of a step on the device: the first and last node of a step's graph.

The host has stored ``step_begun`` and its full fence before it launches the graph (FORMAT.md, "Life of a step"). The
first node reads how far the daemon got in the request ring; the last one, after all streams have joined, publishes
tail, counters and ``step_ended``, in this order.
"""

import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.gpu import cells
from strataflux.proto import layout

__all__ = ["begin_step", "end_step"]

_CLOCK_AT = tl.constexpr(layout.offset_of(layout.DAEMON_PAGE, "clock"))
_HEAD_AT = tl.constexpr(layout.offset_of(layout.SESSION_VIEW, "ring_head"))
_ENDED_AT = tl.constexpr(layout.offset_of(layout.SESSION_PAGE, "step_ended"))
_TAIL_AT = tl.constexpr(layout.offset_of(layout.SESSION_PAGE, "ring_tail"))
_COUNTERS_AT = tl.constexpr(layout.offset_of(layout.SESSION_PAGE, layout.COUNTERS[0]))


@triton.jit
def _begin(block: tl.tensor) -> None:
    # SYNC: clock (read). Relaxed: a stamp that is a tick old is as good.
    clock = (tl.load(block + cells.DAEMON_PAGE) + _CLOCK_AT).to(tl.pointer_type(tl.uint32))
    tl.store(block + cells.CLOCK, tl.load(clock, volatile=True).to(tl.int64))
    # SYNC: ring-head (read). The kernel's start orders it before every store into the ring.
    head = (tl.load(block + cells.VIEW) + _HEAD_AT).to(tl.pointer_type(tl.int64))
    capacity = tl.full((), 1, tl.int64) << tl.load(block + cells.RING_LOG2)
    tl.store(block + cells.LIMIT, tl.load(head, volatile=True) + capacity)
    tl.store(block + cells.STEP, (tl.load(block + cells.STEP) + 1) & 0xFFFFFFFF)


@triton.jit
def _publish(address: tl.tensor, value: tl.tensor, DEVICE: tl.constexpr) -> None:
    """Store an int32 after all that this thread has seen stored, for whoever reads it with acquire. A store, not an
    exchange: host memory beyond PCIe knows no atomic operations.
    """
    if DEVICE:
        tl.inline_asm_elementwise(
            "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)), value)


@triton.jit
def _end(block: tl.tensor, COUNTERS: tl.constexpr, DEVICE: tl.constexpr) -> None:
    page = tl.load(block + cells.PAGE)
    tail = tl.minimum(tl.load(block + cells.TAIL), tl.load(block + cells.LIMIT))
    tl.store(block + cells.TAIL, tail)
    tl.store(block + cells.RING_DROPPED, tl.load(block + cells.DROPPED))
    tl.debug_barrier()
    number = tl.arange(0, COUNTERS)
    counter = tl.load(block + cells.COUNTERS + number, mask=number < cells.N_COUNTERS, other=0)
    tl.store((page + _COUNTERS_AT + 8 * number).to(tl.pointer_type(tl.int64)), counter, mask=number < cells.N_COUNTERS)
    # SYNC: ring-tail (publish). Entries were stored by earlier kernels.
    tl.store((page + _TAIL_AT).to(tl.pointer_type(tl.int64)), tail)
    tl.debug_barrier()
    # SYNC: step-ended (publish). Release at system scope: all the above is seen before it.
    _publish(page + _ENDED_AT, tl.load(block + cells.STEP).to(tl.int32), DEVICE)


def begin_step(block: Tensor) -> None:
    """Queue the first node: clock, limit of the ring and number of the step into the device's block."""
    _begin[(1,)](block, num_warps=1)


def end_step(block: Tensor) -> None:
    """Queue the last node: tail, counters and ``step_ended`` into the session's page."""
    _end[(1,)](block, COUNTERS=16, DEVICE=block.is_cuda, num_warps=1)
