"""What a step does for the next one: ask for the groups it selected, and bring those that the one before selected.

A group that matters at one token mostly matters at the next. So what is refined may be selected a step before, and then
nothing of it needs to be waited for: its record is asked for at once (a *prefetch* of FORMAT.md: no look-up), has a
step's time to come, and is looked up and copied to the device shortly before the layer that needs it. Attention takes
it from there (:func:`~strataflux.kernels.gpu.kv_attend.kv_attend`). Records stay for some steps and go on refining:
that costs little, and what mattered lately may matter again. What is there already needs no look-up. Look-ups are
counted, stamped and, where something is absent still, asked for as in :mod:`strataflux.kernels.gpu.kv_refine`.

One launch of few blocks does both, for two layers, beside other work. The fast path is CUDA C++ (kv_fetch.cu), the
portable one the Triton below. Ours.
"""

from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.cuda_build import has_fast_path, load_function
from strataflux.kernels.gpu import cells
from strataflux.kernels.gpu.kv_refine_triton import look_up
from strataflux.kernels.gpu.kv_work import Fetched, KvTiles, Listed
from strataflux.kernels.gpu.select import _request as request
from strataflux.kernels.gpu.select import _scores as scores_of
from strataflux.kernels.kv_encode import KvFormat
from strataflux.proto import layout

__all__ = ["KvRecords", "instance_name", "kv_fetch"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_THREADS: Final = 128
_ASKED: Final = 256
_COPIED: Final = 16

_ABSENT = tl.constexpr(layout.ENTRY_ABSENT)
_PREFETCH = tl.constexpr(layout.PREFETCH)
_ONE = tl.constexpr(0x3F800000)


class KvRecords(NamedTuple):
    """Where records are found."""

    block: Tensor
    """int64, the attach block on the device (:mod:`~strataflux.kernels.gpu.cells`)."""
    thresholds: Tensor
    """:func:`~strataflux.kernels.gpu.select.score_thresholds` of the device."""
    bases: Tensor
    """[blocks] int64: object id of each block's first record, -1 where it has no records."""
    table: int
    """Number of the KV table."""


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


def instance_name(form: KvFormat) -> str:
    """The fast path's template instance."""
    return f"kv_fetch<{form.record_bytes // 16}>"


def kv_fetch(
    cache: KvTiles,
    records: KvRecords,
    asked: tuple[Listed, int],
    fetched: tuple[Fetched, int],
    *,
    path: Literal["cuda", "triton"] | None = None,
) -> None:
    """Ask ahead for what one layer selected, and fetch what another did, inside a step. Queued on the current stream;
    no allocation.

    Args:
        cache: of either layer: its table and its format are read.
        records: where records are found.
        asked: what :func:`~strataflux.kernels.gpu.kv_select.kv_select` listed in this step, and that layer's first
            record in a block: ``layer · kv_heads · groups_per_tile``.
        fetched: a layer's list of the step before, or of this one if that is listed already; its numbers and rows are
            overwritten; and that layer's first record.
        path: ``"cuda"`` or ``"triton"``; where None the first that this machine has.

    Raises:
        CudaError: the fast path cannot be.
    """
    (list_, asked_oid), (to, fetched_oid), form = asked, fetched, cache.form
    owners, room = to.listed.groups.shape
    lists, sizes = to.numbers.shape[1] // room, (cache.kv_heads, cache.table.shape[1])
    where = records.block, records.thresholds, records.bases
    if path == "triton" or (path is None and not has_fast_path(to.rows)):
        of_tile, grid = form.groups_per_tile, triton.cdiv(room, _ASKED)
        _ask[(grid, owners)](
            *where, records.table, cache.table, *list_, asked_oid, *sizes, room, OF_TILE=of_tile, CHUNK=_ASKED
        )
        words, rows = form.record_bytes // 4, (to.numbers, to.held, to.where, to.places)
        _bring[(triton.cdiv(room, _COPIED), owners)](
            *where, records.table, cache.table, *to.listed, *rows, fetched_oid, *sizes, room, lists, words,
            OF_TILE=of_tile, WORDS=triton.next_power_of_2(words), CHUNK=_COPIED,
        )  # fmt: skip
        return
    fetchers = max(1, -(-room // _THREADS))
    tensors = (*where, cache.table, *list_, *to.listed, to.numbers, to.held, to.where, to.rows)
    integers = (records.table, *sizes, form.groups_per_tile, room, lists, to.rows.shape[2], fetchers)
    arguments: list[np.generic] = [np.uint64(tensor.data_ptr()) for tensor in tensors]
    arguments += [np.int64(asked_oid), np.int64(fetched_oid), *(np.int32(value) for value in integers)]
    function = load_function(_SOURCE, instance_name(form), to.rows.get_device())
    function.launch(owners * (1 + fetchers), _THREADS, arguments, early=False)
