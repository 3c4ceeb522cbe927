"""The memory of one attachment for GPU benchmarks: mapped read-only where a client's would be, and registered."""

import ctypes
import weakref
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from strataflux.client import attach_block as ab
from strataflux.client.attach_block import Mapped
from strataflux.kernels.gpu.host_memory import HostRegistration
from strataflux.proto import layout
from strataflux.proto.segment import Segment, create, map_descriptor


class HostRange:
    """Memory as the daemon has it (``address``) and as a client maps and registers it for kernels (``seen_at``)."""

    def __init__(self, name: str, size: int, *, writable: bool = False) -> None:
        self.size = layout.round_up(size, 4096)
        self._daemon = create(name, self.size, reserve=False)
        ctypes.memset(self._daemon.address, 0, self.size)
        self._client: Segment = self._daemon
        if not writable:
            self._client = map_descriptor(self._daemon.read_only_descriptor(), self.size, writable=False)
        self.address, self.seen_at = self._daemon.address, self._client.address
        self.registration = HostRegistration(self.seen_at, self.size, writable=writable)
        # Holds the maps: they outlive the registration also where a section fails and nobody calls close().
        self._release = weakref.finalize(self, _release, self.registration, self._client, self._daemon)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def array(self, kind: Any, count: int, offset: int = 0) -> NDArray[Any]:
        """An array over the daemon's map."""
        return np.ctypeslib.as_array((kind * count).from_address(self.address + offset))

    def close(self) -> None:
        """Unregister and unmap; arrays over it are void."""
        self._release()


def _release(registration: HostRegistration, client: Segment, daemon: Segment) -> None:
    try:
        torch.cuda.synchronize()
    finally:
        registration.close()
        client.close()
        daemon.close()


class BenchSide:
    """One weight table of ``records`` records of ``record_bytes``, all in the cache, and a device's attach block."""

    def __init__(self, records: int, record_bytes: int, ring_log2: int = 16) -> None:
        self.slot = layout.slot_bytes(record_bytes)
        in_page = layout.CACHE_PAGE_BYTES // self.slot
        pages = -(-records // in_page)
        size = layout.round_up(pages * layout.CACHE_PAGE_BYTES, layout.SEGMENT_MIN_BYTES)
        units = size // layout.SLOT_UNIT_BYTES
        geometry = layout.session_geometry(ring_log2, units, 0)
        self.page = HostRange("page", 4096)
        self.view = HostRange("view", 4096)
        self.session = HostRange("session", geometry.total_bytes, writable=True)
        self.directory = HostRange("directory", 4 * records)
        self.slots = HostRange("slots", size)
        number = np.arange(records)
        place = number // in_page * layout.UNITS_PER_PAGE + number % in_page * (self.slot // layout.SLOT_UNIT_BYTES)
        self.entries = (place + 1).astype(np.uint32)
        self.words = self.directory.array(ctypes.c_uint32, records)
        self.words[:] = self.entries
        self.ring = self.session.array(ctypes.c_uint64, geometry.ring_capacity, geometry.ring_offset)
        self.stamps = self.session.array(ctypes.c_uint32, units, geometry.stamps_offset)
        self.session_page = self.session.array(ctypes.c_uint8, 4096).view(layout.SESSION_PAGE)
        addresses = (self.page.seen_at, self.view.seen_at, self.session.seen_at)
        host = ab.make_block(addresses, ring_log2, geometry)
        ab.set_table(host, 0, self.directory.seen_at, records, kv=False)
        ab.set_bases(host, [Mapped(0, self.slots.seen_at, size)])
        self.block = torch.from_numpy(host.view(np.int64).copy()).cuda()
        offsets = place.astype(np.int64) * layout.SLOT_UNIT_BYTES
        self.record_addresses = torch.from_numpy(self.slots.seen_at + offsets)
        self.record_offsets = offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        for part in (self.page, self.view, self.session, self.directory, self.slots):
            part.close()
