"""Kill daemons and clients again and again and count what was lost: nothing may be.

Two parts, each over a real daemon on a small store:

* daemons: one client decodes on while its daemon is killed and started anew; every byte it ever gets is compared.
* clients: processes forked from one warmed parent attach, decode and are killed at any moment; afterwards the daemon
  has neither a session nor a descriptor more than before.

Run it with ``make soak`` or ``make soak-full``; it prints a table and writes one JSON object.
"""

import argparse
import ctypes
import json
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.miss import Skip
from strataflux.client.control import Control
from strataflux.client.leftovers import shared_memory_names
from strataflux.client.session import Session
from strataflux.proto.store_format import SectionSpec, StoreManifest, open_store
from strataflux.proto.store_writer import StoreWriter

RECORDS, RECORD_BYTES = 20_000, 512
HOT = 4_000
"""Records that are asked for most: they fit the cache, the others make it evict."""
LOOKUPS = 256
BATCH = 250
"""Clients forked from one parent."""
WATCHDOG_SECONDS = 600.0
"""Compiled code may have to be made first; that is no start as measured below, which follows it."""


@dataclass
class Counts:
    """What was tried, and what was lost."""

    daemons_killed: int = 0
    clients_killed: int = 0
    steps: int = 0
    records_compared: int = 0
    hits_while_no_daemon: int = 0
    wrong_bytes: int = 0
    not_attached_again: int = 0
    sessions_left: int = 0
    descriptors_left: int = 0
    shared_memory_left: int = 0
    files_left: int = 0
    memory_grown_kib: int = 0
    memory_left_mib: int = 0
    ready_seconds: list[float] = field(default_factory=list)


LOSSES = (
    "wrong_bytes",
    "not_attached_again",
    "sessions_left",
    "descriptors_left",
    "shared_memory_left",
    "files_left",
    "memory_left_mib",
)
"""Each of them is a loss; of memory what is above ``GROWTH_MIB``, since allocators keep some of what came and went."""
GROWTH_MIB = 8


