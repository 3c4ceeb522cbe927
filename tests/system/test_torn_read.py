"""The fences of the grace protocol, on two processors: with both no read is ever torn, without either one some are.

A reader thread and a client thread run the real functions back to back. The reader writes a pattern into a slot,
publishes it, retires the record before it, closes the batch, recycles, and so writes the next record into that
slot as soon as grace allows. The client begins a step, loads an entry, reads the words it names for about as long as
the reader's round takes, and ends the step. All words must come from one writing of the record that was looked up.

The client loads entries with the look-up's own primitives instead of the look-up, which allocates: the locked
instructions in that would stand in for a missing fence on x86. A run of its own shows the whole look-up untorn.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.client import attach_block, directory
from strataflux.client.attach_block import Block
from strataflux.daemon import grace
from strataflux.daemon.cache import begin_fill, publish, retire
from strataflux.daemon.rows import EVICTED_CAPACITY
from strataflux.daemon.slots import slot_address
from strataflux.daemon.state import NONE, Core
from strataflux.proto.atomics import (
    U64,
    fence_acquire,
    load_acquire_u64,
    load_u32,
    load_u64,
    store_release_u64,
    store_u64,
)
from strataflux.proto.compiled import borrowing, compiled
from tests.fakes.core_rig import PAGE, Client, Rig, make_store

F = TypeVar("F", bound=Callable[..., Any])

pytestmark = pytest.mark.slow

ROUNDS = 10_000_000
RECORDS = 3
WORDS = 32
PASSES = 32
STOP, READER_ROUNDS, CLIENT_STEPS, HITS, TORN = range(5)


def compile_here(function: F) -> F:
    """As ``borrowing``, but kept nowhere: what is compiled here may lack a fence and must never be found again."""
    options: Any = {"nogil": True, "boundscheck": False, "error_model": "numpy", "_nrt": False}
    return cast(F, numba.njit(**options)(function))


def without_fence(function: Any) -> Any:
    """The same function with its full fence taken out of the source."""
    source = inspect.getsource(function.py_func)
    assert source.count("\n    fence()\n") == 1
    scope = dict(vars(inspect.getmodule(function.py_func)))
    exec(source.replace("\n    fence()\n", "\n").replace("@borrowing\n", "").replace("@compiled\n", ""), scope)
    return compile_here(scope[function.py_func.__name__])


@borrowing
def is_torn(address: U64, oid: int) -> bool:
    """The words of a slot do not all come from one writing of ``oid``."""
    first = load_u64(address)
    torn = first & np.uint64(0xFF) != np.uint64(oid)
    for _ in range(PASSES):
        for word in range(WORDS):
            torn |= load_u64(np.uint64(address) + np.uint64(8 * word)) != first
    return bool(torn)


@borrowing
def load_entries(block: Block, oids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
    """What a look-up loads, and no more: entries, one acquire fence, addresses. The cache is one segment."""
    entries = block[attach_block.TABLES]
    base = block[attach_block.BASES] & ~np.uint64(attach_block.PAGES_MASK)
    for i in range(oids.size):
        addresses[i] = load_u32(entries + np.uint64(4) * np.uint64(oids[i]))
    fence_acquire()
    hits = 0
    for i in range(oids.size):
        if addresses[i] != 0:
            addresses[i] = base + (addresses[i] - np.uint64(1)) * np.uint64(256)
            hits += 1
    return hits


@compiled
def look_up(block: Block, oids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
    """The whole look-up of a session."""
    return directory.look_up(block, 0, oids, np.zeros(oids.size, np.uint8), addresses, False)


def reader_loop(close_batch: Any) -> Callable[[Core, U64], None]:
    """Write, publish and retire records in turn until the client is done."""
    recycle = grace.recycle

    @compile_here
    def run(c: Core, words: U64) -> None:
        done, before = 0, NONE
        while load_acquire_u64(words + np.uint64(8 * STOP)) == 0:
            entry = begin_fill(c, 0, 0, done % RECORDS)
            if entry != NONE:
                slot = np.uint64(slot_address(c, entry))
                for word in range(WORDS):
                    store_u64(slot + np.uint64(8 * word), done << 8 | done % RECORDS)
                publish(c, entry)
                if before != NONE:
                    retire(c, before, EVICTED_CAPACITY)
                before = entry
                done += 1
            close_batch(c)
            recycle(c)
            store_release_u64(words + np.uint64(8 * READER_ROUNDS), done)

    return run


def client_loop(begin_step: Any, find: Any) -> Callable[..., None]:
    """Step, look up, read until both sides did ``rounds``, or until a read was torn."""
    end_step = attach_block.end_step

    @compile_here
    def run(block: Block, words: U64, oids: NDArray[np.int64], addresses: NDArray[np.uint64], rounds: int) -> None:
        steps, hits, torn = 0, 0, 0
        while (steps < rounds or load_acquire_u64(words + np.uint64(8 * READER_ROUNDS)) < rounds) and torn == 0:
            begin_step(block)
            hits += find(block, oids, addresses)
            for i in range(oids.size):
                if addresses[i] != 0:
                    torn += is_torn(addresses[i], oids[i])
            end_step(block)
            steps += 1
        store_u64(words + np.uint64(8 * CLIENT_STEPS), steps)
        store_u64(words + np.uint64(8 * HITS), hits)
        store_u64(words + np.uint64(8 * TORN), torn)
        store_release_u64(words + np.uint64(8 * STOP), 1)

    return run


def pinned(processor: int, function: Callable[..., None], *arguments: Any) -> threading.Thread:
    """A started thread of one processor that runs a compiled function."""

    def main() -> None:
        os.sched_setaffinity(0, {processor})
        function(*arguments)

    thread = threading.Thread(target=main)
    thread.start()
    return thread


@pytest.fixture
def processors() -> tuple[int, int]:
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        pytest.skip(f"two processors are needed, this process may use {available}")
    return available[0], available[1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, 8 * WORDS)])], pages=1)
    yield rig
    rig.close()


def race(rig: Rig, processors: tuple[int, int], close_batch: Any, begin_step: Any, find: Any) -> dict[str, int]:
    """Run both loops against each other; what they counted."""
    assert rig.tier.segments[0].segment.size == PAGE
    client = Client(rig.tier)
    words = np.zeros(8, np.uint64)
    address = np.uint64(words.ctypes.data)
    oids, addresses = np.arange(RECORDS), np.zeros(RECORDS, np.uint64)
    reader = pinned(processors[0], reader_loop(close_batch), rig.core, address)
    looping = client_loop(begin_step, find)
    pinned(processors[1], looping, client.block, address, oids, addresses, ROUNDS).join()
    reader.join()
    names = ("rounds", "steps", "hits", "torn")
    return dict(zip(names, (int(words[at]) for at in (READER_ROUNDS, CLIENT_STEPS, HITS, TORN)), strict=True))


@pytest.mark.parametrize("find", [load_entries, look_up], ids=["primitives", "look-up"])
def test_no_read_is_torn(rig: Rig, processors: tuple[int, int], find: Any) -> None:
    counted = race(rig, processors, grace.close_batch, attach_block.begin_step, find)
    assert counted["torn"] == 0
    assert min(counted["rounds"], counted["steps"]) >= ROUNDS
    assert counted["hits"] > ROUNDS // 10
    rig.recycle()
    rig.intact()


@pytest.mark.parametrize("side", ["reader", "client"])
def test_reads_are_torn_without_the_fence_of_one_side(rig: Rig, processors: tuple[int, int], side: str) -> None:
    close_batch = without_fence(grace.close_batch) if side == "reader" else grace.close_batch
    begin_step = without_fence(attach_block.begin_step) if side == "client" else attach_block.begin_step
    counted = race(rig, processors, close_batch, begin_step, load_entries)
    assert counted["torn"] > 0
