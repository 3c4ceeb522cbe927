"""A daemon of one's own, for as long as a command runs.

It lives in a new folder that only this user can enter, under ``$XDG_RUNTIME_DIR`` or the folder for temporary files.
The daemon is a process, never an import. Nothing is polled: it says READY as it would to a service manager, in a
datagram, and its end makes a descriptor readable. It gets a process group of its own, so that a Ctrl-C ends the command
first and the command ends it; should the command be killed, the kernel asks the daemon to stop.
"""

import atexit
import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from strataflux.client.errors import DaemonUnavailableError, RefusedError
from strataflux.client.held_signals import held_signals
from strataflux.client.leftovers import Leftovers, find_leftovers, shared_memory_names

__all__ = ["PrivateDaemon"]

_LEAST_CACHE_BYTES: Final = 1 << 20
_LONGEST_FOLDER: Final = 60
"""Of the 107 bytes of a socket's address, what the names below our folder leave."""
_EXPLANATION: Final = re.compile(
    r"^stratafluxd: error: (.*)\n  found:    (.*)\n  expected: (.*)\n  remedy:   (.*)$", re.MULTILINE
)

# PR_SET_PDEATHSIG is 1. Whoever died before the call is noticed by the other parent.
_CHILD: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("strataflux.daemon", run_name="__main__", alter_sys=True)
"""


@dataclass
class _Running:
    folder: Path
    process: subprocess.Popen[bytes]
    shared_memory: frozenset[str]


class PrivateDaemon:
    """``with PrivateDaemon([store], weight_cache_bytes=n) as daemon:`` the daemon is READY inside, and gone after.

    Pairs: :meth:`start` / :meth:`stop`. :attr:`runtime_dir` is where to attach in between.
    """

    def __init__(
        self,
        stores: Sequence[Path],
        *,
        weight_cache_bytes: int,
        kv_cache_bytes: int = 0,
        grace_seconds: float | None = None,
        policy: str | None = None,
        options: Sequence[str] = (),
        start_seconds: float = 600.0,
        stop_seconds: float = 20.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            stores: folders to serve.
            weight_cache_bytes: its RAM for weight records; raised to the daemon's least, 1 MiB.
            kv_cache_bytes: its RAM for KV records and for writing them, raised likewise.
            grace_seconds: how long a step may hold evicted slots before its session is fenced; None takes the daemon's
                default, which a CPU that is shared with others may exceed.
            policy: what leaves the cache when room is needed; None takes the daemon's default.
            options: more of the daemon's flags.
            start_seconds: the most to wait for READY. The first start of all compiles, which takes a minute or more.
            stop_seconds: the most to wait for its end before it is killed.
        """
        # fixed after construction
        self._arguments = [
            f"--weight-cache={max(weight_cache_bytes, _LEAST_CACHE_BYTES)}",
            f"--kv-cache={max(kv_cache_bytes, _LEAST_CACHE_BYTES)}",
            "--log-level=warning",
            *(f"--store={store.absolute()}" for store in stores),
            *options,
        ]
        self._config = "" if grace_seconds is None else f"[reader]\ngrace_seconds = {grace_seconds}\n"
        self._config += "" if policy is None else f'[cache]\npolicy = "{policy}"\n'
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        # changed by start and stop
        self._running: _Running | None = None
        self._leftovers = Leftovers()

    @property
    def runtime_dir(self) -> Path:
        """Where the daemon's sockets are; only between start and stop."""
        assert self._running is not None
        return self._running.folder / "d"

    @property
    def pid(self) -> int:
        """The daemon's process; only between start and stop."""
        assert self._running is not None
        return self._running.process.pid

    def start(self) -> None:
        """Start the daemon and wait until it is READY.

        Raises:
            RefusedError: it does not like a store or a setting, and said why.
            DaemonUnavailableError: it ended otherwise, or was not ready in time. Nothing is left running.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notices:
                notices.setblocking(False)
                # A Ctrl-C in the middle would leave a folder or a process that stop knows nothing of.
                with held_signals():
                    self._launch(notices)
                self._await_ready(notices)
            (self.runtime_dir.parent / "notify").unlink()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> Leftovers:
        """Ask the daemon to stop, wait, remove the folder; returns what the daemon left.

        Idempotent. What an exception such as a second Ctrl-C cuts short the next call goes on with, at the latest
        when Python exits.
        """
        running = self._running
        if running is None:
            return self._leftovers
        forced = True
        try:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                running.process.terminate()
                running.process.wait(self._stop_seconds)
                forced = False
        finally:
            # Also when a second Ctrl-C ends the wait: what is killed leaves its memory to the kernel, its names to us.
            running.process.kill()
            running.process.wait()
            self._leftovers = find_leftovers(running.folder / "d", running.shared_memory, forced=forced)
            shutil.rmtree(running.folder, ignore_errors=True)
            self._running = None
            atexit.unregister(self.stop)
        return self._leftovers

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, notices: socket.socket) -> None:
        before = shared_memory_names()
        folder = Path(tempfile.mkdtemp(prefix="strataflux-", dir=_base_folder()))
        try:
            notices.bind(str(folder / "notify"))
            process = self._spawn(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._running = _Running(folder, process, before)
        atexit.register(self.stop)

    def _spawn(self, folder: Path) -> subprocess.Popen[bytes]:
        # -P: a checkout's folders share names with other packages, and the current folder may be a checkout.
        command = [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), f"--runtime-dir={folder / 'd'}"]
        if self._config:
            (folder / "config.toml").write_text(self._config)
            command.append(f"--config={folder / 'config.toml'}")
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": str(folder / "notify")},
                process_group=0,
            )

    def _await_ready(self, notices: socket.socket) -> None:
        assert self._running is not None
        deadline = time.monotonic() + self._start_seconds
        ended = os.pidfd_open(self._running.process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(notices, selectors.EVENT_READ)
                selector.register(ended, selectors.EVENT_READ)
                while not _said_ready(notices):
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        raise self._unavailable(f"no READY within {self._start_seconds:g} s")
                    if any(key.fd == ended for key, _ in ready):
                        self._explain_end()
        finally:
            os.close(ended)

    def _explain_end(self) -> None:
        assert self._running is not None
        code = self._running.process.wait()
        if said := _EXPLANATION.search((self._running.folder / "log").read_text(errors="replace")):
            subject, found, expected, remedy = said.groups()
            raise RefusedError(subject, found, expected, remedy)
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise self._unavailable(f"{end} before READY")

    def _unavailable(self, found: str) -> DaemonUnavailableError:
        assert self._running is not None
        said = (self._running.folder / "log").read_text(errors="replace").strip().splitlines()
        by_hand = shlex.join(["stratafluxd", *self._arguments])
        return DaemonUnavailableError(
            "stratafluxd",
            f"{found}; its last words: {said[-1]}" if said else f"{found}, without a word",
            "a daemon that starts",
            f"see all it says: {by_hand}",
        )


def _said_ready(notices: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        while True:
            if b"READY=1" in notices.recv(4096).split(b"\n"):
                return True
    return False


def _base_folder() -> str:
    usable: Callable[[str], bool] = lambda path: (  # noqa: E731
        0 < len(path) <= _LONGEST_FOLDER and os.access(path, os.W_OK | os.X_OK)
    )
    candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir())
    return next(filter(usable, candidates), "/tmp")  # noqa: S108 – mkdtemp makes a private folder in it