class Daemon:
    """A ``stratafluxd`` on a folder that outlives it."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder = folder
        self._store = store
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(folder.with_name("notify")))
        self.process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "strataflux.daemon", "--store", str(self._store)]
        command += ["--runtime-dir", str(self.folder), "--weight-cache", "4MiB", "--kv-cache", "1MiB"]
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder.with_name("notify"))}
        return subprocess.Popen([*command, "--log-level", "error"], env=environment)

    def await_ready(self) -> float:
        """Seconds from now until READY; call it right after the start."""
        begun = time.perf_counter()
        deadline = begun + WATCHDOG_SECONDS
        while True:
            ready, _, _ = select.select([self._manager], [], [], max(0.0, deadline - time.perf_counter()))
            if not ready or self.process.poll() is not None:
                raise RuntimeError(f"the daemon was not ready in {WATCHDOG_SECONDS:g} s or ended")
            if b"READY=1" in self._manager.recv(4096).split(b"\n"):
                return time.perf_counter() - begun

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> float:
        self._drain_notices()
        self.process = self._spawn()
        return self.await_ready()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WATCHDOG_SECONDS)
        self._manager.close()
        self.folder.with_name("notify").unlink()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_kib(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem")))

    def _drain_notices(self) -> None:
        while select.select([self._manager], [], [], 0)[0]:
            self._manager.recv(4096)


def make_store(folder: Path) -> tuple[StoreManifest, NDArray[np.uint8]]:
    records = np.random.default_rng(5).integers(0, 256, (RECORDS, RECORD_BYTES), dtype=np.uint8)
    spec = SectionSpec("0.qkv", "weight_channel", 0, "qkv", RECORDS, RECORD_BYTES)
    with StoreWriter(folder, {"weights": "soak", "format": 1}, [spec]) as writer:
        writer.write(0, 0, records)
        return writer.publish(), records


def step(session: Session, records: NDArray[np.uint8], rng: np.random.Generator, counts: Counts) -> int:
    """One step: look up, compare what is there with what was written; a step that says it is invalid counts nothing."""
    oids = np.sort(rng.choice(HOT if rng.random() < 0.9 else RECORDS, LOOKUPS, replace=False)).astype(np.int64)
    addresses = np.zeros(LOOKUPS, np.uint64)
    wrong = 0
    with session.step() as one:
        hits = session.lookup(0, oids, np.full(LOOKUPS, 200, np.uint8), addresses)
        for oid, address in zip(oids, addresses, strict=True):
            if address and ctypes.string_at(int(address), RECORD_BYTES) != records[oid].tobytes():
                wrong += 1
        valid = one.end()
    counts.steps += 1
    if valid:
        counts.records_compared += hits
        counts.wrong_bytes += wrong
    return hits


def kill_daemons(
    daemon: Daemon, manifest: StoreManifest, records: NDArray[np.uint8], times: int, counts: Counts
) -> None:
    rng = np.random.default_rng(1)
    moments = random.Random(2)
    with Session.attach(
        [manifest], selections_per_step=LOOKUPS, runtime_dir=daemon.folder, miss=Skip(), client="soak"
    ) as session:
        for _ in range(times):
            for _ in range(moments.randrange(2, 40)):
                step(session, records, rng, counts)
            daemon.kill()
            counts.daemons_killed += 1
            for _ in range(5):
                counts.hits_while_no_daemon += step(session, records, rng, counts)
            counts.ready_seconds.append(daemon.restart())
            deadline = time.monotonic() + WATCHDOG_SECONDS
            while session.stats().generation != generation(daemon) and time.monotonic() < deadline:
                step(session, records, rng, counts)
            counts.not_attached_again += session.stats().generation != generation(daemon)


def generation(daemon: Daemon) -> int:
    with Control(daemon.folder) as control:
        return control.info().generation


def kill_clients(daemon: Daemon, store: Path, times: int, counts: Counts) -> None:
    _clients(daemon, store, 20)  # what a daemon allocates once is no leak
    _await_no_session(daemon)
    descriptors, memory = _settled(daemon.descriptors), daemon.memory_kib()
    for done in range(0, times, BATCH):
        batch = min(BATCH, times - done)
        counts.wrong_bytes += _clients(daemon, store, batch)
        counts.clients_killed += batch
    counts.sessions_left += _await_no_session(daemon)
    counts.descriptors_left += max(0, _settled(daemon.descriptors) - descriptors)
    counts.memory_grown_kib = daemon.memory_kib() - memory
    counts.memory_left_mib = max(0, counts.memory_grown_kib // 1024 - GROWTH_MIB)


def _clients(daemon: Daemon, store: Path, times: int) -> int:
    command = [sys.executable, "-P", __file__, "--as-parent", str(daemon.folder), str(store), str(times)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _settled(count: Callable[[], int]) -> int:
    """``count`` once it has been the same for a second: a daemon closes what hung up, but not in the same moment."""
    last, same = count(), 0
    while same < 20:
        time.sleep(0.05)
        now = count()
        last, same = now, same + 1 if now == last else 0
    return last


def _await_no_session(daemon: Daemon) -> int:
    deadline = time.monotonic() + WATCHDOG_SECONDS
    with Control(daemon.folder) as control:
        while (left := len(control.sessions())) and time.monotonic() < deadline:
            time.sleep(0.05)
    return left


def parent(folder: Path, store: Path, times: int) -> int:
    """Fork ``times`` clients one after the other and kill each while it decodes; how many saw a wrong byte."""
    manifest = open_store(store)
    records = np.fromfile(manifest.records_path, np.uint8)[manifest.sections[0].offset :]
    rows = records[: RECORDS * manifest.sections[0].stride].reshape(RECORDS, -1)[:, :RECORD_BYTES].copy()
    _warm(folder, manifest)
    moments, wrong = random.Random(3), 0
    for number in range(times):
        said, telling = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(said)
            _decode(folder, manifest, rows, number, telling)
        os.close(telling)
        steps = moments.randrange(1, 12)
        for _ in range(steps):
            if os.read(said, 1) != b".":
                break
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        wrong += not os.WIFSIGNALED(status)
        os.close(said)
    return wrong


def _warm(folder: Path, manifest: StoreManifest) -> None:
    """Load what a client compiles into this process, once; a session that was closed leaves no thread to fork."""
    Session.attach([manifest], selections_per_step=LOOKUPS, runtime_dir=folder, client="warm").close()


def _decode(folder: Path, manifest: StoreManifest, rows: NDArray[np.uint8], seed: int, telling: int) -> None:
    """A client's life: it ends by being killed, or with exit code 1 at the first wrong byte."""
    counts, rng = Counts(), np.random.default_rng(seed)
    try:
        session = Session.attach([manifest], selections_per_step=LOOKUPS, runtime_dir=folder, client="victim")
        while not counts.wrong_bytes:
            step(session, rows, rng, counts)
            os.write(telling, b".")
    finally:
        os._exit(1)


def report(counts: Counts, seconds: float) -> dict[str, object]:
    ready = sorted(counts.ready_seconds)
    found: dict[str, object] = {
        name: getattr(counts, name) for name in Counts.__dataclass_fields__ if name != "ready_seconds"
    }
    if ready:
        found["ready_seconds_p50"] = round(statistics.median(ready), 3)
        found["ready_seconds_p95"] = round(ready[min(len(ready) - 1, int(0.95 * len(ready)))], 3)
    found["seconds"] = round(seconds, 1)
    found["lost"] = sum(int(getattr(counts, name)) for name in LOSSES)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}", file=sys.stderr)
    return found


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--daemons", type=int, default=200)
    arguments.add_argument("--clients", type=int, default=1000)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--as-parent", nargs=3, metavar=("FOLDER", "STORE", "TIMES"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.as_parent:
        folder, store, times = chosen.as_parent
        print(parent(Path(folder), Path(store), int(times)))
        return 0
    counts, begun, names = Counts(), time.monotonic(), shared_memory_names()
    with tempfile.TemporaryDirectory(prefix="strataflux-soak-") as home:
        manifest, records = make_store(Path(home, "store"))
        daemon = Daemon(Path(home, "run"), Path(home, "store"))
        try:
            daemon.await_ready()
            kill_daemons(daemon, manifest, records, chosen.daemons, counts)
            kill_clients(daemon, Path(home, "store"), chosen.clients, counts)
        except KeyboardInterrupt:
            print("interrupted: the table tells what was done until then", file=sys.stderr)
        finally:
            daemon.stop()
        counts.files_left = sum(not path.is_dir() for path in Path(home).rglob("*") if path.parent.name != "store")
        counts.shared_memory_left = len(shared_memory_names() - names)
    found = report(counts, time.monotonic() - begun)
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text + "\n")
    return 1 if found["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
