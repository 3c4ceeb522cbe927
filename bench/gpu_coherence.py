"""Does a kernel of a replayed graph ever read what the host wrote before its last write?

A host thread rewrites directory words and slots before each replay; the graph's kernels read them all through read-only
maps of the same memory, count what is not of this generation, and the last one tells the thread to go on. Kernels read
with plain and with volatile loads, through registered memory and, where the device has that, through pageable memory.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_coherence.py --replays 1000000 --out rows.json
"""

import argparse
import ctypes
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from gpu_side import HostRange
from gpu_timing import Rows

from strataflux.kernels.gpu.host_memory import device_attribute
from strataflux.proto.atomics import fence, load_acquire_u32, store_release_u32
from strataflux.proto.compiled import compiled
from strataflux.proto.segment import create, map_descriptor

WORDS = 128
SLOTS, SLOT_WORDS = 8, 512
PROGRAMS = 8
FACTOR = 2654435761


@compiled
def rewrite(words: NDArray[np.uint32], flags: NDArray[np.uint64], replays: int) -> None:
    """Thread: for each generation write everything, say so, and wait until the GPU has read it (or ``stop``)."""
    ready, done, stop = flags[0], flags[1], flags[2]
    for generation in range(1, replays + 1):
        value = np.uint32(generation * FACTOR & 0xFFFFFFFF)
        for i in range(words.size):
            words[i] = value + np.uint32(i)
        fence()
        store_release_u32(ready, np.uint32(generation))
        while load_acquire_u32(done) != np.uint32(generation):
            if load_acquire_u32(stop) != np.uint32(0):
                return


@compiled
def wait_for(address: np.uint64, generation: int, stop: np.uint64) -> bool:
    """Spin until a flag shows ``generation``; False when told to stop."""
    while load_acquire_u32(address) != np.uint32(generation):
        if load_acquire_u32(stop) != np.uint32(0):
            return False
    return True


@triton.jit
def next_generation(state):  # type: ignore[no-untyped-def]
    tl.store(state, tl.load(state) + 1)


@triton.jit
def check(state, address, stale, COUNT: tl.constexpr, PART: tl.constexpr, VOLATILE: tl.constexpr):  # type: ignore[no-untyped-def]
    generation = tl.load(state)
    wrong = tl.zeros((PART,), tl.int32)
    for first in range(0, COUNT, PART):
        i = first + tl.arange(0, PART)
        word = tl.load((address + i.to(tl.int64) * 4).to(tl.pointer_type(tl.int32)), mask=i < COUNT, volatile=VOLATILE)
        expected = (generation * 2654435761).to(tl.int32) + i
        wrong += ((word != expected) & (i < COUNT)).to(tl.int32)
    count = tl.sum(wrong, 0)
    tl.atomic_add(stale, count.to(tl.int64), mask=count > 0)


@triton.jit
def tell(state, address):  # type: ignore[no-untyped-def]
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), tl.load(state).to(tl.int32), sem="release", scope="sys")


def prove(
    rows: Rows, mode: str, address: int, words: NDArray[np.uint32], flags: HostRange, replays: int, seconds: float
) -> None:
    """Replay, counting stale words by kind of load."""
    shared = flags.array(ctypes.c_uint32, 48)
    shared[:] = 0
    at = np.array([flags.address, flags.address + 64, flags.address + 128], np.uint64)
    state = torch.zeros(1, dtype=torch.int64, device="cuda")
    stale = torch.zeros(2, dtype=torch.int64, device="cuda")

    def body() -> None:
        next_generation[(1,)](state, num_warps=1)
        for volatile in (False, True):
            check[(PROGRAMS,)](state, address, stale[int(volatile) :], words.size, 1024, volatile, num_warps=4)
        tell[(1,)](state, flags.seen_at + 64, num_warps=1)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    # The check must be able to fail: nothing was rewritten for the generations so far.
    before = stale.tolist()
    state.zero_()
    stale.zero_()
    shared[:] = 0
    torch.cuda.synchronize()
    thread = threading.Thread(target=rewrite, args=(words, at, replays))
    started, done = time.monotonic(), 0
    thread.start()
    try:
        for generation in range(1, replays + 1):
            if not wait_for(at[0], generation, at[2]) or (
                generation % 4096 == 0 and time.monotonic() - started > seconds
            ):
                break
            graph.replay()
            done = generation
    finally:
        torch.cuda.synchronize()
        shared[32] = 1
        thread.join()
    took = time.monotonic() - started
    found = stale.tolist()
    counted = {"stale_plain": found[0], "stale_volatile": found[1], "stale_without_rewrite": before}
    seen = {"generations_seen": int(state), "words_each": words.size * PROGRAMS, "seconds": round(took, 2)}
    rows.add("coherence", mode, replays=done, **counted, **seen)


def main() -> None:
    """Run both modes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each mode")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = Rows(options.out, 1e9)
    count = WORDS + SLOTS * SLOT_WORDS
    flags = HostRange("flags", 4096, writable=True)
    torch.zeros(1, device="cuda")

    def registered() -> None:
        memory = HostRange("memory", 4 * count)
        words = memory.array(ctypes.c_uint32, count)
        mode = memory.registration.access.value
        prove(rows, mode, memory.seen_at, words, flags, options.replays, options.seconds)

    def pageable() -> None:
        if not device_attribute("pageable_memory_access"):
            rows.add("coherence", "pageable", skipped="this device and driver have no access to pageable memory")
            return
        daemon = create("pageable", 4096 * 8, reserve=False)
        client = map_descriptor(daemon.read_only_descriptor(), 4096 * 8, writable=False)
        words = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(daemon.address))
        prove(rows, "pageable", client.address, words, flags, options.replays, options.seconds / 2)

    rows.run("coherence", registered)
    rows.run("coherence", pageable)


if __name__ == "__main__":
    main()
