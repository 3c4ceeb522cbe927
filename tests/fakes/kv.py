"""The fake daemon's KV side of one session: block ids, puts, and the records that came of them."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strataflux.proto import layout, messages, ring
from strataflux.proto.atomics import fence, load_u32, store_release_u64, store_u32
from strataflux.proto.compiled import compiled
from strataflux.proto.messages import KvGeometry
from strataflux.proto.segment import Segment, create

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
_libc = ctypes.CDLL(None)
_LOG2 = (2 * layout.STAGING_BLOCKS).bit_length() - 1


def wake_sleepers(address: int) -> None:
    """FUTEX_WAKE for all who sleep on the u32 at ``address``."""
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), 1, 1 << 30, None, None, 0)


@compiled
def settle_put(results: int, staging: int, result: int, done: int, head: int, awaiting: int) -> bool:
    """Answer a put; True if the session sleeps."""
    store_u32(np.uint64(results + 4 * staging), np.uint32(result))
    # SYNC: puts-done (publish). The result is visible before the count.
    store_release_u64(np.uint64(done), np.uint64(head))
    fence()
    return bool(load_u32(np.uint64(awaiting)) != np.uint32(0))


@dataclass
class FakeKv:
    """What a session with KV has at the fake daemon."""

    geometry: KvGeometry
    directory: Segment
    granted: set[int] = field(default_factory=set)
    blocks: dict[int, bytes] = field(default_factory=dict)
    """Records of each block that was put."""
    head: int = 0

    @classmethod
    def make(cls, geometry: KvGeometry) -> "FakeKv":
        records = geometry.max_blocks * geometry.groups_per_block
        size = layout.round_up(4 * records, layout.PAGE_HEADER_BYTES)
        return cls(geometry, create("fake-kv-directory", size, reserve=False))

    @property
    def records(self) -> int:
        return self.geometry.max_blocks * self.geometry.groups_per_block

    @property
    def block_bytes(self) -> int:
        return self.geometry.groups_per_block * self.geometry.record_bytes

    def record(self, oid: int) -> bytes:
        block, index = divmod(oid, self.geometry.groups_per_block)
        size = self.geometry.record_bytes
        return self.blocks[block][index * size : (index + 1) * size]

    def has(self, oid: int) -> bool:
        return oid // self.geometry.groups_per_block in self.blocks

    def answer(self, message: messages.KvReserve | messages.KvRelease) -> messages.Message:
        if isinstance(message, messages.KvRelease):
            for first, count in message.ranges:
                for block in range(first, first + count):
                    self.granted.remove(block)
                    self.blocks.pop(block, None)
                    at = self.directory.address + 4 * block * self.geometry.groups_per_block
                    ctypes.memset(at, 0, 4 * self.geometry.groups_per_block)
            return messages.KvReleased(message.request)
        free = [i for i in range(self.geometry.max_blocks) if i not in self.granted]
        if message.blocks > len(free):
            found, expected = f"{message.blocks} blocks", f"at most {len(free)}"
            return messages.Refuse("quota", found, expected, "raise the quota", message.request)
        self.granted.update(free[: message.blocks])
        return messages.KvReserved(message.request, [[i, 1] for i in free[: message.blocks]])

    def take_put(
        self,
        page: Segment,
        view: Segment,
        geometry: layout.SessionGeometry,
        result: int,
        place: Callable[[int], None],
    ) -> bool:
        """Settle the next announced put, its records having been given to ``place``; False if there is none."""
        cells = np.uint64(page.address + geometry.put_ring_offset)
        tail_at = np.uint64(page.address + layout.offset_of(layout.SESSION_PAGE, "put_tail"))
        tail = ring.load_tail(tail_at, np.uint64(self.head), np.uint64(_LOG2))
        status, payload = ring.consume(cells, np.uint64(_LOG2), np.uint64(self.head), tail)
        if status != ring.READY:
            return False
        staging, block = int(payload) >> layout.PUT_STAGING_SHIFT, int(payload) & (1 << layout.PUT_STAGING_SHIFT) - 1
        if block not in self.granted:
            result = layout.PUT_REFUSED_INVALID
        elif block in self.blocks:
            result = layout.PUT_REFUSED_DUPLICATE
        if result == layout.PUT_ACCEPTED:
            at = page.address + geometry.staging_offset + staging * geometry.staging_bytes
            self.blocks[block] = ctypes.string_at(at, self.block_bytes)
            for oid in range(block * self.geometry.groups_per_block, (block + 1) * self.geometry.groups_per_block):
                place(oid)
        self.head += 1
        results = view.address + layout.offset_of(layout.SESSION_VIEW, "put_results")
        done = view.address + layout.offset_of(layout.SESSION_VIEW, "puts_done")
        awaiting = page.address + layout.offset_of(layout.SESSION_PAGE, "awaiting")
        if settle_put(results, staging, result, done, self.head, awaiting):
            wake_sleepers(done)
        return True
