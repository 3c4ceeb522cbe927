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
from strataflux.kernels.gpu.kv_attend import tile_codes
from strataflux.kernels.gpu.kv_select import share_key
from strataflux.kernels.gpu.kv_work import KvTiles, KvWork
from strataflux.kernels.gpu.select import _find as find_slots
from strataflux.kernels.gpu.select import _request as request
from strataflux.kernels.gpu.select import _scores as scores_of
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.proto import layout

__all__ = ["refine_portable"]

_LISTED: Final = 1024
_TOKENS: Final = 16

_ABSENT = tl.constexpr(layout.ENTRY_ABSENT)
_QUARANTINED = tl.constexpr(layout.ENTRY_QUARANTINED)
_TILE = tl.constexpr(TILE_TOKENS)
_ROWS = tl.constexpr(16)
_EIGHT = tl.constexpr(8)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def _look_up(
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
def _refinement(
    address: tl.tensor, eight: tl.tensor, there: tl.tensor, BITS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
    """Refinement codes [TOKENS, D] of tokens whose ``eight``-th run of eight codes [TOKENS, D/8] begins at
    ``address + BITS · eight``.
    """
    at, mask = address[:, None] + BITS * eight, there[:, None]
    if BITS == 4:
        word = tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    elif BITS == 2:
        word = tl.load(at.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        word = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32)
        if BITS == 3:
            word |= tl.load((at + 1).to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32) << 8
            word |= tl.load((at + 2).to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32) << 16
    codes = (word[:, :, None] >> (BITS * tl.arange(0, _EIGHT))[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, (TOKENS, D)).to(tl.float32)


@triton.jit
def _moved(code: tl.tensor, part: tl.tensor, BITS: tl.constexpr, FINE: tl.constexpr) -> tl.tensor:
    """How far refinement moves a code: to the middle of its part of the code's interval."""
    last: tl.constexpr = (1 << BITS) - 1
    middle = (part + 0.5) * (1.0 / (1 << FINE))
    width = tl.where((code == 0.0) | (code == last), 0.5, 1.0)
    return middle * width - tl.where(code == 0.0, 0.0, 0.5)


@triton.jit
def _tokens_of(
    address: tl.tensor,
    base: tl.tensor,
    token: tl.tensor,
    there: tl.tensor,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes [TOKENS, D] of tokens in the tiles at ``base`` [TOKENS, 1], and how far each is moved."""
    i = tl.arange(0, D)
    code = tile_codes(base, token, i, BITS, D)
    if FINE == 0:
        return code, tl.zeros_like(code)
    part = _refinement(address, tl.arange(0, D // 8)[None, :], there, FINE, TOKENS, D)
    return code, _moved(code, part, BITS, FINE)


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
            address = _look_up(block, thresholds, table, oid, share, chosen & (base >= 0))
            hit = address != 0
            at = found + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(listed + at, group, mask=hit)
            tl.store(addresses + at, address, mask=hit)
            found += tl.sum(hit.to(tl.int32), 0)
    return found


@triton.jit
def _round(
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    q: tl.tensor,
    start: tl.tensor,
    found: tl.tensor,
    blocks: tl.tensor,
    listed: tl.tensor,
    addresses: tl.tensor,
    kv_heads: tl.tensor,
    kv_head: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FINE: tl.constexpr,
    VALUE_FINE: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state after ``TOKENS`` tokens more, of the groups listed from ``start`` on."""
    i, t = tl.arange(0, D), tl.arange(0, TOKENS)
    at = start + t // GROUP
    there = at < found
    group = tl.load(listed + at, mask=there, other=0)
    tile = tl.load(blocks + group * GROUP // _TILE).to(tl.int64) * kv_heads + kv_head
    token = group * GROUP % _TILE + t % GROUP
    channel, of_token = tile[:, None] * D + i[None, :], tile * _TILE + token
    # Slots begin at multiples of 256 bytes, which the compiler cannot know.
    record = tl.multiple_of(tl.load(addresses + at, mask=there, other=0), 256)
    of_keys, of_values = record + t % GROUP * (D * KEY_FINE // 8), record + GROUP * D * KEY_FINE // 8
    of_values += t % GROUP * (D * VALUE_FINE // 8)
    # Both halves of the records are asked for before any is used.
    base = value_codes + tile[:, None] * (_TILE * D * VALUE_BITS // 8)
    value, value_move = _tokens_of(of_values, base, token, there, VALUE_BITS, VALUE_FINE, TOKENS, D)
    base = key_codes + tile[:, None] * (_TILE * D * KEY_BITS // 8)
    key, key_move = _tokens_of(of_keys, base, token, there, KEY_BITS, KEY_FINE, TOKENS, D)

    scale = tl.load(key_scale + channel).to(tl.float32)
    other = tl.load(key_other + of_token).to(tl.float32)[:, None]
    key = (key * scale + tl.load(key_zero + channel).to(tl.float32)) * other
    before = tl.dot(q, tl.trans(key), input_precision="tf32x3")
    after = before + tl.dot(q, tl.trans(key_move * scale * other), input_precision="tf32x3")
    before = tl.where(there[None, :], before, float("-inf"))
    after = tl.where(there[None, :], after, float("-inf"))
    new = tl.maximum(top, tl.max(tl.maximum(before, after), 1))
    keep, come, gone = tl.exp2(top - new), tl.exp2(after - new[:, None]), tl.exp2(before - new[:, None])

    scale = tl.load(value_scale + of_token).to(tl.float32)[:, None]
    other = tl.load(value_other + channel).to(tl.float32)
    value = (value * scale + tl.load(value_zero + of_token).to(tl.float32)[:, None]) * other
    mixed = mixed * keep[:, None] + tl.dot(come - gone, value, input_precision="tf32x3")
    mixed += tl.dot(come, value_move * scale * other, input_precision="tf32x3")
    return new, total * keep + tl.sum(come - gone, 1), mixed


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
            top, total, mixed = _round(
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
    halves = [t for half in (cache.keys, cache.values) for t in (half.codes, half.scale, half.zero, half.other)]
    _refine[(work.refiners, owners)](
        positions,
        work.queries,
        *halves,
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
