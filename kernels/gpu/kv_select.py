"""Which token groups matter now: the exact n with the largest shares of the attention, for each KV head.

Formula. A group's share is ``max over the heads h of the KV head of Σ_{t in group} 2^(l_t - m_h) / Z_h``
(:mod:`strataflux.kernels.kv_attention`); of the groups in tiles the ``max(1, floor(fraction · groups))`` strongest are
selected, equal ones by lower number. A group's *key* is the bits of its share over the inverted group number: keys are
all different and order as that rule does, so that a selection is one number, the *floor*: the n-th largest key.

Two launches: one computes shares and counts them by their leading bits. On the fast path, CUDA C++ (kv_select.cu), one
block a KV head goes on with further bits and lists the selected groups. On the portable one, the Triton below, the
other launch collects the keys of the bin in which the n-th lies, and its last program for a KV head bisects them. How
many groups there are is read on the device.
"""

from fractions import Fraction
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.cuda_build import device_capability, has_fast_path, load_function
from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.kv_work import BINS_LOG2, KvWork, Listed
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["kv_select", "select_reference", "share_key"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_COUNTING_THREADS: Final = 256
_CHOOSING_THREADS: Final = 1024
_CHUNK: Final = 1024
_BISECTED: Final = 4096

_TILE = tl.constexpr(TILE_TOKENS)
_BINS = tl.constexpr(1 << BINS_LOG2)
_BIN_SHIFT = tl.constexpr(30 - BINS_LOG2)  # a share is at most 1: its two highest bits are zeros
_LAST = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)


def select_reference(shares: Tensor, count: int) -> Tensor:
    """Numbers of the ``count`` groups with the largest ``shares`` [..., groups], the strongest first, by definition."""
    return torch.argsort(shares, dim=-1, descending=True, stable=True)[..., :count]


@triton.jit
def share_key(share: tl.tensor, group: tl.tensor) -> tl.tensor:
    """Keys of groups: int64, not negative, ordered by share and then by lower number."""
    bits = share.to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (~group & _LAST).to(tl.int64)


