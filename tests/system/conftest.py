"""Real daemon processes on private sockets, and small stores for them to serve."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.proto import control_pb2_grpc
from strataflux.proto.store_format import SectionSpec, StoreManifest
from strataflux.proto.store_writer import StoreWriter

# Compiled code may have to be made first. A watchdog, and no limit that says how fast a start should be.
START_SECONDS = 600.0
STOP_SECONDS = 120.0
COUNT, RECORD_BYTES = 4000, 512


@dataclass
class Daemon:
    """A ``stratafluxd`` and the socket where it says what it does."""

    process: "subprocess.Popen[str]"
    ended: int
    folder: Path
    manager: socket.socket
    log: Path

    def expect(self, state: bytes) -> None:
        """Wait until the daemon has sent ``state`` to its service manager; an error if it ends before."""
        said = self.manager.fileno()
        while True:
            ready, _, _ = select.select([said, self.ended], [], [], START_SECONDS)
            if said in ready:
                if state in self.manager.recv(4096).split(b"\n"):
                    return
            elif ready:
                raise AssertionError(f"ended with {self.process.wait()}:\n{self.log.read_text()}")
            else:
                raise AssertionError(f"no {state!r} in {START_SECONDS} s:\n{self.log.read_text()}")

    def stop(self, number: int) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def control(self) -> control_pb2_grpc.ControlStub:
        """A stub on its control socket."""
        return control_pb2_grpc.ControlStub(grpc.insecure_channel(f"unix:{self.folder / 'control.sock'}"))


Start = Callable[..., Daemon]


@dataclass
class Starter:
    """Starts daemons and ends what a test left running."""

    tmp_path: Path
    daemons: list[Daemon] = field(default_factory=list)

    def __call__(
        self, *arguments: str, folder: str = "run", wrapper: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> Daemon:
        name = f"notify{len(self.daemons)}"
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind(str(self.tmp_path / name))
        log = self.tmp_path / f"{name}.log"
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.tmp_path / name), "PYTHONUNBUFFERED": "1"}
        command = [*wrapper, sys.executable, "-m", "strataflux.daemon", "--runtime-dir", str(self.tmp_path / folder)]
        command += ["--weight-cache", "8MiB", "--kv-cache", "1MiB", *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True, pass_fds=pass_fds)
        self.daemons.append(Daemon(process, os.pidfd_open(process.pid), self.tmp_path / folder, manager, log))
        return self.daemons[-1]

    def finish(self) -> None:
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            daemon.manager.close()
            os.close(daemon.ended)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.finish()


@dataclass(frozen=True)
class SmallStore:
    """A store of random records, and those records."""

    manifest: StoreManifest
    records: NDArray[np.uint8]

    @property
    def path(self) -> str:
        return str(self.manifest.folder)


def make_store(folder: Path, seed: int = 0) -> SmallStore:
    records = np.random.default_rng(seed).integers(0, 256, (COUNT, RECORD_BYTES), dtype=np.uint8)
    identity = {"weights": f"{seed:064x}", "architecture": "llama", "format": 1}
    with StoreWriter(folder, identity, [SectionSpec("0.qkv", "weight_channel", 0, "qkv", COUNT, RECORD_BYTES)]) as out:
        out.write(0, 0, records)
        manifest = out.publish()
    return SmallStore(manifest, records)


@pytest.fixture
def store(tmp_path: Path) -> SmallStore:
    return make_store(tmp_path / "store")
