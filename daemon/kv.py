"""KV places: the memory and the file of a session that puts KV blocks. Python; the loop sees arrays only.

A place is one share of the KV budget. What is in it belongs to one session from creation to destruction: its segments
of the cache, its directory, its file (anonymous: nothing is left when the daemon dies), its write buffers. States:
FREE ── open ──► OPEN ── close ──► CLOSING ── settled (no read, write or grace holds it) ──► FREE.
"""

import errno
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.daemon import puts, requests
from strataflux.daemon.errors import Refusal
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
from strataflux.daemon.system import punch_hole
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
    leaves ``free_bytes`` of its file system alone.
    """

    folder: Path
    cache_bytes: int = 0
    places: int = 1
    file_bytes: int = 64 << 30
    free_bytes: int = 1 << 30


class KvPlace:
    """One place. All calls come from the reader thread between two runs of the loop.

    Pairs: ``open`` / ``close``; ``grant`` / ``give_back`` then ``settled_blocks``.
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
        buffered = _anonymous_file(self.settings.folder)
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

    def grant(self, count: int) -> list[list[int]]:
        """Block ids as [first, count] ranges, their disk space reserved.

        Raises:
            Refusal: not as many ids are left, or not as much disk.
        """
        stride = int(self.row["block_stride"])
        if not 0 < count <= len(self._free_blocks):
            raise Refusal(
                "quota",
                "kv blocks",
                f"{count} wanted",
                f"at most {len(self._free_blocks)} of {int(self.row['max_blocks'])} are free",
                "drop a sequence, or attach with more blocks",
            )
        free = _free_bytes(self._descriptors[0])
        if free - count * stride < self.settings.free_bytes:
            raise Refusal(
                "quota",
                str(self.settings.folder),
                f"{free} bytes free",
                f"{count * stride} for {count} blocks and {self.settings.free_bytes} to spare",
                "free disk space, or set kv.folder to a larger one",
            )
        granted = sorted(self._free_blocks[-count:])
        for block in granted:
            os.posix_fallocate(self._descriptors[0], block * stride, stride)
        del self._free_blocks[-count:]
        self._blocks[granted] = BLOCK_GRANTED
        self.row["no_space"] = 0
        return _as_ranges(granted)

    def give_back(self, ranges: list[list[int]]) -> bool:
        """Make blocks unreadable; False (nothing changed) while one of them is still being written.

        Raises:
            Refusal: a range that is not granted.
        """
        blocks = _listed(ranges, int(self.row["max_blocks"]))
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

    def settled_blocks(self, ranges: list[list[int]]) -> bool:
        """True, and the ids are free again, once nothing reads or names the blocks of ``give_back``."""
        blocks = _listed(ranges, int(self.row["max_blocks"]))
        if not all(puts.block_quiet(self._core, self.number, block) for block in blocks) or not self._past_grace():
            return False
        stride = int(self.row["block_stride"])
        for first, count in ranges:
            # A file system without holes keeps the space for the next grant.
            punch_hole(self._descriptors[0], first * stride, count * stride)
        self._free_blocks += sorted(blocks, reverse=True)
        return True

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
        self._private, self._buffers, self._free_blocks = [], None, []


def _anonymous_file(folder: Path) -> int:
    """A file without a name: O_TMPFILE, or created and unlinked where the file system has none."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = folder / f".kv-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def _free_bytes(descriptor: int) -> int:
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


def _as_ranges(blocks: list[int]) -> list[list[int]]:
    """Sorted ids as [first, count] ranges."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and sum(ranges[-1]) == block:
            ranges[-1][1] += 1
        else:
            ranges.append([block, 1])
    return ranges


def _listed(ranges: list[list[int]], limit: int) -> list[int]:
    """The ids of [first, count] ranges that a client sent.

    Raises:
        Refusal: not ranges, out of bounds, or an id twice.
    """
    bad = Refusal("malformed", "kv_release", f"{ranges}"[:200], f"[first, count] below {limit}", "mend the client")
    blocks: list[int] = []
    for item in ranges:
        if len(item) != 2 or item[1] < 1 or item[0] + item[1] > limit:
            raise bad
        blocks += range(item[0], item[0] + item[1])
        if len(blocks) > limit:
            raise bad
    if len(set(blocks)) != len(blocks):
        raise bad
    return blocks
