"""How fast a daemon fills its cache from disk, against fio reading the same file in the same run.

What is timed is the service as it is deployed: a ``stratafluxd`` process of its own, a session, requests through the
ring, direct reads, checksums, publication and eviction. Rounds of both alternate, so that a machine whose speed drifts
drifts for both; medians are compared. CPU is the whole daemon process, from /proc, against fio's own account of itself.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.errors import StoreError
from strataflux.proto.store_format import SectionSpec, StoreManifest, open_store
from strataflux.proto.store_writer import StoreWriter

__all__ = ["FillResult", "FillSetup", "bench_fill", "bench_store", "default_folder"]

_OUTSTANDING: Final = 1024
"""Requests that are kept unanswered: enough for the reader's depth, too few to overflow its queue."""
_NAP_SECONDS: Final = 0.0005
_WARM_SECONDS: Final = 1.0
_CHUNK: Final = 8192


@dataclass(frozen=True)
class FillSetup:
    """What is measured. The cache is a small part of the store, so that nearly every fill evicts."""

    store_bytes: int = 2 << 30
    record_bytes: int = 4096
    cache_bytes: int = 64 << 20
    depth: int = 128  # of fio; it is the daemon's default, too
    rounds: int = 5
    seconds: float = 3.0
    engine: str = "uring"


@dataclass(frozen=True)
class FillResult:
    """Medians over the rounds. What fio would have said is None where fio is not installed."""

    fills_per_second: float
    cpu_microseconds_per_fill: float
    fio_reads_per_second: float | None
    fio_cpu_microseconds_per_read: float | None
    ratio_to_fio: float | None
    cpu_ratio_to_fio: float | None
    dropped: int
    engine: str
    direct_io: str


def default_folder() -> Path:
    """Where stores for measuring are kept: ``$XDG_CACHE_HOME/strataflux/bench``, or ``~/.cache/strataflux/bench``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "strataflux", "bench")


def bench_store(folder: Path, setup: FillSetup, advance: Callable[[int], None]) -> StoreManifest:
    """The store to read, made once in ``folder`` and kept; ``advance`` hears of written records."""
    path = folder / f"fill-{setup.store_bytes >> 20}MiB-{setup.record_bytes}"
    try:
        return open_store(path)
    except StoreError:
        pass
    count = setup.store_bytes // setup.record_bytes
    spec = SectionSpec("bench", "weight_channel", 0, "qkv", count, setup.record_bytes)
    block = np.random.default_rng(0).integers(0, 256, (_CHUNK, setup.record_bytes), np.uint8)
    with StoreWriter(path, {"bench": path.name}, [spec]) as writer:
        for first in range(0, count, _CHUNK):
            writer.write(0, first, block[: count - first])
            advance(min(_CHUNK, count - first))
        return writer.publish()


def bench_fill(manifest: StoreManifest, setup: FillSetup) -> FillResult:
    """Measure; takes about ``2 × rounds × seconds``.

    Raises:
        DaemonUnavailableError, RefusedError: the daemon did not start.
    """
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    fio = shutil.which("fio")
    options = (f"--engine={setup.engine}",)
    with (
        PrivateDaemon([manifest.folder], weight_cache_bytes=setup.cache_bytes, options=options) as daemon,
        Session.attach([manifest], selections_per_step=2 * _OUTSTANDING, runtime_dir=daemon.runtime_dir) as session,
        Control(daemon.runtime_dir) as control,
    ):
        feed = _Feed(session, control, daemon.pid, manifest.record_count)
        feed.run(_WARM_SECONDS)
        for _ in range(setup.rounds):
            ours.append(feed.run(setup.seconds))
            if fio is not None:
                theirs.append(_run_fio(fio, manifest.records_path, setup))
        stats, state = control.stats(), session.stats()
    rate, cpu = (statistics.median(column) for column in zip(*ours, strict=True))
    fio_rate, fio_cpu = (statistics.median(c) for c in zip(*theirs, strict=True)) if theirs else (None, None)
    return FillResult(
        fills_per_second=rate,
        cpu_microseconds_per_fill=cpu,
        fio_reads_per_second=fio_rate,
        fio_cpu_microseconds_per_read=fio_cpu,
        ratio_to_fio=rate / fio_rate if fio_rate else None,
        cpu_ratio_to_fio=cpu / fio_cpu if fio_cpu else None,
        dropped=stats.requests.dropped_queue + stats.requests.dropped_grace,
        engine=state.engine,
        direct_io=state.direct_io,
    )


class _Feed:
    """Keeps a daemon busy with requests for records that are not resident, in random order without repetition."""

    def __init__(self, session: Session, control: Control, pid: int, records: int) -> None:
        self._session = session
        self._control = control
        self._pid = pid
        self._order = np.random.default_rng().permutation(records).astype(np.int64)
        self._scores = np.zeros(2 * _OUTSTANDING, np.uint8)
        self._addresses = np.zeros(2 * _OUTSTANDING, np.uint64)
        self._first = 0  # everything before it was seen resident
        self._next = 0

    def run(self, seconds: float) -> tuple[float, float]:
        """(fills a second, CPU microseconds a fill) over about ``seconds``."""
        self._ask()
        fills, cpu, start = self._fills(), _process_seconds(self._pid), time.perf_counter()
        while time.perf_counter() - start < seconds:
            self._ask()
            # The client's own look at the directory must not cost the daemon a core.
            time.sleep(_NAP_SECONDS)
        filled = self._fills() - fills
        used, took = _process_seconds(self._pid) - cpu, time.perf_counter() - start
        return filled / took, used / filled * 1e6

    def _fills(self) -> int:
        return int(self._control.stats().fills.fills)

    def _ask(self) -> None:
        """Request as many records as were filled since the last look."""
        if self._next + 2 * _OUTSTANDING > self._order.size:
            self._first = self._next = 0
        waiting = self._order[self._first : self._next]
        absent = self._session.absent(0, waiting)
        count = _OUTSTANDING - absent
        if count > 0:
            batch = self._order[self._next : self._next + count]
            with self._session.step():
                self._session.lookup(0, batch, self._scores[:count], self._addresses[:count])
            self._next += count
        if self._next - self._first > 4 * _OUTSTANDING:
            self._first = self._next - 4 * _OUTSTANDING


def _process_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run_fio(fio: str, path: Path, setup: FillSetup) -> tuple[float, float]:
    """(reads a second, CPU microseconds a read) of fio on the same file."""
    command = [
        fio,
        "--name=fill",
        f"--filename={path}",
        "--ioengine=io_uring",
        "--rw=randread",
        f"--bs={setup.record_bytes}",
        f"--iodepth={setup.depth}",
        "--direct=1",
        f"--runtime={setup.seconds}",
        "--time_based",
        "--readonly",
        "--norandommap",
        "--randrepeat=0",
        "--output-format=json",
    ]
    text = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    job: dict[str, Any] = json.loads(text)["jobs"][0]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return float(job["read"]["iops"]), cpu_seconds / job["read"]["total_ios"] * 1e6
