"""A whole store in pinned host memory, refined from in place: the platform where the RAM is large and the GPU its own.

Records lie in slots as a cache would hold them, section after section, each from a page's begin. Directory, stamps and
pages are device memory: nobody else evicts, so a look-up never crosses the link. Sections are filled and chunks of
16 MiB registered by a thread; what is not there yet misses, and decoding begins at once. Where a hot tier is asked for,
its slots come behind those (:mod:`strataflux.client.runtime.cuda.hot_tier`).
"""

import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from strataflux.client import attach_block as ab
from strataflux.client.errors import FailureError
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.hot_tier import HotTier
from strataflux.client.runtime.cuda.maps import Reach, registered_reach
from strataflux.kernels.cuda_build import CudaError
from strataflux.kernels.gpu.host_memory import HostRegistration
from strataflux.proto import layout
from strataflux.proto.store_format import SectionSpec, open_store

__all__ = ["Fill", "PinnedStore", "random_records", "records_of"]

Fill = Callable[[int, NDArray[np.uint8]], None]
"""Writes the records of section i into rows [count, slot bytes]."""

_IN_CHUNK: Final = layout.SEGMENT_MIN_BYTES // layout.CACHE_PAGE_BYTES
_CLOCK_AT: Final = layout.offset_of(layout.DAEMON_PAGE, "clock")
_STEPS: Final = 16
"""Between two looks at which records are hot: each makes the host wait for the device."""


