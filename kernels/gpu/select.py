"""Select, look up, request and stamp in one launch: what :mod:`strataflux.kernels.select` and the client's look-up do.

Formula. Of each chunk of 1,024 channels the ``quota(k, n)`` largest ``|x|`` are selected, equal ones by lower index;
a channel's record number is ``first_oid + channel``. Present records are stamped, absent ones go into the request
ring with their score, up to the step's limit; what does not fit is counted.

A program handles one chunk. It bisects the bits of ``|x|``, which order as the numbers do, until as many channels lie
at or above the middle as are wanted: mostly a dozen counts, 31 where only ties tell channels apart. Its part of the
output begins at ``chunk · quota(k, 1024)``: hits first, then misses, each ascending, so that equal inputs and entries
give equal lists whatever order programs run in.

The fast path is CUDA C++ (select.cu): a thread a channel, and barriers that count. The portable one is the Triton
below. Both give the same lists.
"""

from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.cuda_build import device_capability, has_fast_path, load_function
from strataflux.kernels.gpu import cells
from strataflux.kernels.select import SCORE_THRESHOLDS
from strataflux.kernels.topk import CHUNK, quota, selected_count
from strataflux.proto import layout

__all__ = ["Selection", "score_thresholds", "select_and_look_up"]

_SOURCE = Path(__file__).with_suffix(".cu")
_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_ABSENT = tl.constexpr(layout.ENTRY_ABSENT)
_QUARANTINED = tl.constexpr(layout.ENTRY_QUARANTINED)
_LAP_SHIFT = tl.constexpr(layout.LAP_SHIFT)
_LAPS = tl.constexpr(layout.LAPS)
_SCORE_SHIFT = tl.constexpr(layout.SCORE_SHIFT)
_TABLE_SHIFT = tl.constexpr(layout.TABLE_SHIFT)
_INFINITY = tl.constexpr(0x7F800000)


class Selection:
    """Where a selection of ``k`` of ``width`` channels goes: device memory that is made once and reused.

    Attributes:
        channels: [selected] int32 channel numbers, overwritten by each selection.
        addresses: [selected] int64, where each channel's record lies for the GPU, 0 where it is absent; they hold until
            the step's end.
    """

    def __init__(self, k: int, width: int, device: torch.device) -> None:
        selected = selected_count(k, width)
        self.k, self.width = k, width
        self.channels = torch.zeros(selected, dtype=torch.int32, device=device)
        self.addresses = torch.zeros(selected, dtype=torch.int64, device=device)


def score_thresholds(device: torch.device) -> Tensor:
    """The thresholds of :mod:`strataflux.kernels.select`, [256] float32 with an infinity at the end, for the kernel."""
    return torch.cat((torch.from_numpy(SCORE_THRESHOLDS), torch.tensor([torch.inf]))).to(device)


