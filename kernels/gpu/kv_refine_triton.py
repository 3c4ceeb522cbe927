"""The portable path of :mod:`strataflux.kernels.gpu.kv_refine`, in Triton.

A program handles every ``refiners``-th eight groups of one KV head, so that a run of strong groups is shared by all. It
lists those that reach the floor: looks each up, stamps what is present, asks for what is not; then it reads the present
ones in place, a block of tokens at a time.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu import cells
from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.kv_correct_triton import correct_round
from strataflux.kernels.gpu.kv_select import share_key
from strataflux.kernels.gpu.kv_work import KvTiles, KvWork, halves_of
from strataflux.kernels.gpu.select import _find as find_slots
from strataflux.kernels.gpu.select import _request as request
from strataflux.kernels.gpu.select import _scores as scores_of
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.proto import layout

__all__ = ["look_up", "refine_portable"]

_LISTED: Final = 1024
_TOKENS: Final = 16

_ABSENT = tl.constexpr(layout.ENTRY_ABSENT)
_QUARANTINED = tl.constexpr(layout.ENTRY_QUARANTINED)
_TILE = tl.constexpr(TILE_TOKENS)
_ROWS = tl.constexpr(16)
_EIGHT = tl.constexpr(8)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def look_up(
    block: tl.tensor,
    thresholds: tl.tensor,
    table: tl.tensor,
    oid: tl.tensor,
    share: tl.tensor,
    known: tl.tensor,
) -> tl.tensor:
    """Addresses of records ``oid`` where ``known``, 0 where absent; stamps, requests and counts as select does."""
    enabled = tl.load(block + cells.ENABLED) != 0
    directory = tl.load(block + cells.TABLES + cells.TABLE_CELLS * table)
    words = (directory + oid * 4).to(tl.pointer_type(tl.uint32))
    # SYNC: directory-entry (read). Volatile: never from a cache that an earlier launch filled.
    entry = tl.load(words, mask=known & enabled, other=0, volatile=True).to(tl.int64)
    named = known & enabled & (entry != _ABSENT) & (entry != _QUARANTINED)
    address = find_slots(block, entry, named)
    hit = address != 0
    asked = known & enabled & (entry == _ABSENT)
    stamp = tl.load(block + cells.STAMPS) + (entry - 1) * 4
    clock = tl.load(block + cells.CLOCK).to(tl.uint32)
    tl.store(stamp.to(tl.pointer_type(tl.uint32)), clock + tl.zeros_like(oid).to(tl.uint32), mask=hit)
    if tl.sum(asked.to(tl.int32), 0) > 0:
        bits = share.to(tl.int32, bitcast=True)
        score = scores_of(bits, tl.full((), _ONE, tl.int32), thresholds, asked)
        request(block, table, oid, score, (tl.cumsum(asked.to(tl.int32), 0) - 1).to(tl.int64), asked)
    wanted = tl.sum(known.to(tl.int64), 0)
    hits, rubbish = tl.sum(hit.to(tl.int64), 0), tl.sum((named & (address == 0)).to(tl.int64), 0)
    counter = block + tl.load(block + cells.TABLES + cells.TABLE_CELLS * table + 2)
    tl.atomic_add(counter, wanted, mask=wanted > 0, sem="relaxed")
    tl.atomic_add(counter + 1, hits, mask=hits > 0, sem="relaxed")
    tl.atomic_add(block + cells.RUBBISH, rubbish, mask=rubbish > 0, sem="relaxed")
    unasked = tl.where(enabled, 0, wanted)
    tl.atomic_add(block + cells.DROPPED, unasked, mask=unasked > 0, sem="relaxed")
    return address


@triton.jit
def _list(
    block: tl.tensor,
    thresholds: tl.tensor,
    table: tl.tensor,
    bases: tl.tensor,
    blocks: tl.tensor,
    shares: tl.tensor,
    floor: tl.tensor,
    first_oid: tl.tensor,
    listed: tl.tensor,
    addresses: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    OF_TILE: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """List this program's selected groups that are present; how many there are."""
    found = tl.zeros((), tl.int32)
    for first in range(0, most, LISTED):
        k = first + tl.arange(0, LISTED)
        group = (k // _EIGHT * tl.num_programs(0) + tl.program_id(0)) * _EIGHT + k % _EIGHT
        inside = (k < most) & (group < count)
        share = tl.load(shares + group, mask=inside, other=0.0)
        chosen = inside & (share_key(share, group) >= floor)
        if tl.sum(chosen.to(tl.int32), 0) > 0:
            place = tl.load(blocks + group // OF_TILE, mask=chosen, other=0)
            base = tl.load(bases + place, mask=chosen, other=-1)
            oid = base + first_oid + group % OF_TILE
            address = look_up(block, thresholds, table, oid, share, chosen & (base >= 0))
            hit = address != 0
            at = found + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(listed + at, group, mask=hit)
            tl.store(addresses + at, address, mask=hit)
            found += tl.sum(hit.to(tl.int32), 0)
    return found


@triton.jit
def _refine(
    positions: tl.tensor,
    queries: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    tile_blocks: tl.tensor,
    shares: tl.tensor,
    floors: tl.tensor,
    listed: tl.tensor,
    addresses: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    block: tl.tensor,
    thresholds: tl.tensor,
    bases: tl.tensor,
    table: tl.tensor,
    first_oid: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    most_tiles: tl.tensor,
    most: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FINE: tl.constexpr,
    VALUE_FINE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    LISTED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    owner, refiner = tl.program_id(1), tl.program_id(0)
    sequence, kv_head = owner // kv_heads, owner % kv_heads
    row, i = tl.arange(0, _ROWS), tl.arange(0, D)
    of_tile: tl.constexpr = _TILE // GROUP
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.maximum(tl.load(positions + sequence) // _TILE - 1, 0) * of_tile
    blocks = tile_blocks + sequence * most_tiles
    mine = (owner * tl.num_programs(0) + refiner).to(tl.int64) * most
    listed += mine
    addresses += mine
    found = _list(
        block, thresholds, table, bases, blocks, shares + owner.to(tl.int64) * most_tiles * of_tile,
        tl.load(floors + owner), first_oid + kv_head * of_tile, listed, addresses, count, most, of_tile, LISTED,
    )  # fmt: skip

    head = (owner * HEADS + row).to(tl.int64)
    inside = row < HEADS
    top = tl.full((_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((_ROWS,), tl.float32)
    mixed = tl.zeros((_ROWS, D), tl.float32)
    if found > 0:
        tl.debug_barrier()  # what other threads listed
        q = tl.load(queries + head[:, None] * D + i[None, :], mask=inside[:, None], other=0.0)
        for start in range(0, found, TOKENS // GROUP):
            top, total, mixed = correct_round(
                top, total, mixed, q, start, found, blocks, listed, addresses, kv_heads, kv_head, key_codes, key_scale,
                key_zero, key_other, value_codes, value_scale, value_zero, value_other, D, KEY_BITS, VALUE_BITS,
                KEY_FINE, VALUE_FINE, GROUP, TOKENS,
            )  # fmt: skip
    at = head * (splits + tl.num_programs(0)) + splits + refiner
    tl.store(tops + at, top, mask=inside)
    tl.store(totals + at, total, mask=inside)
    if found > 0:
        tl.store(parts + at[:, None] * D + i[None, :], mixed, mask=inside[:, None])


def refine_portable(
    positions: Tensor,
    cache: KvTiles,
    work: KvWork,
    where: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[int, int],
    *,
    early: bool,
) -> None:
    """As :func:`~strataflux.kernels.gpu.kv_refine.kv_refine`; ``where`` are block, thresholds and bases, ``numbers``
    the table's and the first object id.
    """
    form, owners = cache.form, work.shares.shape[0]
    _refine[(work.refiners, owners)](
        positions,
        work.queries,
        *halves_of(cache),
        cache.table,
        work.shares,
        work.floors,
        work.groups,
        work.addresses,
        work.parts,
        work.tops,
        work.totals,
        *where,
        *numbers,
        cache.kv_heads,
        work.splits,
        work.tiles,
        work.most,
        D=form.head_dim,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        KEY_FINE=form.refine_key_bits,
        VALUE_FINE=form.refine_value_bits,
        HEADS=work.heads // cache.kv_heads,
        GROUP=form.group_tokens,
        TOKENS=max(_TOKENS, form.group_tokens),
        LISTED=min(_LISTED, triton.next_power_of_2(work.most)),
        num_warps=4,
        **early_options(positions, early),
    )
