"""How fast KV blocks reach the disk through the daemon, against fio writing as much in sequence in the same run.

Blocks are those of an 8B model (4 MiB: 32 layers, 8 heads, 32 groups of 512 bytes). Disks move by half their rate
within seconds, so a run is many pairs of short slices, one of ours and one of fio's, in alternating order; each pair
gives a ratio, and their median and quartiles count. Both write the same bytes, in the same pieces with as many under
way, directly, into a file whose space was reserved before the clock starts, and stop it when the last piece is on the
disk.

A step must never wait for a write, so look-ups of the same records are timed apart from that: while puts are under way,
and once none are.
"""

import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import DaemonUnavailableError
from strataflux.client.kv_puts import KvPuts
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.layout import KV_WRITE_BUFFERS
from strataflux.proto.messages import KvGeometry

__all__ = ["PutResult", "PutSetup", "bench_put"]

_DEADLINE_SECONDS: Final = 120.0
_LOOKUPS: Final = 2048
_STEPS_AFTER: Final = 500


@dataclass(frozen=True)
class PutSetup:
    """What is measured. ``blocks`` are those of one slice, ``rounds`` the pairs of slices."""

    blocks: int = 64
    groups_per_block: int = 8192
    record_bytes: int = 512
    rounds: int = 11
    cache_bytes: int = 128 << 20

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.groups_per_block * self.record_bytes

    @property
    def bytes(self) -> int:
        """Bytes of a slice."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class PutResult:
    """Medians over the slices; fio's part is None where fio is not installed."""

    bytes_per_second: float
    fio_bytes_per_second: float | None
    ratio_to_fio: float | None
    """Of the pairs' ratios, as the quartiles below and above."""
    ratio_lower_quartile: float | None
    ratio_upper_quartile: float | None
    daemon_delayed_share: float
    """Of the time of our slices: how long threads of the daemon could have run and had no CPU. Where it is more than a
    few hundredths the machine is busy with something else, which slows fio less: it copies nothing."""
    refused: int
    step_microseconds_quiet: float
    step_microseconds_with_puts: float
    step_p99_microseconds_quiet: float
    step_p99_microseconds_with_puts: float


def bench_put(folder: Path, setup: PutSetup, advance: Callable[[], object] = lambda: None) -> PutResult:
    """Measure, with the daemon's files and fio's in ``folder``; ``advance`` hears of each pair of slices.

    Raises:
        DaemonUnavailableError, RefusedError: the daemon did not start, or refuses KV.
    """
    geometry = KvGeometry("kv_group", 128, 4, setup.groups_per_block, setup.record_bytes, setup.blocks)
    options = (f"--config={_config(folder)}", f"--kv-cache={setup.cache_bytes}")
    fio = shutil.which("fio")
    with (
        PrivateDaemon([], weight_cache_bytes=1 << 20, options=options) as daemon,
        Session.attach([], selections_per_step=_LOOKUPS, runtime_dir=daemon.runtime_dir, kv=geometry) as session,
    ):
        assert session.kv is not None
        writer = _Writer(session.kv, setup, daemon.pid)
        writer.slice()  # memory is touched for the first time
        writer.seconds = writer.delayed = 0.0
        pairs = []
        for number in range(setup.rounds):
            pairs.append(_pair(writer, fio, folder, setup, ours_first=number % 2 == 0))
            advance()
        pending, quiet = _time_steps(session, writer)
    theirs = [other for _, other in pairs if other is not None]
    ratios = [mine / other for mine, other in pairs if other is not None]
    lower, middle, upper = np.percentile(ratios, [25, 50, 75]).tolist() if ratios else (None, None, None)
    return PutResult(
        bytes_per_second=statistics.median(mine for mine, _ in pairs),
        fio_bytes_per_second=statistics.median(theirs) if theirs else None,
        ratio_to_fio=middle,
        ratio_lower_quartile=lower,
        ratio_upper_quartile=upper,
        daemon_delayed_share=writer.delayed / writer.seconds,
        refused=writer.refused,
        step_microseconds_quiet=_microseconds(quiet, 50),
        step_microseconds_with_puts=_microseconds(pending, 50),
        step_p99_microseconds_quiet=_microseconds(quiet, 99),
        step_p99_microseconds_with_puts=_microseconds(pending, 99),
    )


