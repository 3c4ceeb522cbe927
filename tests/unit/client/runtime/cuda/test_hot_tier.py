"""The hottest records in device memory: every look-up finds the right bytes, whatever moved; what is in use stays."""

import ctypes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client import attach_block as ab
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.hot_tier import HotTier
from strataflux.client.runtime.cuda.pinned_store import PinnedStore
from strataflux.proto import layout
from strataflux.proto.store_format import SectionSpec

CPU = torch.device("cpu")
SIZE = layout.SEGMENT_MIN_BYTES
UNIT = layout.SLOT_UNIT_BYTES
SLOTS = np.repeat([65536, 16384], [300, 900])
"""More than twice what the tier has places for: 144 and 432."""


class Store:
    """Records of two sizes at home, each filled with a number of its own."""

    def __init__(self, size: int = SIZE) -> None:
        ends = np.cumsum(SLOTS // UNIT)
        self.home = (ends - SLOTS // UNIT + 1).astype(np.uint32)
        self.memory = np.zeros(int(ends[-1]) * UNIT, np.uint8)
        words = self.memory.view(np.uint32)
        for oid, entry in enumerate(self.home):
            first = (int(entry) - 1) * UNIT // 4
            words[first : first + SLOTS[oid] // 4] = oid + 7
        self.first_unit = layout.round_up(int(ends[-1]), SIZE // UNIT)
        self.tier = HotTier(size, SLOTS, self.home, self.memory.ctypes.data, self.first_unit, CPU)
        self.directory = torch.from_numpy(self.home.view(np.int32).copy())
        self.stamps = torch.zeros(self.first_unit + self.tier.bytes // UNIT, dtype=torch.int32)
        self.clock = 0

    def step(self, used: NDArray[np.int64]) -> None:
        """Use records, and adapt."""
        self.clock += 1
        self.stamps[(self.directory[used] - 1).long()] = self.clock
        self.tier.adapt(self.directory, self.stamps, self.clock)

    def hot(self) -> set[int]:
        """Records whose directory entry names a place of the tier."""
        return set((self.directory > self.first_unit).nonzero()[:, 0].tolist())

    def check(self) -> None:
        """Every entry names bytes of its own record, and no two the same place."""
        assert len(set(self.directory.tolist())) == len(SLOTS)
        for oid, entry in enumerate(self.directory.tolist()):
            unit = entry - 1
            inside = unit < self.first_unit
            base = self.memory.ctypes.data if inside else self.tier.address - self.first_unit * UNIT
            words = np.ctypeslib.as_array((ctypes.c_uint32 * int(SLOTS[oid] // 4)).from_address(base + unit * UNIT))
            assert (words == oid + 7).all(), oid
            assert inside or unit * UNIT + SLOTS[oid] <= self.first_unit * UNIT + self.tier.bytes


def test_what_is_used_comes_in_and_is_found_there() -> None:
    store, used = Store(), np.array([3, 299, 300, 1199])
    store.step(used)
    assert store.hot() == set(used.tolist())
    assert (store.tier.hits, store.tier.misses) == (0, 4)
    store.check()
    store.step(used)
    assert (store.tier.hits, store.tier.misses) == (4, 4)


def test_what_is_in_use_is_not_displaced() -> None:
    store, kept = Store(), np.arange(0, 40)
    for round_ in range(8):
        others = 40 + (np.arange(60) + 60 * round_) % 260
        store.step(np.concatenate((kept, others)))
        assert set(kept.tolist()) <= store.hot()
        store.check()


def test_nothing_is_lost_where_more_is_used_than_there_is_room_for() -> None:
    store = Store()
    store.step(np.arange(300))
    held = store.hot()
    assert len(held) == 144
    assert max(held) > 290  # not the first ones alone
    store.step(np.arange(300))
    assert store.hot() == held  # all of them are in use
    store.check()


@pytest.mark.parametrize("seed", range(2))
def test_any_use_leaves_every_record_reachable(seed: int) -> None:
    store, random = Store(), np.random.default_rng(seed)
    for _ in range(5):
        store.step(np.unique(random.zipf(1.3, random.integers(1, 300)) % len(SLOTS)))
        store.check()


def test_a_pinned_store_shows_its_tier_to_kernels() -> None:
    section = SectionSpec("one", "weight_channel", 0, "qkv", 64, 4096)
    rows = np.arange(64, dtype=np.uint8)

    def fill(number: int, into: NDArray[np.uint8]) -> None:
        into[:] = rows[:, None]

    block = DeviceBlock(CPU)
    store = PinnedStore([section], fill, block, hot_bytes=1)
    store.wait()
    assert store.hot is not None
    cells = block.tensor
    directory = np.ctypeslib.as_array((ctypes.c_uint32 * 64).from_address(int(cells[ab.TABLES])))
    stamps = np.ctypeslib.as_array((ctypes.c_uint32 * (2 * SIZE // UNIT)).from_address(int(cells[ab.STAMPS])))
    assert int(cells[ab.LAST_CHUNK]) == 2

    def chunk_of(oid: int) -> int:
        return (int(directory[oid]) - 1) * UNIT // SIZE

    used = [5, 63]
    while not any(map(chunk_of, range(64))):
        stamps[directory[used] - 1] = 1  # the store's clock begins there
        store.refresh()
    assert [oid for oid in range(64) if chunk_of(oid)] == used
    for oid in range(64):
        base = int(cells[ab.BASES + chunk_of(oid)]) & ~0xFFF
        at = base + (int(directory[oid]) - 1) * UNIT % SIZE
        assert bytes((ctypes.c_uint8 * 4096).from_address(at)) == bytes([oid]) * 4096
    store.warm()
    assert sum(map(chunk_of, range(64))) >= 62
    store.close()
