"""What a daemon's attachment has mapped, made reachable for the device: registered in chunks, beside the steps.

Pages, ring, stamps and directories are registered when an attachment is first stepped in; they are small. The cache's
segments follow in chunks of 16 MiB from a thread of their own: a step takes what is registered by then, the rest
misses. So decoding begins at once, unrefined, and improves. Nothing is ever copied, and the daemon's memory is
registered read-only or not at all (:mod:`strataflux.kernels.gpu.host_memory`).

Pairs: ``begin`` / ``end`` of a step; a segment's registration ends in its ``close``, before it is unmapped.
"""

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from strataflux.client import attach_block as ab
from strataflux.client.attach import Attachment
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.kernels.cuda_build import CudaError
from strataflux.kernels.gpu.host_memory import HostRegistration
from strataflux.proto import layout
from strataflux.proto.atomics import fence_acquire, load_u32
from strataflux.proto.compiled import compiled
from strataflux.proto.segment import Segment

__all__ = ["DeviceMaps", "Reach", "registered_reach"]

_LOG: Final = logging.getLogger(__name__)
_FENCED_AT: Final = layout.offset_of(layout.SESSION_VIEW, "fenced")
_COUNTERS_AT: Final = layout.offset_of(layout.SESSION_PAGE, layout.COUNTERS[0])
_DEVICE_COUNTS: Final = ("weight_lookups", "weight_hits", "kv_lookups", "kv_hits", "ring_dropped")

Reach = Callable[[int, int, bool], HostRegistration | None]
"""Makes (address, bytes, writable) reachable for kernels; None where they run on this processor."""


def registered_reach(device: torch.device) -> Reach:
    """Registration with the CUDA driver, or nothing at all for a device that is this processor."""

    def reach(address: int, size: int, writable: bool) -> HostRegistration | None:
        return HostRegistration(address, size, writable=writable) if device.type == "cuda" else None

    return reach


class _Chunk(NamedTuple):
    number: int
    address: int
    size: int


