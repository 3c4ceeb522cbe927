"""A newcomer at a daemon whose places are all taken."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.client.errors import BusyError, RefusedError
from strataflux.client.session import ATTACHED, Session
from strataflux.proto.messages import Refuse
from tests.fakes.daemon import FakeDaemon

BUSY = Refuse("busy", "sessions with KV: 1 attached or just leaving", "at most 1", "try again shortly")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [], ring_log2=10) as fake:
        yield fake


class Pauses:
    """Waits for nothing; the daemon is busy for the first ``times`` attempts."""

    def __init__(self, daemon: FakeDaemon, times: int) -> None:
        self.daemon = daemon
        self.left = times
        self.seconds = list[float]()
        self._refuse()

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._refuse()

    def _refuse(self) -> None:
        self.daemon.refuse_next = BUSY if self.left > 0 else None
        self.left -= 1


def attach(daemon: FakeDaemon, pauses: Pauses) -> Session:
    return Session.attach([], selections_per_step=1, runtime_dir=daemon.path.parent, pause=pauses)


def test_a_busy_daemon_is_asked_again(daemon: FakeDaemon) -> None:
    pauses = Pauses(daemon, 3)
    with attach(daemon, pauses) as session:
        assert session.state == ATTACHED
    assert pauses.seconds == [0.05, 0.1, 0.2]


def test_a_daemon_that_stays_busy_is_an_error_that_says_how_long(daemon: FakeDaemon) -> None:
    pauses = Pauses(daemon, 99)
    expected = r"attach \(busy\): found .* just leaving, and so for 3\.2 s; expected at most 1; try again shortly"
    with pytest.raises(BusyError, match=expected):
        attach(daemon, pauses)
    assert pauses.seconds == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]


def test_other_refusals_are_final(daemon: FakeDaemon) -> None:
    pauses = Pauses(daemon, 0)
    daemon.refuse_next = Refuse("limit", "17 sessions of uid 0", "at most 16", "close one")
    with pytest.raises(RefusedError, match="17 sessions"):
        attach(daemon, pauses)
    assert not pauses.seconds
