"""What a link brings of records scattered over host memory, by how that memory is made and how much of it there is.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_link.py --out rows.json

Each launch of a graph gathers a megabyte of records. Launches that read the same ones over and over (*warm*) find their
addresses translated; launches that read others each time (*cold*) do not. Nor do these find page tables in the device's
cache where something else went through it before each (*swept*), as a decode step does. The memory is four gigabytes,
of which parts of several sizes are read.
"""

import argparse
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_kernels import environment
from gpu_timing import Rows

from strataflux.client.bench.replays import microseconds
from strataflux.kernels.gpu.host_memory import HostRegistration

SIZE = 4 << 30
CHUNK = 16 << 20
GATHERED = 1 << 20
LAUNCHES = 48


@triton.jit
def _gather(source, offsets, out, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, WORDS)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        address = (source + tl.load(offsets + i)).to(tl.pointer_type(tl.int32))
        value = tl.load(tl.multiple_of(address, 256) + lane, volatile=True)
        tl.store(out + i.to(tl.int64) * WORDS + lane, value)


def pages() -> dict[str, str]:
    """What the kernel says about large pages."""
    root = Path("/sys/kernel/mm/transparent_hugepage")
    return {name: (root / name).read_text().strip() for name in ("enabled", "shmem_enabled", "defrag")}


def huge_bytes() -> dict[str, str]:
    """Large pages of this process by now."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if "Huge" in line or "PmdMapped" in line)


def shared() -> mmap.mmap:
    """Shared memory without a file."""
    return mmap.mmap(-1, SIZE)


def private() -> mmap.mmap:
    """Private memory that asks for large pages."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def registered(rows: Rows, name: str, make: Callable[[], mmap.mmap]) -> None:
    """Memory of the host, registered in chunks."""
    memory = make()
    array = np.frombuffer(memory, np.uint32)
    array[:] = 1
    chunks = [HostRegistration(array.ctypes.data + at, CHUNK, writable=False) for at in range(0, SIZE, CHUNK)]
    try:
        rows.add("link", name, access=chunks[0].access.value, **huge_bytes())
        measure(rows, name, array.ctypes.data)
    finally:
        torch.cuda.synchronize()
        for chunk in chunks:
            chunk.close()


def allocated(rows: Rows, name: str) -> None:
    """Memory that the driver allocates."""
    memory = torch.ones(SIZE // 4, dtype=torch.int32, pin_memory=True)
    measure(rows, name, memory.data_ptr())


def measure(rows: Rows, name: str, address: int) -> None:
    """Microseconds of a launch and its rate, by record size and by how much memory is read."""
    sweep, total = torch.ones(48 << 20, device="cuda"), torch.zeros((), device="cuda")
    alone = microseconds(lambda: [torch.sum(sweep, 0, out=total) for _ in range(LAUNCHES)], replays=5) / LAUNCHES
    for record in (512, 2048):
        count = GATHERED // record
        out = torch.zeros(GATHERED // 4, dtype=torch.int32, device="cuda")
        found = {}
        for span in (512 << 20, SIZE):
            offsets = torch.randint(0, span // record, (LAUNCHES, count), device="cuda") * record
            for kind in ("warm", "cold", "swept"):

                def body(of: torch.Tensor = offsets, kind: str = kind) -> None:
                    for i in range(LAUNCHES):
                        if kind == "swept":
                            torch.sum(sweep, 0, out=total)
                        _gather[(528,)](address, of[i * (kind != "warm")], out, count, record // 4, num_warps=4)

                took = microseconds(body, replays=5) / LAUNCHES - (alone if kind == "swept" else 0.0)
                found[f"{kind} {span >> 20} MiB"] = (round(took, 1), round(GATHERED / took / 1e3, 1))
        rows.add("link", f"{name}, {record} B", **found)


def main() -> None:
    """Run every section within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds)
    torch.zeros(1, device="cuda")
    rows.run("environment", lambda: environment(rows))
    rows.run("link", lambda: rows.add("link", "pages", **pages()))
    for name, make in (("shared", shared), ("private, large pages", private)):
        rows.run("link", lambda n=name, m=make: registered(rows, n, m))  # type: ignore[misc]
    rows.run("link", lambda: allocated(rows, "allocated by the driver"))
    rows.add("end", "all sections")


if __name__ == "__main__":
    main()