class DeviceMaps:
    """Keeps a device's attach block true to one session's attachment.

    Threads: ``begin`` and ``end`` are the stepping thread's; a segment may be closed by the thread that reads the
    connection, between two steps; chunks are registered by a thread of this object.
    """

    def __init__(self, block: DeviceBlock, device: torch.device, reach: Reach | None = None) -> None:
        """Reach nothing yet; ``reach`` is for tests."""
        # fixed after construction
        self._block, self._device = block, device
        self._reach = registered_reach(device) if reach is None else reach
        self._waiting: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._register, name="strataflux-register", daemon=True)
        # guarded by _lock
        self._lock = threading.Lock()
        self._mapped: dict[int, _Chunk] = {}
        self._chunks: dict[int, HostRegistration | None] = {}
        self._version = 0
        # the stepping thread
        self._attachment: Attachment | None = None
        self._shown: int | None = None
        self._enabled = True
        self._pages: list[HostRegistration | None] = []
        self.error: CudaError | None = None
        """Why chunks are no longer registered; what is registered stays in use."""
        self._thread.start()

    @property
    def access(self) -> str:
        """How the device reaches the daemon's memory: ``registered read-only``, ``pageable``, ``this processor``."""
        for page in (*list(self._chunks.values()), *self._pages):
            if page is not None:
                return page.access.value
        return "this processor" if self._device.type != "cuda" else "nothing"

    @property
    def reachable_bytes(self) -> int:
        """Bytes of the cache that the device reaches by now."""
        return sum(self._mapped[number].size for number in list(self._chunks) if number in self._mapped)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the cache that this process has mapped."""
        return sum(chunk.size for chunk in list(self._mapped.values()))

    def begin(self, attachment: Attachment) -> None:
        """A step was begun in ``attachment``, and nothing runs on the device: make its block say what is there.

        Raises:
            CudaError: the device cannot reach the session's own pages.
        """
        if attachment is not self._attachment:
            self.release()
            self._attach(attachment)
        self._take_segments(attachment)
        version = self._version  # before the chunks: one that comes between is shown again in the next step
        if self._shown is None:
            self._block.show(attachment.block, self._bases(attachment))
            self._enabled = bool(attachment.block[ab.ENABLED])
        elif version != self._shown:
            self._block.set_bases(self._bases(attachment))
        self._shown = version
        if self._enabled != bool(attachment.block[ab.ENABLED]):
            self._enabled = not self._enabled
            self._block.set_enabled(self._enabled)

    def end(self, attachment: Attachment) -> bool:
        """Wait until the step's last node has run; True if everything read from slots in it was right."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        block = attachment.block
        _copy_counts(block)
        return bool(_was_right(block))

    def show_nobody(self) -> None:
        """Let the next launch be no step of any session; the next :meth:`begin` puts everything back."""
        self._block.show_nobody()
        self._shown = None

    def release(self) -> None:
        """Take back every registration, the device being drained; before the attachment is closed."""
        self._block.show_nobody()
        with self._lock:
            held = [*self._chunks.values(), *self._pages]
            self._chunks.clear()
            self._mapped.clear()
            self._pages.clear()
            self._attachment, self._shown = None, None
        for registration in held:
            if registration is not None:
                registration.close()

    def close(self) -> None:
        """Release, and end the thread. Idempotent."""
        self._waiting.put(None)
        self._thread.join()
        self.release()

    # --- the stepping thread -----------------------------------------------------------------------------------------

    def _attach(self, attachment: Attachment) -> None:
        self._attachment = attachment
        for address, size, writable in _pages_of(attachment):
            self._pages.append(self._reach(address, size, writable))

    def _take_segments(self, attachment: Attachment) -> None:
        """See to segments that were mapped since the last step."""
        for first_slot, segment in list(attachment.segments.items()):
            if isinstance(segment, _Reached):
                continue
            attachment.segments[first_slot] = _Reached(segment, self)
            first = first_slot >> ab.CHUNK_UNITS_LOG2
            for offset in range(0, segment.size, layout.SEGMENT_MIN_BYTES):
                size = min(layout.SEGMENT_MIN_BYTES, segment.size - offset)
                chunk = _Chunk(first + offset // layout.SEGMENT_MIN_BYTES, segment.address + offset, size)
                with self._lock:
                    self._mapped[chunk.number] = chunk
                self._waiting.put(chunk)

    def _bases(self, attachment: Attachment) -> ab.Block:
        whole = attachment.block[ab.BASES :]
        bases = np.zeros_like(whole)
        chosen = list(self._chunks)
        bases[chosen] = whole[chosen]
        return bases

    # --- other threads -----------------------------------------------------------------------------------------------

    def forget(self, segment: Segment) -> None:
        """A segment is about to be unmapped, between two steps (its ``close`` calls this)."""
        with self._lock:
            end = segment.address + segment.size
            numbers = [n for n, chunk in self._mapped.items() if segment.address <= chunk.address < end]
            held = [self._chunks.pop(number, None) for number in numbers]
            for number in numbers:
                del self._mapped[number]
            self._version += 1
        for registration in held:
            if registration is not None:
                registration.close()

    def _register(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            with self._lock:
                if self.error is not None or self._mapped.get(chunk.number) != chunk:
                    continue  # it was unmapped meanwhile
                try:
                    self._chunks[chunk.number] = self._reach(chunk.address, chunk.size, False)
                    self._version += 1
                except CudaError as error:
                    _LOG.warning("%s of %s cache bytes reachable: %s", self.reachable_bytes, self.mapped_bytes, error)
                    self.error = error


class _Reached(Segment):
    """A mapped segment that the device may reach, until it is closed."""

    def __init__(self, inner: Segment, maps: DeviceMaps) -> None:
        self.descriptor, self.size, self.address = inner.descriptor, inner.size, inner.address
        self._inner, self._maps = inner, maps

    def close(self) -> None:
        """End its registration, then unmap. Memory that the driver will not let go of stays mapped."""
        try:
            self._maps.forget(self)
        except CudaError:
            _LOG.exception("%d bytes of the cache stay mapped", self.size)
            return
        self._inner.close()


def _pages_of(attachment: Attachment) -> Iterator[tuple[int, int, bool]]:
    """(address, bytes, writable) of what is mapped beside the cache: only the session's segment is its own."""
    block, welcome = attachment.block, attachment.welcome
    session = layout.session_geometry(welcome.ring_log2, welcome.stamps_count, welcome.staging_block_bytes)
    yield int(block[ab.DAEMON_PAGE]), layout.PAGE_HEADER_BYTES, False
    yield int(block[ab.VIEW]), layout.PAGE_HEADER_BYTES, False
    yield int(block[ab.PAGE]), session.total_bytes, True
    for table in welcome.tables:
        directory = int(block[ab.TABLES + ab.TABLE_CELLS * table.number])
        yield directory, layout.round_up(4 * table.records, layout.PAGE_HEADER_BYTES), False


def _copy_counts(block: ab.Block) -> None:
    """What the device counted, from the session's page into the client's block, where statistics are taken from."""
    counters = (ctypes.c_uint64 * len(layout.COUNTERS)).from_address(int(block[ab.PAGE]) + _COUNTERS_AT)
    for name in _DEVICE_COUNTS:
        number = layout.COUNTERS.index(name)
        block[ab.COUNTERS + number] = counters[number]
    block[ab.DROPPED] = block[ab.RING_DROPPED]


@compiled
def _was_right(block: ab.Block) -> bool:
    # SYNC: fenced (read). Acquire fence: a slot byte read after its refill is followed by a flag that is set.
    fence_acquire()
    if block[ab.ENABLED] == np.uint64(0) or load_u32(block[ab.VIEW] + np.uint64(_FENCED_AT)) == np.uint32(0):
        return True
    block[ab.ENABLED] = np.uint64(0)
    return False
