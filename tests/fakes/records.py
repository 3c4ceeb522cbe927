"""Records of a KV cache in this process: what a daemon keeps, without one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import RefusedError
from strataflux.client.kv_puts import Settled
from strataflux.proto import layout


class LocalRecords:
    """Grants ids, takes puts, and finds the records of accepted ones; tests change what it does."""

    def __init__(self, quota: int, records_a_block: int, record_bytes: int) -> None:
        self.epoch = 0
        self.full = False
        """All staging memory is taken."""
        self.result = layout.PUT_ACCEPTED
        self.refuse = False
        """Grants no ids."""
        self.late = False
        """Settles a put only when it is waited for, or asked for once more."""
        self.absent: set[int] = set()
        """Object ids that are not resident."""
        self.blocks: dict[int, NDArray[np.uint8]] = {}
        self.granted: set[int] = set()
        self.released: list[int] = []
        self.asked: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        self.early: list[NDArray[np.int64]] = []
        """What was asked for ahead."""
        self.dropped = 0
        self._quota = quota
        self._shape = (records_a_block, record_bytes)
        self._settled: list[Settled] = []
        self._held = False

    def reserve(self, blocks: int) -> list[int]:
        free = [] if self.refuse else [i for i in range(self._quota) if i not in self.granted]
        if blocks > len(free):
            raise RefusedError("kv_reserve (quota)", f"{blocks} blocks", f"at most {len(free)}", "raise the quota")
        # From the end: places and ids differ.
        self.granted.update(free[len(free) - blocks :])
        return free[len(free) - blocks :]

    def release(self, ids: Sequence[int]) -> None:
        self.granted.difference_update(ids)
        self.released.extend(ids)
        for block in ids:
            self.blocks.pop(block, None)

    def put(self, block: int, payload: NDArray[np.uint8]) -> bool:
        assert block in self.granted
        assert block not in self.blocks
        if self.full:
            return False
        if self.result == layout.PUT_ACCEPTED:
            self.blocks[block] = payload.reshape(self._shape).copy()
        self._settled.append(Settled(block, self.result))
        self._held = self.late
        return True

    def put_waiting(self, block: int, payload: NDArray[np.uint8], deadline: float) -> bool:
        return self.put(block, payload)

    def settled(self) -> list[Settled]:
        if self._held:
            self._held = False
            return []
        taken, self._settled = self._settled, []
        return taken

    def wait_settled(self, deadline: float) -> bool:
        self._held = False
        return True

    def count_dropped(self, blocks: int = 1) -> None:
        self.dropped += blocks

    def reattach(self) -> None:
        self.epoch += 1
        self.granted.clear()
        self.blocks.clear()

    def lookup(
        self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]
    ) -> int:
        self.asked.append((oids.copy(), scores.copy()))
        for i, oid in enumerate(oids.tolist()):
            block, index = divmod(oid, self._shape[0])
            addresses[i] = 0 if oid in self.absent else self.blocks[block][index].ctypes.data
        return int((addresses != 0).sum())

    def prefetch(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], most: int) -> int:
        assert (np.diff(scores.astype(int)) <= 0).all()
        self.early.append(oids[:most].copy())
        return len(self.absent & set(oids[:most].tolist()))