class PinnedStore:
    """All records of some sections, in the order of their object ids.

    Pairs: construction / :meth:`close`. :meth:`refresh` shows the device what was registered since; :meth:`warm` fills
    the hot tier before anything was used.
    """

    def __init__(
        self,
        sections: Sequence[SectionSpec],
        fill: Fill,
        block: DeviceBlock,
        reach: Reach | None = None,
        *,
        hot_bytes: int = 0,
    ) -> None:
        """Reserve the memory and begin to fill it.

        Args:
            sections: of the store, in its order.
            fill: brings the records; called from another thread.
            block: the device's; from now on it shows this store as table 0.
            reach: is for tests.
            hot_bytes: device memory for the hottest records, rounded up to 16 MiB.

        Raises:
            FailureError: there is not so much memory.
        """
        device = block.tensor.device
        # fixed after construction
        self._sections, self._fill, self._block = list(sections), fill, block
        self._reach = registered_reach(device) if reach is None else reach
        self._firsts, pages = _places(sections)
        self.bytes = layout.round_up(pages * layout.CACHE_PAGE_BYTES, layout.SEGMENT_MIN_BYTES)
        self._memory = _reserve(self.bytes)
        self._rows = np.frombuffer(self._memory, np.uint8).reshape(-1, layout.CACHE_PAGE_BYTES)
        units, entries = self.bytes // layout.SLOT_UNIT_BYTES, _entries(sections, self._firsts)
        self.hot = HotTier(hot_bytes, _slots(sections), entries, self._address, units, device) if hot_bytes else None
        """The hottest records, if there is room for them."""
        self._chunk_count = (self.bytes + (self.hot.bytes if self.hot else 0)) // layout.SEGMENT_MIN_BYTES
        slots = self._chunk_count * (layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES)
        self._stamps = torch.zeros(slots, dtype=torch.int32, device=device)
        self._directory = torch.from_numpy(entries.view(np.int32)).to(device)
        self._pages = torch.zeros(3, 4096, dtype=torch.uint8, device=device)
        self._stopping = threading.Event()
        # the filling thread
        self._chunks: list[HostRegistration | None] = []
        self._error: Exception | None = None
        # the stepping thread
        self._shown = self._steps = self._clock = 0
        self._tick()
        self._show()
        self._thread = threading.Thread(target=self._work, name="strataflux-pin", daemon=True)
        self._thread.start()

    @property
    def access(self) -> str:
        """How the device reaches the records."""
        first = self._chunks[0] if self._chunks else None
        return first.access.value if first is not None else "this processor" if self._chunks else "nothing"

    @property
    def reachable_bytes(self) -> int:
        """Bytes that the device reaches by now."""
        return len(self._chunks) * layout.SEGMENT_MIN_BYTES

    @property
    def _address(self) -> int:
        return int(self._rows.ctypes.data)

    def refresh(self) -> None:
        """Show the device what is there by now, and every few steps let the hot tier adapt; between all steps.

        Raises:
            FailureError: the store could not be read, or not be registered.
        """
        if self._error is not None:
            raise FailureError(
                "store in pinned memory", str(self._error), f"{self.bytes} bytes pinned", "use --platform unified"
            ) from self._error
        count = len(self._chunks)
        if count != self._shown:
            self._block.set_bases(self._bases(count))
            self._shown = count
        self._steps += 1
        if self.hot is not None and self._steps % _STEPS == 0:
            self.hot.adapt(self._directory, self._stamps, self._clock)
            self._tick()

    def wait(self) -> None:
        """Wait until all of it is there, and show it. Raises as :meth:`refresh`."""
        self._thread.join()
        self.refresh()

    def warm(self) -> None:
        """Fill the hot tier with records from all over the store, as if all had been used alike; between steps."""
        if self.hot is not None:
            self._stamps[: self.bytes // layout.SLOT_UNIT_BYTES] = self._clock
            self.hot.adapt(self._directory, self._stamps, self._clock)
            self._tick()

    def close(self) -> None:
        """Give the memory back; nothing may run on the device. Idempotent."""
        self._stopping.set()
        self._thread.join()
        self._block.show_nobody()
        while self._chunks:
            if (chunk := self._chunks.pop()) is not None:
                chunk.close()

    def _tick(self) -> None:
        self._clock += 1
        self._pages[0].view(torch.int32)[_CLOCK_AT // 4] = self._clock

    def _show(self) -> None:
        cells = np.zeros(ab.BASES, np.uint64)
        cells[ab.ENABLED] = 1
        cells[ab.DAEMON_PAGE : ab.PAGE + 1] = [self._pages[i].data_ptr() for i in range(3)]
        cells[ab.STAMPS] = self._stamps.data_ptr()
        cells[ab.LAST_CHUNK] = self._chunk_count
        cells[ab.TABLES : ab.TABLES + 3] = self._directory.data_ptr(), self._directory.numel(), ab.WEIGHT_LOOKUPS
        self._block.show(cells, self._bases(0))

    def _bases(self, count: int) -> NDArray[np.uint64]:
        bases = np.zeros(self._chunk_count + 1, np.uint64)
        steps = np.arange(self._chunk_count, dtype=np.uint64) * np.uint64(layout.SEGMENT_MIN_BYTES)
        at_home = self.bytes // layout.SEGMENT_MIN_BYTES
        bases[:count] = (self._address + steps[:count]) | np.uint64(_IN_CHUNK)
        if self.hot is not None:
            bases[at_home:-1] = (self.hot.address + steps[: self._chunk_count - at_home]) | np.uint64(_IN_CHUNK)
        return bases

    # --- the filling thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            for number, section in enumerate(self._sections):
                self._write(number, section)
                end = self._firsts[number] + _pages_of(section)
                while len(self._chunks) < end // _IN_CHUNK and not self._stopping.is_set():
                    self._register()
            while len(self._chunks) * layout.SEGMENT_MIN_BYTES < self.bytes and not self._stopping.is_set():
                self._register()
        except (OSError, ValueError, CudaError) as error:
            self._error = error  # told by the next refresh

    def _write(self, number: int, section: SectionSpec) -> None:
        slot = layout.slot_bytes(section.record_bytes)
        in_page = layout.CACHE_PAGE_BYTES // slot
        records = np.zeros((_pages_of(section) * in_page, slot), np.uint8)
        self._fill(number, records[: section.count])
        first = self._firsts[number]
        pages = self._rows[first : first + _pages_of(section)]
        pages[:, : in_page * slot] = records.reshape(pages.shape[0], -1)

    def _register(self) -> None:
        at = len(self._chunks) * layout.SEGMENT_MIN_BYTES
        self._chunks.append(self._reach(self._address + at, layout.SEGMENT_MIN_BYTES, False))


def _reserve(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size)
    except OSError as error:
        raise FailureError(
            "store in pinned memory", error.strerror or "an error", f"{size} bytes of RAM", "use --platform unified"
        ) from error


def _pages_of(section: SectionSpec) -> int:
    return -(-section.count // (layout.CACHE_PAGE_BYTES // layout.slot_bytes(section.record_bytes)))


def _places(sections: Sequence[SectionSpec]) -> tuple[list[int], int]:
    """The first page of each section, and how many pages there are."""
    firsts, pages = [], 0
    for section in sections:
        firsts.append(pages)
        pages += _pages_of(section)
    return firsts, pages


def _entries(sections: Sequence[SectionSpec], firsts: Sequence[int]) -> NDArray[np.uint32]:
    """The directory: every record is present."""
    parts = []
    for section, first in zip(sections, firsts, strict=True):
        slot = layout.slot_bytes(section.record_bytes)
        page, place = np.divmod(np.arange(section.count), layout.CACHE_PAGE_BYTES // slot)
        unit = (first + page) * layout.UNITS_PER_PAGE + place * (slot // layout.SLOT_UNIT_BYTES)
        parts.append((unit + 1).astype(np.uint32))
    return np.concatenate(parts)


def _slots(sections: Sequence[SectionSpec]) -> NDArray[np.int64]:
    """Bytes of each record's slot."""
    return np.repeat([layout.slot_bytes(one.record_bytes) for one in sections], [one.count for one in sections])


def records_of(store: Path, digest: str) -> Fill:
    """Brings the records of a prepared model's store.

    Raises:
        ContractError: the store is damaged, or belongs to another model.
    """
    opened = open_store(store, digest)
    whole = np.memmap(opened.records_path, np.uint8, "r")

    def fill(number: int, rows: NDArray[np.uint8]) -> None:
        section = opened.sections[number]
        packed = whole[section.offset : section.offset + section.count * section.stride]
        size = section.record_bytes
        rows[:, :size] = packed.reshape(section.count, section.stride)[:, :size]

    return fill


def random_records(seed: int = 0) -> Fill:
    """Brings random codes: a megabyte of them, over and over."""
    tile = np.random.default_rng(seed).integers(0x11, 0x100, 1 << 20, np.uint8)
    tile[(tile & 15) == 0] |= 1  # a nibble of 0 never occurs

    def fill(number: int, rows: NDArray[np.uint8]) -> None:  # noqa: ARG001 (all sections are alike)
        flat = rows.reshape(-1)
        whole = flat.size // tile.size
        flat[: whole * tile.size].reshape(whole, tile.size)[:] = tile
        flat[whole * tile.size :] = tile[: flat.size - whole * tile.size]

    return fill
