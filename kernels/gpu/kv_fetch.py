"""Groups asked for ahead, and records brought to the device: the portable path of kv_fetch.cuh, in Triton.

:mod:`strataflux.kernels.gpu.kv_beside` says what for.
"""

from typing import Final

import triton
import triton.language as tl

from strataflux.kernels.gpu import cells
from strataflux.kernels.gpu.kv_refine_triton import look_up
from strataflux.kernels.gpu.kv_work import Fetched, KvRecords, KvTiles, Listed
from strataflux.kernels.gpu.select import _request as request
from strataflux.kernels.gpu.select import _scores as scores_of
from strataflux.proto import layout

__all__ = ["ask_portable", "bring_portable"]

_ASKED: Final = 256
_COPIED: Final = 16

_ABSENT = tl.constexpr(layout.ENTRY_ABSENT)
_PREFETCH = tl.constexpr(layout.PREFETCH)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def _oids(
    blocks: tl.tensor, bases: tl.tensor, group: tl.tensor, first_oid: tl.tensor, here: tl.tensor, OF_TILE: tl.constexpr
) -> tl.tensor:
    """Object ids of groups, below 0 where there is no record."""
    place = tl.load(blocks + group // OF_TILE, mask=here, other=0)
    base = tl.load(bases + place, mask=here, other=-1)
    return tl.where(base < 0, -1, base + first_oid + group % OF_TILE)


@triton.jit
def _ask(
    block: tl.tensor,
    thresholds: tl.tensor,
    bases: tl.tensor,
    table: tl.tensor,
    tile_blocks: tl.tensor,
    groups: tl.tensor,
    counts: tl.tensor,
    strengths: tl.tensor,
    first_oid: tl.tensor,
    kv_heads: tl.tensor,
    most_tiles: tl.tensor,
    room: tl.tensor,
    OF_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    owner = tl.program_id(1)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    here, at = i < tl.load(counts + owner), owner.to(tl.int64) * room + i
    group = tl.load(groups + at, mask=here, other=0)
    blocks, first = tile_blocks + owner // kv_heads * most_tiles, first_oid + owner % kv_heads * OF_TILE
    oid = _oids(blocks, bases, group, first, here, OF_TILE)
    half = (tl.full((), 1, tl.int64) << tl.load(block + cells.RING_LOG2)) // 2
    open_ = tl.load(block + cells.TAIL, volatile=True) < tl.load(block + cells.LIMIT) - half
    known = here & (oid >= 0) & (tl.load(block + cells.ENABLED) != 0) & open_
    directory = tl.load(block + cells.TABLES + cells.TABLE_CELLS * table)
    words = (directory + oid * 4).to(tl.pointer_type(tl.uint32))
    # SYNC: directory-entry (read).
    asked = known & (tl.load(words, mask=known, other=1, volatile=True).to(tl.int64) == _ABSENT)
    if tl.sum(asked.to(tl.int32), 0) > 0:
        bits = tl.load(strengths + at, mask=asked, other=0.0).to(tl.int32, bitcast=True)
        score = scores_of(bits, tl.full((), _ONE, tl.int32), thresholds, asked)
        request(block, table, oid | _PREFETCH, score, (tl.cumsum(asked.to(tl.int32), 0) - 1).to(tl.int64), asked)


@triton.jit
def _bring(
    block: tl.tensor,
    thresholds: tl.tensor,
    bases: tl.tensor,
    table: tl.tensor,
    tile_blocks: tl.tensor,
    groups: tl.tensor,
    counts: tl.tensor,
    strengths: tl.tensor,
    numbers: tl.tensor,
    held: tl.tensor,
    where: tl.tensor,
    places: tl.tensor,
    first_oid: tl.tensor,
    kv_heads: tl.tensor,
    most_tiles: tl.tensor,
    room: tl.tensor,
    lists: tl.tensor,
    words: tl.tensor,
    OF_TILE: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    owner = tl.program_id(1)
    i, word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, WORDS)
    here, at = i < tl.load(counts + owner), owner.to(tl.int64) * room + i
    group = tl.load(groups + at, mask=here, other=0)
    blocks, first = tile_blocks + owner // kv_heads * most_tiles, first_oid + owner % kv_heads * OF_TILE
    turn = (tl.load(block + cells.STEP) % lists).to(tl.int32)
    row, oldest = turn * room + i, (turn + 1) % lists * room + i
    mine = owner.to(tl.int64) * lists * room
    numbers += mine
    held += mine
    places += mine
    where += owner.to(tl.int64) * most_tiles * OF_TILE
    last = tl.load(where + group, mask=here, other=0)
    kept = here & (last // room != turn) & (tl.load(held + last, mask=here, other=-1) == group)
    oid = _oids(blocks, bases, group, first, here, OF_TILE)
    share = tl.load(strengths + at, mask=here, other=0.0)
    found = look_up(block, thresholds, table, oid, share, here & (oid >= 0) & (kept == 0))
    address = tl.where(kept, tl.load(places + last, mask=kept, other=0), found)
    number = tl.where(address != 0, group, -1)
    tl.store(numbers + row, number, mask=i < room)
    tl.store(held + row, number, mask=i < room)
    tl.store(numbers + oldest, -1, mask=i < room)
    tl.store(numbers + last, -1, mask=kept)
    tl.store(where + group, row, mask=address != 0)
    inside = (address != 0)[:, None] & (word < words)[None, :]
    source = address.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
    target = tl.load(places + row, mask=here, other=0).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0), mask=inside)


def ask_portable(cache: KvTiles, records: KvRecords, asked: Listed, first_oid: int) -> None:
    """Ask ahead for what was listed; arguments as of :class:`~strataflux.kernels.gpu.kv_beside.Beside`."""
    owners, room = asked.groups.shape
    _ask[(triton.cdiv(room, _ASKED), owners)](
        records.block,
        records.thresholds,
        records.bases,
        records.table,
        cache.table,
        *asked,
        first_oid,
        cache.kv_heads,
        cache.table.shape[1],
        room,
        OF_TILE=cache.form.groups_per_tile,
        CHUNK=_ASKED,
    )


def bring_portable(cache: KvTiles, records: KvRecords, fetched: Fetched, first_oid: int) -> None:
    """Bring what was listed; likewise."""
    (owners, room), words = fetched.listed.groups.shape, cache.form.record_bytes // 4
    _bring[(triton.cdiv(room, _COPIED), owners)](
        records.block,
        records.thresholds,
        records.bases,
        records.table,
        cache.table,
        *fetched.listed,
        fetched.numbers,
        fetched.held,
        fetched.where,
        fetched.places,
        first_oid,
        cache.kv_heads,
        cache.table.shape[1],
        room,
        fetched.numbers.shape[1] // room,
        words,
        OF_TILE=cache.form.groups_per_tile,
        WORDS=triton.next_power_of_2(words),
        CHUNK=_COPIED,
    )
