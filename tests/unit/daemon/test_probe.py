"""A probe is in time, late, overdue or failed; and it reads what the reader would."""

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strataflux.daemon.errors import ReaderFailed
from strataflux.daemon.probe import Prober, read_once
from tests.unit.daemon.conftest import WATCHDOG_SECONDS


@dataclass
class Probed:
    descriptor: int
    alignment: int = 512


@dataclass
class Rig:
    """A prober whose clock and reader the test moves."""

    path: Path
    now: float = 100.0
    took: float = 0.0
    failure: Exception | None = None
    stores: list[Probed] = field(default_factory=list)

    def echo(self) -> None:
        self.now += self.took
        if self.failure is not None:
            raise self.failure

    def make(self) -> Prober:
        return Prober(self.echo, lambda: self.stores, limit_seconds=2, interval_seconds=3600, clock=lambda: self.now)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_in_time(rig: Rig) -> None:
    rig.took = 1.5
    prober = rig.make()
    prober.measure()
    assert prober.obstacle() is None
    assert (prober.last_seconds, prober.count) == (1.5, 1)


def test_late_and_then_in_time_again(rig: Rig) -> None:
    prober = rig.make()
    rig.took = 2.5
    prober.measure()
    assert prober.obstacle() == "the last answer took 2.5 s; the limit is 2 s"
    rig.took = 0.1
    prober.measure()
    assert prober.obstacle() is None


def test_a_reader_that_is_gone(rig: Rig) -> None:
    rig.failure = ReaderFailed("reader thread", "not running", "running", "restart the daemon")
    prober = rig.make()
    prober.measure()
    assert "not running" in (prober.obstacle() or "")


def test_a_device_that_fails(rig: Rig) -> None:
    descriptor = os.open(rig.path, os.O_RDONLY | os.O_DIRECTORY)  # read(2) of a folder: EISDIR
    rig.stores = [Probed(descriptor)]
    prober = rig.make()
    prober.measure()
    os.close(descriptor)
    assert "directory" in (prober.obstacle() or "")


def test_an_answer_that_does_not_come_is_told_while_it_does_not(rig: Rig) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def echo() -> None:
        inside.set()
        assert go_on.wait(WATCHDOG_SECONDS)

    prober = Prober(echo, list, limit_seconds=2, interval_seconds=0, clock=lambda: rig.now)
    prober.start()
    assert inside.wait(WATCHDOG_SECONDS)
    assert prober.obstacle() is None
    rig.now += 3
    assert prober.obstacle() == "no answer for 3.0 s; the limit is 2 s"
    prober.stop()
    go_on.set()


def test_a_store_is_read_at_its_own_alignment(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(bytes(8192))
    descriptor = os.open(path, os.O_RDONLY)
    read_once(Probed(descriptor, 4096))
    read_once(Probed(descriptor, 1))
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file"):
        read_once(Probed(-1))