@triton.jit
def _shares(
    positions: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    tile_tops: tl.tensor,
    shares: tl.tensor,
    bins: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    pieces: tl.tensor,
    most_tiles: tl.tensor,
    HEADS: tl.constexpr,
    OF_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    owner = tl.program_id(1)
    group, piece = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, SPLITS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.maximum(tl.load(positions + owner // kv_heads) // _TILE - 1, 0) * OF_TILE
    if tl.program_id(0) * CHUNK < count:
        inside = group < count
        share = tl.zeros((CHUNK,), tl.float32)
        for h in tl.static_range(HEADS):
            head = (owner * HEADS + h).to(tl.int64)
            top = tl.load(tops + head * pieces + piece, mask=piece < splits, other=float("-inf"))
            most = tl.max(top, 0)
            total = tl.load(totals + head * pieces + piece, mask=top > float("-inf"), other=0.0)
            total = tl.sum(total * tl.exp2(top - most), 0)
            tile_top = tl.load(tile_tops + head * most_tiles + group // OF_TILE, mask=inside, other=float("-inf"))
            weight = tl.load(sums + head * most_tiles * OF_TILE + group, mask=inside, other=0.0)
            share = tl.maximum(share, weight * (tl.exp2(tile_top - most) / total))
        # Maxima may be of refined logits, beside which the totals of what is resident vanish.
        share = tl.minimum(share, 1.0)
        tl.store(shares + owner.to(tl.int64) * most_tiles * OF_TILE + group, share, mask=inside)
        counted = tl.histogram(share.to(tl.int32, bitcast=True) >> _BIN_SHIFT, _BINS, mask=inside)
        bin_ = tl.arange(0, _BINS)
        tl.atomic_add(bins + owner * _BINS + bin_, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _bisect(keys: tl.tensor, count: tl.tensor, wanted: tl.tensor, low: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """The ``wanted``-th largest of ``count`` different keys, or a lower number that exactly as many reach.

    ``low`` is the lowest number of their bin; all of them lie in it.
    """
    i = tl.arange(0, KEYS)
    held = tl.load(keys + i, mask=i < count, other=-1, volatile=True)  # mostly all of them
    high = low + (tl.full((), 1, tl.int64) << (32 + _BIN_SHIFT))
    while high - low > 1:
        middle = low + (high - low) // 2
        reach = tl.sum((held >= middle).to(tl.int32), 0)
        for first in range(KEYS, count, KEYS):
            more = tl.load(keys + first + i, mask=first + i < count, other=-1, volatile=True)
            reach += tl.sum((more >= middle).to(tl.int32), 0)
        low = tl.where(reach >= wanted, middle, low)
        high = tl.where(reach > wanted, high, tl.where(reach == wanted, middle + 1, middle))
    return low


@triton.jit
def _pick(
    positions: tl.tensor,
    shares: tl.tensor,
    bins: tl.tensor,
    keys: tl.tensor,
    counts: tl.tensor,
    floors: tl.tensor,
    kv_heads: tl.tensor,
    most_groups: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    OF_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    chunk, owner = tl.program_id(0), tl.program_id(1)
    group, bin_ = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, _BINS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.maximum(tl.load(positions + owner // kv_heads) // _TILE - 1, 0) * OF_TILE
    if count == 0:
        if chunk == 0:
            tl.store(floors + owner, _NOTHING)
    elif chunk * CHUNK < count:
        wanted = tl.maximum(count.to(tl.int64) * numerator // denominator, 1).to(tl.int32)
        counted = tl.load(bins + owner * _BINS + bin_)
        # Groups in this bin and above: as many bins as reach `wanted` lie below the one after the last that does.
        reach = count - tl.cumsum(counted, 0) + counted
        border = tl.sum((reach >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(bin_ > border, counted, 0), 0)

        row = owner.to(tl.int64) * most_groups
        share = tl.load(shares + row + group, mask=group < count, other=-1.0)
        here = (share.to(tl.int32, bitcast=True) >> _BIN_SHIFT) == border
        rank = tl.cumsum(here.to(tl.int32), 0)
        first = tl.atomic_add(counts + 2 * owner, tl.sum(here.to(tl.int32), 0), sem="relaxed")
        tl.store(keys + row + first + rank - 1, share_key(share, group), mask=here)
        tl.debug_barrier()  # every thread has stored its keys before one of them says so
        if tl.atomic_add(counts + 2 * owner + 1, 1, sem="acq_rel") == tl.cdiv(count, CHUNK) - 1:
            found = tl.load(counts + 2 * owner, volatile=True)
            low = border.to(tl.int64) << (32 + _BIN_SHIFT)
            tl.store(floors + owner, _bisect(keys + row, found, wanted, low, KEYS))
            tl.store(bins + owner * _BINS + bin_, tl.zeros((_BINS,), tl.int32))
            tl.store(counts + 2 * owner + tl.arange(0, 2), tl.zeros((2,), tl.int32))


@triton.jit
def _list(
    positions: tl.tensor,
    shares: tl.tensor,
    floors: tl.tensor,
    listed: tl.tensor,
    counts: tl.tensor,
    strengths: tl.tensor,
    kv_heads: tl.tensor,
    most_groups: tl.tensor,
    room: tl.tensor,
    OF_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    owner = tl.program_id(0)
    count = tl.maximum(tl.load(positions + owner // kv_heads) // _TILE - 1, 0) * OF_TILE
    floor = tl.load(floors + owner)
    found = tl.zeros((), tl.int32)
    for first in range(0, count, CHUNK):
        group = first + tl.arange(0, CHUNK)
        share = tl.load(shares + owner.to(tl.int64) * most_groups + group, mask=group < count, other=0.0)
        chosen = (group < count) & (share_key(share, group) >= floor)
        at = owner.to(tl.int64) * room + found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(listed + at, group, mask=chosen)
        tl.store(strengths + at, share, mask=chosen)
        found += tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + owner, found)


def kv_select(
    positions: Tensor,
    work: KvWork,
    fraction: Fraction,
    listed: Listed | None = None,
    *,
    path: Literal["cuda", "triton"] | None = None,
    early: bool = False,
) -> None:
    """Find each KV head's floor from what attention left, and list its selected groups. Queued on the current stream;
    no allocation.

    Args:
        positions: as given to :func:`~strataflux.kernels.gpu.kv_attend.kv_attend`.
        work: made with refiners; shares and floors are overwritten.
        fraction: how many of the groups in tiles are selected, above 0 and at most 1.
        listed: overwritten with them, with room for all; None: the list that ``work`` has, and on the portable path
            none, since its refinement goes by the floor.
        path: ``"cuda"`` or ``"triton"``; where None the first that this machine has. Refinement takes the same.
        early: start while the kernel before still runs.

    Raises:
        ValueError: no such fraction, or nothing is refined with ``work``. CudaError: the fast path cannot be.
    """
    if not 0 < fraction <= 1 or not work.refiners:
        raise ValueError(f"a fraction of {fraction} with {work.refiners} refiners: above 0, at most 1, and 1 or more")
    if path == "triton" or (path is None and not has_fast_path(positions)):
        _bisected(positions, work, fraction, early)
        if listed is not None:
            _list_portable(positions, work, listed)
    else:
        _counted(positions, work, fraction, listed, early)


def _counted(positions: Tensor, work: KvWork, fraction: Fraction, listed: Listed | None, early: bool) -> None:
    """The fast path."""
    owners, device = work.shares.shape[0], positions.get_device()
    kv_heads, (groups, of_tile) = owners // work.batch, (work.shares.shape[1], work.form.groups_per_tile)
    hopper = device_capability(device) >= (9, 0)
    chunks = -(-groups // (4 * _COUNTING_THREADS))
    tensors = (positions, work.tops, work.totals, work.sums, work.tile_tops, work.shares, work.bins)
    sizes = (kv_heads, work.splits, work.splits + work.refiners, work.tiles, of_tile, chunks)
    shares = load_function(_SOURCE, f"kv_shares<{work.heads // kv_heads}, {_COUNTING_THREADS}>", device)
    arguments: list[np.generic] = [np.uint64(tensor.data_ptr()) for tensor in tensors]
    arguments += [np.int32(size) for size in sizes]
    shares.launch(owners * chunks, _COUNTING_THREADS, arguments, early=early and hopper)
    choose = load_function(_SOURCE, f"kv_choose<{_CHOOSING_THREADS}>", device)
    to = work.listed if listed is None else listed
    left = (work.shares, work.bins, work.floors, to.groups, to.strengths, to.counts)
    arguments = [np.uint64(tensor.data_ptr()) for tensor in (positions, *left)]
    arguments += [np.int32(size) for size in (kv_heads, groups, to.groups.shape[1], of_tile)]
    arguments += [np.int64(fraction.numerator), np.int64(fraction.denominator)]
    # Few blocks wait for few others: that never hurts.
    choose.launch(owners, _CHOOSING_THREADS, arguments, early=hopper)


def _bisected(positions: Tensor, work: KvWork, fraction: Fraction, early: bool) -> None:
    """The portable path."""
    form, owners = work.form, work.shares.shape[0]
    kv_heads = owners // work.batch
    groups = work.shares.shape[1]
    grid = (triton.cdiv(groups, _CHUNK), owners)
    _shares[grid](
        positions,
        work.tops,
        work.totals,
        work.sums,
        work.tile_tops,
        work.shares,
        work.bins,
        kv_heads,
        work.splits,
        work.splits + work.refiners,
        work.tiles,
        HEADS=work.heads // kv_heads,
        OF_TILE=form.groups_per_tile,
        SPLITS=triton.next_power_of_2(work.splits),
        CHUNK=_CHUNK,
        num_warps=4,
        **early_options(positions, early),
    )
    _pick[grid](
        positions,
        work.shares,
        work.bins,
        work.keys,
        work.counts,
        work.floors,
        kv_heads,
        groups,
        fraction.numerator,
        fraction.denominator,
        OF_TILE=form.groups_per_tile,
        CHUNK=_CHUNK,
        KEYS=_BISECTED,
        num_warps=8,
        **early_options(positions, early),
    )


def _list_portable(positions: Tensor, work: KvWork, listed: Listed) -> None:
    owners, groups = work.shares.shape
    _list[(owners,)](
        positions,
        work.shares,
        work.floors,
        listed.groups,
        listed.counts,
        listed.strengths,
        owners // work.batch,
        groups,
        listed.groups.shape[1],
        OF_TILE=work.form.groups_per_tile,
        CHUNK=_CHUNK,
        num_warps=4,
    )
