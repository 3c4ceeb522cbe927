"""Where a daemon may have to live: without io_uring, with little locked memory, in its unit's own sandbox, on file
systems and sector sizes of all kinds. Each is made for real where this machine allows it; else the skip says why not.
"""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.proto import control_pb2
from tests.system.conftest import Daemon, SmallStore, Start, make_store
from tests.system.test_daemon import WAIT_SECONDS, attach, read

pytestmark = pytest.mark.system

CONFINE = [sys.executable, str(Path(__file__).with_name("confine.py"))]
IO_URING_SETUP = 425
SYSTEMD = Path(__file__).parents[2] / "systemd"


def serve(daemon: Daemon, store: SmallStore) -> control_pb2.GetInfoResponse:
    """Read through the daemon, stop it; what it said about itself."""
    daemon.expect(b"READY=1")
    info: control_pb2.GetInfoResponse = daemon.control().GetInfo(control_pb2.GetInfoRequest())
    with attach(daemon.folder, store) as session:
        for seed in range(3):
            read(session, store, seed)
    assert daemon.stop(signal.SIGTERM) == 0
    return info


def test_a_sandbox_without_io_uring_is_told_and_threads_serve_in_it(start: Start, store: SmallStore) -> None:
    wrapper = [*CONFINE, "deny", str(IO_URING_SETUP)]
    refused = start("--store", store.path, "--engine", "uring", wrapper=wrapper, folder="refused")
    assert refused.process.wait(WAIT_SECONDS * 10) == 2
    text = refused.log.read_text()
    assert "io_uring_setup: Operation not permitted" in text
    assert 'reader.engine = "threads"' in text
    info = serve(start("--store", store.path, "--engine", "threads", wrapper=wrapper), store)
    assert info.engine == "threads"


def test_io_uring_that_the_machine_disabled(start: Start, store: SmallStore) -> None:
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    if not switch.exists() or switch.read_text().strip() != "2":
        pytest.skip("kernel.io_uring_disabled is not 2 here, and is the whole machine's to change")
    refused = start("--store", store.path, "--engine", "uring")
    assert refused.process.wait(WAIT_SECONDS * 10) == 2
    assert "io_uring_disabled" in refused.log.read_text()


def test_little_locked_memory_only_costs_the_registration(start: Start, store: SmallStore) -> None:
    tools = [shutil.which(name) for name in ("setpriv", "prlimit")]
    if os.geteuid() != 0 or None in tools:
        pytest.skip("taking CAP_IPC_LOCK away from a process needs root, setpriv and prlimit")
    wrapper = ["setpriv", "--bounding-set", "-ipc_lock", "prlimit", "--memlock=65536:65536"]
    info = serve(start("--store", store.path, wrapper=wrapper), store)
    assert info.engine == "uring"
    assert not info.registered_buffers


def numbers_by_name() -> dict[str, int]:
    headers = [*Path("/usr/include").glob("*/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]
    for header in headers:
        if header.exists():
            found = re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())
            return {name: int(number) for name, number in found}
    return {}


def calls_of(group: str) -> set[str]:
    """Names of a set of system calls, sets within it included."""
    said = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True)
    names = {line.strip() for line in said.stdout.splitlines()[1:] if line.strip() and "#" not in line}
    return {name for name in names if name[0] != "@"}.union(*(calls_of(name) for name in names if name[0] == "@"))


def test_the_units_own_filter_admits_all_it_does(start: Start, store: SmallStore) -> None:
    numbers = numbers_by_name()
    if shutil.which("systemd-analyze") is None or platform.machine() != "x86_64" or not numbers:
        pytest.skip("needs systemd-analyze, x86_64 and the kernel's headers to know numbers by name")
    allowed = set[str]()
    for line in re.findall(r"^SystemCallFilter=(.*)$", (SYSTEMD / "stratafluxd.service").read_text(), re.MULTILINE):
        words = line.removeprefix("~").split()
        calls = set[str]().union(*(calls_of(word) if word[0] == "@" else {word} for word in words))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    assert {"io_uring_setup", "memfd_create", "futex"} <= allowed
    assert not {"mount", "ptrace", "reboot"} & allowed
    listed = ",".join(str(numbers[name]) for name in sorted(allowed) if name in numbers)
    info = serve(start("--store", store.path, wrapper=[*CONFINE, "allow", listed]), store)
    assert (info.engine, info.state) == ("uring", "ready")


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[Path]:
    """A mount in a folder of its own, gone after; skips where it is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = Path(tempfile.mkdtemp(prefix="strataflux-mount-"))
    done = subprocess.run(["mount", *arguments, str(folder)], check=False, capture_output=True, text=True)
    try:
        if done.returncode:
            pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
    finally:
        folder.rmdir()


def serve_from(start: Start, folder: Path) -> control_pb2.GetInfoResponse:
    store = make_store(folder / "store", seed=3)
    return serve(start("--store", store.path), store)


def test_tmpfs(start: Start) -> None:
    with mounted("-t", "tmpfs", "tmpfs") as folder:
        assert serve_from(start, folder).direct_io in ("direct", "buffered")


def test_overlayfs(start: Start) -> None:
    with mounted("-t", "tmpfs", "tmpfs") as below:
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        with mounted("-t", "overlay", "overlay", "-o", layers) as folder:
            assert serve_from(start, folder).state == "ready"


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_device_with_sectors_of(start: Start, tmp_path: Path, sector: int) -> None:
    if os.geteuid() != 0 or shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("a loop device needs root, losetup and mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(
        ["losetup", "--show", "-f", "-b", str(sector), str(image)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"losetup: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", device], check=True)
        with mounted(device) as folder:
            assert serve_from(start, folder).direct_io == "direct"
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