@triton.jit
def _magnitudes(x: tl.tensor, index: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Bits of ``|x|``; a NaN ranks as zero, what lies beyond the input below everything."""
    value = tl.load(x + index, mask=index < width, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits > _INFINITY, 0, bits)
    return tl.where(index < width, bits, -1)


@triton.jit
def _floor(bits: tl.tensor, largest: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """The largest magnitude that at least ``wanted`` reach, or a lower one that exactly ``wanted`` reach."""
    low = largest * 0
    high = largest + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reach = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(reach >= wanted, middle, low)
        high = tl.where(reach > wanted, high, tl.where(reach == wanted, middle + 1, middle))
    return low


@triton.jit
def _scores(bits: tl.tensor, largest: tl.tensor, thresholds: tl.tensor, asked: tl.tensor) -> tl.tensor:
    """Scores by comparison with thresholds: the logarithm only says where to look, its last bit decides nothing."""
    share = tl.math.div_rn(bits.to(tl.float32, bitcast=True), largest.to(tl.float32, bitcast=True))
    share = tl.where(bits == _INFINITY, 1.0, tl.where(bits > 0, share, 0.0))
    near = tl.math.floor(16.0 * (tl.math.log2(tl.maximum(share, 1e-6)) + 12.0))
    at = tl.minimum(tl.maximum(near, 0.0), 254.0).to(tl.int32)
    above = (share >= tl.load(thresholds + at + 1, mask=asked, other=0.0)).to(tl.int32)
    below = (share < tl.load(thresholds + at, mask=asked, other=0.0)).to(tl.int32)
    return tl.minimum(tl.maximum(at + 1 + above - below, 1), 255)


@triton.jit
def _find(block: tl.tensor, entry: tl.tensor, candidate: tl.tensor) -> tl.tensor:
    """Addresses of slots that entries name, 0 where they name none that is mapped."""
    slot = entry - 1
    chunk = tl.minimum(slot >> cells.CHUNK_UNITS_LOG2, tl.load(block + cells.LAST_CHUNK))
    base = tl.load(block + cells.BASES + chunk, mask=candidate, other=0)
    page = (slot >> cells.PAGE_UNITS_LOG2) & (cells.CHUNK_PAGES - 1)
    offset = (slot & cells.CHUNK_UNITS_MASK) << cells.UNIT_BYTES_LOG2
    return tl.where(candidate & (page < (base & cells.PAGES_MASK)), (base & ~cells.PAGES_MASK) + offset, 0)


@triton.jit
def _request(
    block: tl.tensor, table: tl.tensor, oid: tl.tensor, score: tl.tensor, rank: tl.tensor, asked: tl.tensor
) -> None:
    """Put what is asked for into the ring: positions from a counter in device memory, one 8-byte store an entry."""
    count = tl.sum(asked.to(tl.int64), 0)
    position = tl.atomic_add(block + cells.TAIL, count, sem="relaxed") + rank
    limit = tl.load(block + cells.LIMIT)
    log2 = tl.load(block + cells.RING_LOG2)
    fits = asked & (position < limit)
    lap = 1 + (position >> log2) % _LAPS
    entry = (
        (lap << _LAP_SHIFT) | (score.to(tl.int64) << _SCORE_SHIFT) | (tl.cast(table, tl.int64) << _TABLE_SHIFT) | oid
    )
    cell = tl.load(block + cells.RING) + (position & ((1 << log2) - 1)) * 8
    # SYNC: ring-entry (publish). One 8-byte store: a request announces no bytes, only itself.
    tl.store(cell.to(tl.pointer_type(tl.int64)), entry, mask=fits, cache_modifier=".wt")
    lost = count - tl.sum(fits.to(tl.int64), 0)
    tl.atomic_add(block + cells.DROPPED, lost, mask=lost > 0, sem="relaxed")


@triton.jit
def _select(
    x: tl.tensor,
    block: tl.tensor,
    thresholds: tl.tensor,
    channels: tl.tensor,
    addresses: tl.tensor,
    width: tl.tensor,
    table: tl.tensor,
    first_oid: tl.tensor,
    full_quota: tl.tensor,
    last_quota: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    enabled = tl.load(block + cells.ENABLED) != 0
    directory = tl.load(block + cells.TABLES + cells.TABLE_CELLS * table)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = _magnitudes(x, index, width)
    largest = tl.max(bits, 0)
    wanted = tl.where(chunk == tl.num_programs(0) - 1, last_quota, full_quota)

    # One scan counts what lies above the floor (low half) and on it (high half): of the latter the first ones count.
    floor = _floor(bits, largest, wanted)
    counts = tl.cumsum((bits > floor).to(tl.int32) + ((bits == floor).to(tl.int32) << 16), 0)
    spare = wanted - tl.sum((bits > floor).to(tl.int32), 0)
    selected = (bits > floor) | ((bits == floor) & ((counts >> 16) <= spare))
    place = (counts & 0xFFFF) + tl.minimum(counts >> 16, spare) - 1

    oid = first_oid + index.to(tl.int64)
    words = (directory + oid * 4).to(tl.pointer_type(tl.uint32))
    # SYNC: directory-entry (read). Volatile: never from a cache that an earlier launch filled.
    entry = tl.load(words, mask=selected & enabled, other=0, volatile=True).to(tl.int64)
    named = selected & enabled & (entry != _ABSENT) & (entry != _QUARANTINED)
    address = _find(block, entry, named)
    hit = address != 0
    asked = selected & enabled & (entry == _ABSENT)

    ranks = tl.cumsum(hit.to(tl.int32) + (asked.to(tl.int32) << 16), 0)
    hits = tl.sum(hit.to(tl.int32), 0)
    rank = ranks & 0xFFFF
    at = chunk * full_quota + tl.where(hit, rank - 1, hits + place - rank)
    tl.store(channels + at, index, mask=selected)
    tl.store(addresses + at, address, mask=selected)

    stamp = tl.load(block + cells.STAMPS) + (entry - 1) * 4
    clock = tl.load(block + cells.CLOCK).to(tl.uint32)
    tl.store(stamp.to(tl.pointer_type(tl.uint32)), clock + tl.zeros_like(index).to(tl.uint32), mask=hit)
    score = _scores(bits, largest, thresholds, asked)
    _request(block, table, oid, score, ((ranks >> 16) - 1).to(tl.int64), asked)

    counter = block + tl.load(block + cells.TABLES + cells.TABLE_CELLS * table + 2)
    tl.atomic_add(counter, wanted.to(tl.int64), sem="relaxed")
    tl.atomic_add(counter + 1, hits.to(tl.int64), sem="relaxed")
    rubbish = tl.sum((named & (address == 0)).to(tl.int64), 0)
    tl.atomic_add(block + cells.RUBBISH, rubbish, mask=rubbish > 0, sem="relaxed")
    unasked = tl.where(enabled, 0, wanted).to(tl.int64)
    tl.atomic_add(block + cells.DROPPED, unasked, mask=unasked > 0, sem="relaxed")


def select_and_look_up(
    x: Tensor,
    block: Tensor,
    thresholds: Tensor,
    selection: Selection,
    table: int,
    first_oid: int,
    *,
    path: Literal["cuda", "triton"] | None = None,
    early: bool = True,
) -> None:
    """Fill ``selection`` for the input ``x``, inside a step. Queued on the current stream; no allocation.

    Args:
        x: [width] float32, float16 or bfloat16, contiguous.
        block: int64, the attach block on the device (:mod:`~strataflux.kernels.gpu.cells`).
        thresholds: :func:`score_thresholds` of the device.
        selection: overwritten.
        table: table number; its directory has at least ``first_oid + width`` records, which the client has checked.
        first_oid: record of channel 0.
        path: ``"cuda"`` or ``"triton"``; where None the first that this machine has.
        early: let the fast path start while the kernel before still runs, where the device can do that.

    Raises:
        ValueError: ``x`` is not of the width that the selection was made for, not contiguous, or of another type.
        CudaError: the fast path was asked for and cannot be.
    """
    if x.shape != (selection.width,):
        raise ValueError(f"an input of shape {list(x.shape)}: the selection was made for [{selection.width}]")
    if x.dtype not in _TYPES or not x.is_contiguous():
        raise ValueError(
            f"an input of {x.dtype}, strides {x.stride()}: contiguous floats of 32 or 16 bits have a kernel"
        )
    if not selection.channels.numel():
        return
    chunks = -(-selection.width // CHUNK)
    quotas = quota(selection.k, CHUNK), quota(selection.k, selection.width - (chunks - 1) * CHUNK)
    tensors = (x, block, thresholds, selection.channels, selection.addresses)
    if path == "triton" or (path is None and not has_fast_path(x)):
        _select[(chunks,)](*tensors, selection.width, table, first_oid, *quotas, CHUNK=CHUNK, num_warps=16)
    else:
        device = x.get_device()
        function = load_function(_SOURCE, f"select_and_look_up<{_TYPES[x.dtype]}>", device)
        pointers = [np.uint64(tensor.data_ptr()) for tensor in tensors]
        sizes = [np.int32(size) for size in (selection.width, table, *quotas)]
        starts_early = early and device_capability(device) >= (9, 0)
        function.launch(chunks, CHUNK, [*pointers, np.int64(first_oid), *sizes], early=starts_early)
