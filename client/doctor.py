"""What is off about a daemon and the machine under it, each with its remedy; and a proof that a record can be had.

Every check is a function that yields what it found wrong, so that one that cannot be made hides no other.
"""

import ctypes
import errno
import grp
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strataflux.client.control import Control
from strataflux.client.errors import DaemonUnavailableError, FailureError
from strataflux.proto import control_pb2
from strataflux.proto.messages import StoreRef
from strataflux.proto.runtime import ATTACH_SOCKET, CONTROL_SOCKET

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from strataflux.client.session import Session

__all__ = [
    "Finding",
    "RoundTrip",
    "check_access",
    "check_config",
    "check_daemon",
    "check_machine",
    "check_stores",
    "round_trip",
]

_DISABLED: Final = Path("/proc/sys/kernel/io_uring_disabled")
_IO_URING_SETUP: Final = 425
_FREE_BYTES: Final = 1 << 30
_SLOW_SECONDS: Final = 0.005
_ENOUGH_READS: Final = 100
_TRIES: Final = 64
_WAIT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing that is off."""

    name: str
    found: str
    remedy: str


@dataclass(frozen=True)
class RoundTrip:
    """A record that was missed, brought in and hit. Seconds from the miss to the look-up that found it."""

    store: str
    record: int
    missed: bool
    fill_seconds: float


def check_access(folder: Path) -> Iterator[Finding]:
    """Whether this user reaches the sockets."""
    for name in (ATTACH_SOCKET, CONTROL_SOCKET):
        path = folder / name
        try:
            status = path.stat()
        except PermissionError:
            yield Finding("group", f"{folder} cannot be entered", f"join its group: {_join(folder)}")
            return
        except OSError as error:
            yield Finding("daemon", f"{path}: {error.strerror}", "start stratafluxd, or name its --runtime-dir")
            return
        if not stat.S_ISSOCK(status.st_mode):
            yield Finding("daemon", f"{path} is no socket", "remove it and restart stratafluxd")
        elif not os.access(path, os.R_OK | os.W_OK):
            yield Finding("group", f"{path} is closed to uid {os.getuid()}", f"join its group: {_join(path)}")


def _join(path: Path) -> str:
    try:
        group = grp.getgrgid(path.stat().st_gid).gr_name
    except (KeyError, OSError):
        group = "strataflux"
    return f"usermod --append --groups {group} USER, then log in again"


def check_machine() -> Iterator[Finding]:
    """Whether a daemon could read as it does unless told otherwise; asked where none runs, since it would not start."""
    code = _try_io_uring()
    if code in (errno.EPERM, errno.EACCES):
        allowed = _DISABLED.read_text().strip() if _DISABLED.exists() else "0"
        how = "sysctl kernel.io_uring_disabled=0" if allowed != "0" else "allow it in the container's seccomp profile"
        yield Finding("io_uring", "this kernel or container denies it", f'{how}, or set reader.engine = "threads"')
    elif code == errno.ENOSYS:
        yield Finding("io_uring", "this kernel has none", 'set reader.engine = "threads"')


def _try_io_uring() -> int:
    """What io_uring_setup(2) says to arguments that are none: EFAULT or EINVAL where it would work."""
    ctypes.set_errno(0)
    ctypes.CDLL(None, use_errno=True).syscall(_IO_URING_SETUP, 1, None)
    return ctypes.get_errno()


def check_config(config: Path) -> Iterator[Finding]:
    """Whether the daemon of this installation would take this file: unknown keys, bad values."""
    # -P: a checkout's folders share names with other packages, and the current folder may be a checkout.
    command = [sys.executable, "-P", "-m", "strataflux.daemon", "--config", str(config), "--check-config"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        remedy = next((line.removeprefix("remedy:").strip() for line in lines if line.startswith("remedy:")), "mend it")
        yield Finding("config", "; ".join(lines[:2]) or f"exit code {done.returncode}", remedy)


def check_daemon(info: control_pb2.GetInfoResponse, stats: control_pb2.Stats) -> Iterator[Finding]:
    """What the daemon says about itself."""
    if info.state != "ready":
        yield Finding("state", info.state, "see the log of the service; its reader and devices have to answer")
    for name, text in sorted(info.degraded.items()):
        if name != "buffered":  # told with its store below
            yield Finding(f"degraded: {name}", text, "see docs/OPERATIONS.md, Degraded")
    if info.engine == "uring" and not info.registered_buffers:
        yield Finding("memlock", "the bounce pool is not registered", "raise LimitMEMLOCK (64M) of the service")
    if info.engine == "threads":
        allowed = _DISABLED.read_text().strip() if _DISABLED.exists() else "0"
        remedy = "sysctl kernel.io_uring_disabled=0" if allowed != "0" else 'reader.engine = "uring", if seccomp allows'
        yield Finding("io_uring", f"threads read instead (io_uring_disabled = {allowed})", remedy)
    reads = stats.reads
    if reads.reads >= _ENOUGH_READS and reads.microseconds / reads.reads > _SLOW_SECONDS * 1e6:
        mean = reads.microseconds / reads.reads / 1000
        yield Finding("device", f"a read takes {mean:.1f} ms in the mean", "move the stores to a faster device")
    if stats.fills.corrupt:
        remedy = "strataflux store verify FOLDER, then store repair --from a good copy"
        yield Finding("corruption", f"{stats.fills.corrupt} reads with wrong checksums (none was served)", remedy)
    for op in ("read", "write"):
        if failed := sum(row.count for row in stats.io_errors if row.op == op):
            yield Finding("device", f"{failed} {op}s failed", "see dmesg and the device's health")
    kv = stats.kv
    if kv.free_bytes < _FREE_BYTES and (kv.free_bytes or kv.granted_bytes):
        found = f"{kv.free_bytes >> 20} MiB free for KV blocks"
        yield Finding("space", found, "make room, or set kv.folder to a larger file system")
    if stats.fences:
        found = f"{stats.fences} sessions were cut off from slots they held too long"
        yield Finding("fences", found, "raise reader.grace_seconds for slow decoders")


def check_stores(stores: Sequence[control_pb2.Store]) -> Iterator[Finding]:
    """What is off about each store; space only where its path is told, which is to administrators."""
    if not stores:
        yield Finding("stores", "none is served", "add a [[store]] to the configuration")
    for store in stores:
        name = store.path or store.digest[:12]
        if not store.stats.direct:
            remedy = "move it to a file system with direct reads (ext4, XFS), or accept the page cache's memory"
            yield Finding("direct I/O", f"{name} is read through the page cache", remedy)
        if store.stats.quarantined:
            found = f"{name} has {store.stats.quarantined} unreadable records"
            yield Finding("quarantine", found, f"strataflux store verify {store.path or 'FOLDER'}")
        if store.path:
            yield from _check_space(store.path)


def _check_space(path: str) -> Iterator[Finding]:
    try:
        system = os.statvfs(path)
    except OSError as error:
        yield Finding("store", f"{path}: {error.strerror}", "it is still served; put it back before a restart")
        return
    free = system.f_bavail * system.f_frsize
    if free < _FREE_BYTES:
        yield Finding("space", f"{free >> 20} MiB free beside {path}", "make room: KV blocks need some")


def round_trip(runtime_dir: Path, control: Control) -> RoundTrip:
    """Miss a record, wait until the daemon brought it in, and hit it. Where all are resident: only hit one.

    Raises:
        FailureError: no store, no daemon, or the record did not come.
    """
    # Compiled code takes a second to load, and no other check needs it.
    import numpy as np

    from strataflux.client.session import Session

    stores = control.stores()
    if not stores:
        raise DaemonUnavailableError(runtime_dir, "no store", "one to read a record of", "add a [[store]]")
    store = stores[0]
    ref = StoreRef(store.digest, json.loads(store.identity_json))
    with Session.attach([ref], selections_per_step=_TRIES, runtime_dir=runtime_dir, client="doctor") as session:
        oid = _absent_record(session, store.records)
        addresses, scores = np.zeros(1, np.uint64), np.full(1, 255, np.uint8)
        begun = time.monotonic()
        with session.step():
            missed = session.lookup(0, oid, scores, addresses) == 0
            hits = 1 if not missed else session.lookup_waiting(0, oid, scores, addresses, _WAIT_SECONDS)
        took = time.monotonic() - begun
        with session.step() as step:
            again = session.lookup(0, oid, scores, addresses)
            valid = step.end()
    if not (hits and again and valid):
        raise FailureError(
            f"record {int(oid[0])} of {store.digest[:12]}",
            f"not brought in within {_WAIT_SECONDS:g} s",
            "a hit after the miss",
            "see the findings above, and the log of the service",
        )
    return RoundTrip(store.digest, int(oid[0]), missed, took)


def _absent_record(session: "Session", records: int) -> "NDArray[np.int64]":
    """One that is not resident, if a few tries find one; int64 [1]."""
    import numpy as np

    random = np.random.default_rng()
    for _ in range(_TRIES):
        oid = random.integers(0, records, 1, dtype=np.int64)
        if session.absent(0, oid):
            break
    return oid
