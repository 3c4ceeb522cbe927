"""The memory of one attachment made by hand, reachable by kernels and by the client's compiled code alike."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strataflux.client import attach_block as ab
from strataflux.client.attach_block import Mapped
from strataflux.kernels.gpu.host_memory import HostRegistration
from strataflux.proto import layout
from strataflux.proto.segment import create

CHUNK = 1 << ab.CHUNK_UNITS_LOG2
STAMPS = 2 * CHUNK
RING_LOG2 = 8
PAGES = 3


class Side:
    """Pages, a session segment, one directory under table 1, and one cache segment of which three pages are mapped."""

    def __init__(self, records: int, device: torch.device) -> None:
        geometry = layout.session_geometry(RING_LOG2, STAMPS, 0)
        sizes = {
            "page": 4096,
            "view": 4096,
            "session": geometry.total_bytes,
            "directory": layout.round_up(4 * records, 4096),
            "slots": layout.SEGMENT_MIN_BYTES,
        }
        self._segments = {name: create(name, size, reserve=False) for name, size in sizes.items()}
        at = {name: segment.address for name, segment in self._segments.items()}
        self._registered = []
        if device.type == "cuda":
            for name, size in sizes.items():
                self._registered.append(HostRegistration(at[name], size, writable=name == "session"))
        self.host = ab.make_block((at["page"], at["view"], at["session"]), RING_LOG2, geometry)
        ab.set_table(self.host, 0, 8, 1, kv=False)  # never looked up: any load from it would crash
        ab.set_table(self.host, 1, at["directory"], records, kv=False)
        mapped = PAGES * layout.CACHE_PAGE_BYTES
        ab.set_bases(self.host, [Mapped(0, at["slots"], mapped)])
        self.words = self._array("directory", 0, records, ctypes.c_uint32)
        self.slots = self._array("slots", 0, mapped, ctypes.c_uint8)
        self.ring = self._array("session", geometry.ring_offset, geometry.ring_capacity, ctypes.c_uint64)
        self.stamps = self._array("session", geometry.stamps_offset, STAMPS, ctypes.c_uint32)
        self.daemon = self._segments["page"].view(layout.DAEMON_PAGE)
        self.view = self._segments["view"].view(layout.SESSION_VIEW)
        self.session = self._segments["session"].view(layout.SESSION_PAGE)
        self.device = device
        self.block = self.copy_block()

    def copy_block(self) -> torch.Tensor:
        """The host's block on the device."""
        return torch.from_numpy(self.host.view(np.int64).copy()).to(self.device)

    def cell(self, number: int) -> int:
        """A cell of the device's block."""
        return int(self.block[number])

    def _array(self, name: str, offset: int, count: int, kind: Any) -> NDArray[Any]:
        return np.ctypeslib.as_array((kind * count).from_address(self._segments[name].address + offset))

    def close(self) -> None:
        """Drop the memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for registration in self._registered:
            registration.close()
        for name in ("words", "slots", "ring", "stamps", "daemon", "view", "session"):
            delattr(self, name)
        for segment in self._segments.values():
            segment.close()