class _Writer:
    """Puts blocks of the same random bytes."""

    def __init__(self, puts: KvPuts, setup: PutSetup, daemon: int) -> None:
        # fixed after construction
        self._puts = puts
        self._setup = setup
        self._daemon = daemon
        self._block: NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, setup.block_bytes, np.uint8)
        # added up by slices
        self.seconds = self.delayed = 0.0
        self.refused = 0

    def slice(self) -> float:
        """Bytes a second at which every block of a slice reaches the disk."""
        ids = self._puts.reserve(self._setup.blocks)
        delayed, began = _delayed_seconds(self._daemon), time.perf_counter()
        for number in ids:
            if not self._puts.put_waiting(number, self._block, time.monotonic() + _DEADLINE_SECONDS):
                raise _stuck()
        self._puts.wait_settled(time.monotonic() + _DEADLINE_SECONDS)
        # Given back once they are written: each had a buffer, so all before them are written, too.
        self._puts.release(ids[-KV_WRITE_BUFFERS:])
        took = time.perf_counter() - began
        self.seconds += took
        self.delayed += _delayed_seconds(self._daemon) - delayed
        self._puts.release(ids[:-KV_WRITE_BUFFERS])
        self._count()
        return self._setup.bytes / took

    def beside(self, step: Callable[[], None]) -> list[int]:
        """Put every block of a slice, running ``step`` whenever staging memory is full; their ids, kept."""
        ids = self._puts.reserve(self._setup.blocks)
        deadline = time.monotonic() + _DEADLINE_SECONDS
        for number in ids:
            while not self._puts.put(number, self._block):
                step()
                if time.monotonic() > deadline:
                    raise _stuck()
        self._puts.wait_settled(deadline)
        self._count()
        return ids

    def _count(self) -> None:
        self.refused += sum(not settled.accepted for settled in self._puts.settled())


def _pair(
    writer: _Writer, fio: str | None, folder: Path, setup: PutSetup, *, ours_first: bool
) -> tuple[float, float | None]:
    """Bytes a second of a slice of ours and of one of fio's, one right after the other."""
    mine = writer.slice() if ours_first else None
    other = _run_fio(fio, folder, setup) if fio is not None else None
    return writer.slice() if mine is None else mine, other


def _time_steps(session: Session, writer: _Writer) -> tuple[list[float], list[float]]:
    """Seconds of each step with puts under way, and of steps once all blocks are written."""
    assert session.kv is not None
    steps = _Steps(session, session.kv)
    pending, quiet = list[float](), list[float]()
    writer.beside(lambda: pending.append(steps.one()))
    quiet += [steps.one() for _ in range(_STEPS_AFTER)]
    return pending, quiet


class _Steps:
    """A decode step's look-ups, timed: random KV records of the blocks there are."""

    def __init__(self, session: Session, puts: KvPuts) -> None:
        self._session = session
        self._table = puts.table
        self._records = puts.geometry.groups_per_block * puts.geometry.max_blocks
        self._random = np.random.default_rng(0)
        self._scores = np.zeros(_LOOKUPS, np.uint8)
        self._addresses = np.zeros(_LOOKUPS, np.uint64)

    def one(self) -> float:
        """Seconds of a step."""
        oids = self._random.integers(0, self._records, _LOOKUPS)
        began = time.perf_counter()
        with self._session.step():
            self._session.lookup(self._table, oids, self._scores, self._addresses)
        return time.perf_counter() - began


def _delayed_seconds(pid: int) -> float:
    """How long a process's threads have stood ready to run without a CPU so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile, or this kernel keeps no account
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def _stuck() -> DaemonUnavailableError:
    return DaemonUnavailableError("put", "no progress", "a block within two minutes", "see the daemon's log")


def _microseconds(seconds: Sequence[float], percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6 if seconds else 0.0


def _config(folder: Path) -> Path:
    path = folder / "put.toml"
    path.write_text(f'[kv]\nfolder = "{folder}"\nfree_bytes = 0\n')
    return path


def _run_fio(fio: str, folder: Path, setup: PutSetup) -> float:
    """Bytes a second that fio writes in sequence, block by block, as many under way as the daemon has buffers."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = [
            fio,
            "--name=put",
            f"--directory={own}",
            "--ioengine=io_uring",
            "--rw=write",
            f"--bs={setup.block_bytes}",
            f"--iodepth={KV_WRITE_BUFFERS}",
            "--direct=1",
            f"--size={setup.bytes}",
            "--fallocate=posix",
            "--output-format=json",
        ]
        text = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    job: dict[str, Any] = json.loads(text)["jobs"][0]
    return float(job["write"]["bw_bytes"])
