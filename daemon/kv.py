"""KV places: the memory and the file of a session that puts KV blocks. Python; the loop sees arrays only.

A place is one share of the KV budget. What is in it belongs to one session from creation to destruction: its segments
of the cache, its directory, its file (anonymous: nothing is left when the daemon dies), its write buffers. States:
FREE ── open ──► OPEN ── close ──► CLOSING ── settled (no read, write or grace holds it) ──► FREE.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.daemon import puts, requests
from strataflux.daemon.errors import Refusal
from strataflux.daemon.kv_file import KvSpace, Reserve, anonymous_file, free_bytes
from strataflux.daemon.kv_ranges import as_ranges, listed
from strataflux.daemon.rows import KV_KIND
from strataflux.daemon.state import (
    BLOCK_BUFFERED,
    BLOCK_GRANTED,
    BLOCK_NONE,
    BLOCK_WRITTEN,
    KV,
    NONE,
    TABLE,
    WRITES_A_PLACE,
    Core,
)
from strataflux.daemon.store import direct_alignment
from strataflux.proto import layout
from strataflux.proto.messages import KvGeometry
from strataflux.proto.segment import Segment, create

__all__ = ["KvPlace", "KvSettings"]

_COUNTERS = ("puts", "refused", "written", "failed", "write_bytes")
_STRIDE = 64
_FILE_ALIGNMENT = 4096


@dataclass(frozen=True)
class KvSettings:
    """What KV may use. ``places`` sessions share ``cache_bytes`` evenly; each file is bounded by ``file_bytes`` and
    leaves ``free_bytes`` of its file system alone. ``reserve`` is what reserves space in it.
    """

    folder: Path
    cache_bytes: int = 0
    places: int = 1
    file_bytes: int = 64 << 30
    free_bytes: int = 1 << 30
    reserve: Reserve = os.posix_fallocate


class KvPlace:
    """One place. All calls come from the reader thread between two runs of the loop.

    Pairs: ``open`` / ``begin_close`` then ``finish_close``; ``begin_grant`` / ``finish_grant`` or ``cancel_grant``;
    ``give_back`` until it says so, then ``are_quiet`` until it does / ``take_back``.
    """

    def __init__(
        self, core: Core, number: int, settings: KvSettings, segments: range, stride_pages: int, domain: int, table: int
    ) -> None:
        # fixed after construction
        self.number = number
        self.domain = domain
        self.table = table
        self.settings = settings
        self._core = core
        self._segments = segments
        self._stride_pages = stride_pages
        self._section = int(len(core.sections) - len(core.kv) + number)
        # while open
        self.memory: list[Segment] = []
        self.directory: Segment | None = None
        self._private: list[NDArray[Any]] = []
        self._buffers: mmap.mmap | None = None
        self._descriptors: list[int] = []
        self._free_blocks: list[int] = []
        self._promised = 0

    @property
    def row(self) -> Any:
        """The place's words in the core."""
        return self._core.kv[self.number]

    def first_slots(self) -> list[int]:
        """First slot number of each segment."""
        return [segment * self._stride_pages * layout.UNITS_PER_PAGE for segment in self._segments[: len(self.memory)]]

    def open(self, session: int, geometry: KvGeometry, staging: int, staging_bytes: int, put_ring: int) -> None:
        """Make the memory, directory and file of a session; ``staging`` and ``put_ring`` are addresses in its segment.

        Raises:
            Refusal: a geometry that the place cannot hold. SegmentError, OSError: no memory or no file.
        """
        stride = layout.round_up(geometry.record_bytes, _STRIDE)
        block_stride = layout.round_up(geometry.groups_per_block * stride, _FILE_ALIGNMENT)
        self._check(geometry, block_stride)
        records = geometry.groups_per_block * geometry.max_blocks
        try:
            descriptor, buffered, alignment = self._open_file()
            self._make_cache(geometry.record_bytes, WRITES_A_PLACE * block_stride)
            self.directory = create("strataflux-kv-directory", layout.round_up(4 * records, 4096), reserve=False)
            pending, checksums = np.zeros(records, np.uint32), np.zeros(records, np.uint32)
            blocks = np.zeros(geometry.max_blocks, np.uint8)
            self._private = [pending, checksums, blocks]
            self._buffers = mmap.mmap(-1, WRITES_A_PLACE * block_stride)
            buffers = int(np.frombuffer(self._buffers, np.uint8).ctypes.data)
        except BaseException:
            self.drop()
            raise
        windows = self._core.windows[self._first_window : self._first_window + WRITES_A_PLACE]
        windows["state"] = 0
        windows["buffer"] = buffers + np.arange(WRITES_A_PLACE) * block_stride
        cls = self._class_of(geometry.record_bytes)
        self._core.sections[self._section] = (
            *(0, records, geometry.record_bytes, stride, 0, cls),
            *(geometry.groups_per_block, block_stride, 0),
        )
        table = np.zeros(1, TABLE)[0]
        table["active"], table["records"] = 1, records
        table["directory"], table["pending"] = self.directory.address, pending.ctypes.data
        table["checksums"] = checksums.ctypes.data
        table["first_section"], table["sections"] = self._section, 1
        table["descriptor"], table["buffered"] = descriptor, buffered
        table["direct"], table["alignment"] = descriptor != buffered, alignment
        table["preload_next"], table["kv"] = NONE, self.number
        self._core.tables[self.table] = table
        row = np.zeros(1, KV)[0]
        row["active"], row["session"], row["table"] = 1, session, self.table
        row["records"], row["bytes"] = geometry.groups_per_block, geometry.record_bytes
        row["heads"] = geometry.groups_per_block * geometry.group_tokens // geometry.block_tokens
        row["stride"], row["block_stride"] = stride, block_stride
        row["max_blocks"], row["blocks"] = geometry.max_blocks, blocks.ctypes.data
        row["staging"], row["staging_bytes"], row["put_ring"] = staging, staging_bytes, put_ring
        row["window"] = NONE
        for name in _COUNTERS:  # totals over all sessions that had the place
            row[name] = self.row[name]
        self._core.kv[self.number] = row
        self._free_blocks = list(range(geometry.max_blocks - 1, -1, -1))

    def _check(self, geometry: KvGeometry, block_stride: int) -> None:
        buffers = WRITES_A_PLACE * block_stride
        share = self.settings.cache_bytes // self.settings.places
        needed = buffers + layout.CACHE_PAGE_BYTES
        if needed > share:
            raise Refusal(
                "too_large",
                "kv",
                f"{needed} bytes for {WRITES_A_PLACE} write buffers of a block and one page of cache",
                f"at most {share} bytes, cache.kv_bytes / kv.sessions",
                "raise --kv-cache",
            )
        window = int(self._core.rd[0]["window_bytes"])
        if geometry.record_bytes + 2 * _FILE_ALIGNMENT > window:
            raise Refusal(
                "too_large",
                "kv.record_bytes",
                f"{geometry.record_bytes} bytes",
                f"at most {window - 2 * _FILE_ALIGNMENT}",
                "use smaller groups",
            )
        size = geometry.max_blocks * block_stride
        if size > self.settings.file_bytes:
            raise Refusal(
                "quota",
                "kv.max_blocks",
                f"{geometry.max_blocks} blocks, {size} bytes on disk",
                f"at most {self.settings.file_bytes} bytes",
                "decode a shorter context, or raise kv.file_bytes",
            )

    @property
    def _first_window(self) -> int:
        return int(self._core.rd[0]["depth"]) + self.number * WRITES_A_PLACE

    def _class_of(self, record_bytes: int) -> int:
        """The place's size class; its slot size changes only while it owns no page."""
        size = layout.slot_bytes(record_bytes)
        classes = self._core.pages.classes
        known = np.flatnonzero(classes["budget"][: self._core.pages.sizes[0]] == self.domain)
        if known.size:
            cls = int(known[0])
            classes[cls]["slot_bytes"], classes[cls]["per_page"] = size, layout.CACHE_PAGE_BYTES // size
        else:
            cls = budget.add_class(self._core.pages, size, self.domain)
        self._core.classes[cls]["units"] = size // layout.SLOT_UNIT_BYTES
        self._core.classes[cls]["kind"] = KV_KIND
        self._core.rd[0]["n_classes"] = self._core.pages.sizes[0]
        return cls

    def _make_cache(self, record_bytes: int, buffer_bytes: int) -> None:
        """Segments for the place's share of the budget, less its write buffers."""
        self._class_of(record_bytes)
        share = self.settings.cache_bytes // self.settings.places
        left = (share - buffer_bytes) // layout.CACHE_PAGE_BYTES
        for segment in self._segments:
            pages = min(left, self._stride_pages)
            if pages == 0:
                break
            memory = create("strataflux-kv-cache", pages * layout.CACHE_PAGE_BYTES, reserve=True)
            self.memory.append(memory)
            budget.grow(self._core.pages, self.domain, segment)
            budget.trim(self._core.pages, segment, pages)
            first = segment * self._stride_pages
            self._core.page_address[first : first + pages] = memory.address + np.arange(pages) * layout.CACHE_PAGE_BYTES
            left -= pages

    def _open_file(self) -> tuple[int, int, int]:
        """(descriptor to read and write, buffered one, alignment): an anonymous file of this folder."""
        self.settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        buffered = anonymous_file(self.settings.folder)
        self._descriptors = [buffered]
        try:
            direct = os.open(f"/proc/self/fd/{buffered}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return buffered, buffered, 1
        self._descriptors.append(direct)
        return direct, buffered, max(direct_alignment(direct), 1)

    @property
    def granted_bytes(self) -> int:
        """On disk, or reserved there, for the blocks of its session."""
        if not self.row["active"]:
            return 0
        return (int(self.row["max_blocks"]) - len(self._free_blocks)) * int(self.row["block_stride"])

    @property
    def promised_bytes(self) -> int:
        """Of these, what the file system does not know of yet."""
        return self._promised * int(self.row["block_stride"])

    def begin_grant(self, count: int, promised_bytes: int) -> tuple[list[int], KvSpace]:
        """Take block ids out, sorted; their space is to be reserved before ``finish_grant``.

        Args:
            count: how many.
            promised_bytes: what all places have yet to reserve.

        Raises:
            Refusal: not as many ids are left, or not as much disk. OSError: no descriptor is left.
        """
        size = count * int(self.row["block_stride"])
        if not 0 < count <= len(self._free_blocks):
            raise Refusal(
                "quota",
                "kv blocks",
                f"{count} wanted",
                f"at most {len(self._free_blocks)} of {int(self.row['max_blocks'])} are free",
                "drop a sequence, or attach with more blocks",
            )
        free = free_bytes(self._descriptors[0]) - promised_bytes
        if free - size < self.settings.free_bytes:
            raise Refusal(
                "quota",
                str(self.settings.folder),
                f"{free} bytes free",
                f"{size} for {count} blocks and {self.settings.free_bytes} to spare",
                "free disk space, or set kv.folder to a larger one",
            )
        blocks = sorted(self._free_blocks[-count:])
        space = self.space(as_ranges(blocks))
        del self._free_blocks[-count:]
        self._promised += count
        return blocks, space

    def finish_grant(self, blocks: list[int]) -> list[list[int]]:
        """They may be put from now on; as [first, count] ranges."""
        self._promised -= len(blocks)
        self._blocks[blocks] = BLOCK_GRANTED
        self.row["no_space"] = 0
        return as_ranges(blocks)

    def cancel_grant(self, blocks: list[int]) -> None:
        """Their space could not be reserved: the ids are free again."""
        self._promised -= len(blocks)
        self._free_blocks += sorted(blocks, reverse=True)

    def space(self, ranges: list[list[int]]) -> KvSpace:
        """Where blocks lie in the file, for whoever may wait for the file system. Raises OSError: no descriptor."""
        stride = int(self.row["block_stride"])
        parts = [(first * stride, count * stride) for first, count in ranges]
        return KvSpace(self._descriptors[0], parts, self.settings.reserve)

    def give_back(self, ranges: list[list[int]]) -> bool:
        """Make blocks unreadable; False (nothing changed) while one of them is still being written.

        Raises:
            Refusal: a range that is not granted.
        """
        blocks = listed(ranges, int(self.row["max_blocks"]))
        states = self._blocks[blocks]
        if (states == BLOCK_NONE).any():
            raise Refusal("malformed", "kv_release", f"{ranges}"[:200], "granted blocks, each once", "mend the client")
        copying = self.row["window"] != NONE and int(self.row["block"]) in blocks
        if copying or ((states >= BLOCK_BUFFERED) & (states < BLOCK_WRITTEN)).any():
            return False
        self._blocks[blocks] = BLOCK_NONE
        for block in blocks:
            puts.clear_block(self._core, self.number, block)
        return True

    def are_quiet(self, ranges: list[list[int]]) -> bool:
        """Whether nothing reads or names the blocks of ``give_back``."""
        blocks = listed(ranges, int(self.row["max_blocks"]))
        return all(puts.block_quiet(self._core, self.number, block) for block in blocks) and self._past_grace()

    def take_back(self, ranges: list[list[int]]) -> None:
        """The ids of quiet blocks, whose space was given back, are free again."""
        self._free_blocks += sorted(listed(ranges, int(self.row["max_blocks"])), reverse=True)

    def _past_grace(self) -> bool:
        cls = int(self._core.sections[self._section]["cls"])
        return int(self._core.classes[cls]["retired"]) == 0

    @property
    def _blocks(self) -> NDArray[np.uint8]:
        blocks: NDArray[np.uint8] = self._private[2]
        return blocks

    def begin_close(self) -> None:
        """The session is gone: nothing of it can be asked for any more."""
        self.row["active"] = 0
        requests.drop_table(self._core, self.table)
        if self.row["window"] != NONE:
            self._core.windows[self.row["window"]]["state"] = 0
            self.row["window"] = NONE
        for block in np.flatnonzero(self._blocks == BLOCK_WRITTEN):
            puts.clear_block(self._core, self.number, int(block))
        buffered = (self._blocks >= BLOCK_BUFFERED) & (self._blocks < BLOCK_WRITTEN)
        for block in np.flatnonzero(buffered):
            puts.clear_block(self._core, self.number, int(block))
        self._blocks[~buffered] = BLOCK_NONE

    def finish_close(self) -> bool:
        """True, and the place is free again, once no read, write or grace holds any of it."""
        windows = self._core.windows[self._first_window : self._first_window + WRITES_A_PLACE]
        cls = self._core.classes[int(self._core.sections[self._section]["cls"])]
        if windows["state"].any() or cls["filling"] or cls["retired"]:
            return False
        for block in np.flatnonzero(self._blocks):
            puts.clear_block(self._core, self.number, int(block))
        if cls["retired"]:
            return False
        for segment in self._segments[: len(self.memory)]:
            self._take_pages(segment)
        self._core.tables[self.table]["active"] = 0
        self._core.tables[self.table]["kv"] = NONE
        self.drop()
        return True

    def _take_pages(self, segment: int) -> None:
        """All slots are free: the pages leave their class and the segment is ABSENT."""
        puts.abandon_pages(self._core, segment * self._stride_pages, self._stride_pages)
        budget.shrink(self._core.pages, segment)
        for page in range(segment * self._stride_pages, (segment + 1) * self._stride_pages):
            budget.page_drained(self._core.pages, page)

    def drop(self) -> None:
        """Close memory and file; nothing is in flight. Idempotent."""
        for memory in (*self.memory, *([self.directory] if self.directory else [])):
            memory.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.memory, self.directory, self._descriptors = [], None, []
        self._private, self._buffers, self._free_blocks, self._promised = [], None, [], 0
