"""How fast KV blocks reach the disk through the daemon, against fio writing as much in sequence in the same run.

Blocks are those of an 8B model (4 MiB: 32 layers, 8 heads, 32 groups of 512 bytes). The daemon has six write buffers,
so over many blocks the rate of puts is the rate of writes. Beside it: how long a step with look-ups of the same records
takes while puts are under way and once none are, because a step must never wait for a write.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import DaemonUnavailableError
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.layout import KV_WRITE_BUFFERS
from strataflux.proto.messages import KvGeometry
from strataflux.proto.store_format import SectionSpec, StoreManifest
from strataflux.proto.store_writer import StoreWriter

__all__ = ["PutResult", "PutSetup", "bench_put"]

_DEADLINE_SECONDS: Final = 120.0
_LOOKUPS: Final = 2048
_STEPS_AFTER: Final = 500


@dataclass(frozen=True)
class PutSetup:
    """What is measured."""

    blocks: int = 128
    groups_per_block: int = 8192
    record_bytes: int = 512
    rounds: int = 3
    cache_bytes: int = 256 << 20

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.groups_per_block * self.record_bytes


@dataclass(frozen=True)
class PutResult:
    """Medians over the rounds; fio's part is None where fio is not installed."""

    bytes_per_second: float
    fio_bytes_per_second: float | None
    ratio_to_fio: float | None
    refused: int
    step_microseconds_quiet: float
    step_microseconds_with_puts: float
    step_p99_microseconds_quiet: float
    step_p99_microseconds_with_puts: float


def bench_put(folder: Path, setup: PutSetup) -> PutResult:
    """Measure, with the daemon's files and fio's in ``folder``.

    Raises:
        DaemonUnavailableError, RefusedError: the daemon did not start, or refuses KV.
    """
    geometry = KvGeometry("kv_group", 128, 4, setup.groups_per_block, setup.record_bytes, setup.blocks)
    options = (f"--config={_config(folder)}", f"--kv-cache={setup.cache_bytes}")
    ours, theirs, quiet, busy, refused = [], [], [], [], 0
    fio = shutil.which("fio")
    store = _small_store(folder)
    with (
        PrivateDaemon([store.folder], weight_cache_bytes=1 << 20, options=options) as daemon,
        Session.attach([store], selections_per_step=_LOOKUPS, runtime_dir=daemon.runtime_dir, kv=geometry) as session,
    ):
        steps = _Steps(session, geometry)
        for _ in range(setup.rounds):
            took, pending, after, rejected = _put_all(session, steps, setup)
            ours.append(setup.blocks * setup.block_bytes / took)
            busy += pending
            quiet += after
            refused += rejected
            if fio is not None:
                theirs.append(_run_fio(fio, folder, setup))
    rate, fio_rate = statistics.median(ours), statistics.median(theirs) if theirs else None
    return PutResult(
        bytes_per_second=rate,
        fio_bytes_per_second=fio_rate,
        ratio_to_fio=rate / fio_rate if fio_rate else None,
        refused=refused,
        step_microseconds_quiet=_microseconds(quiet, 50),
        step_microseconds_with_puts=_microseconds(busy, 50),
        step_p99_microseconds_quiet=_microseconds(quiet, 99),
        step_p99_microseconds_with_puts=_microseconds(busy, 99),
    )


class _Steps:
    """A decode step's look-ups, timed: random KV records of the blocks there are."""

    def __init__(self, session: Session, geometry: KvGeometry) -> None:
        self._session = session
        self._records = geometry.groups_per_block * geometry.max_blocks
        self._random = np.random.default_rng(0)
        self._scores = np.zeros(_LOOKUPS, np.uint8)
        self._addresses = np.zeros(_LOOKUPS, np.uint64)

    def one(self) -> float:
        """Seconds of a step."""
        assert self._session.kv is not None
        table = self._session.kv.table
        oids = self._random.integers(0, self._records, _LOOKUPS)
        began = time.perf_counter()
        with self._session.step():
            self._session.lookup(table, oids, self._scores, self._addresses)
        return time.perf_counter() - began


def _put_all(session: Session, steps: _Steps, setup: PutSetup) -> tuple[float, list[float], list[float], int]:
    """Put every block, steps in between; (seconds until all were taken, seconds of each step with puts under way and of
    steps afterwards, refused puts).
    """
    puts = session.kv
    assert puts is not None
    block: NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, setup.block_bytes, np.uint8)
    ids = puts.reserve(setup.blocks)
    pending, refused, began = [], 0, time.perf_counter()
    for number in ids:
        while not puts.put(number, block):
            pending.append(steps.one())
            refused += sum(not settled.accepted for settled in puts.settled())
            if time.perf_counter() - began > _DEADLINE_SECONDS:
                raise DaemonUnavailableError("put", "no progress", "a block within two minutes", "see the daemon's log")
    puts.wait_settled(time.monotonic() + _DEADLINE_SECONDS)
    took = time.perf_counter() - began
    refused += sum(not settled.accepted for settled in puts.settled())
    after = [steps.one() for _ in range(_STEPS_AFTER)]
    puts.release(ids)
    return took, pending, after, refused


def _microseconds(seconds: Sequence[float], percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6 if seconds else 0.0


def _config(folder: Path) -> Path:
    path = folder / "put.toml"
    path.write_text(f'[kv]\nfolder = "{folder}"\nfree_bytes = 0\n')
    return path


def _small_store(folder: Path) -> StoreManifest:
    """A daemon serves some store; this one has a record."""
    with StoreWriter(folder / "store", {"bench": "put"}, [SectionSpec("one", "weight_channel", 0, "o", 1, 64)]) as out:
        out.write(0, 0, np.zeros((1, 64), np.uint8))
        return out.publish()


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
            f"--size={setup.blocks * setup.block_bytes}",
            "--fallocate=posix",
            "--output-format=json",
        ]
        text = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    job: dict[str, Any] = json.loads(text)["jobs"][0]
    return float(job["write"]["bw_bytes"])
