"""A quarantined record is tried again after a while, twice as long each time, on a real reader over a damaged file."""

from pathlib import Path

import numpy as np
import pytest

from strataflux.daemon.parole import Parole
from strataflux.daemon.store import open_served
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from tests.fakes.core_rig import make_store


class Rig:
    def __init__(self, folder: Path) -> None:
        make_store(folder, [(64, 512)])
        self.now = 1000.0
        self.tier = Tier([open_served(folder, direct_io="off")], layout.CACHE_PAGE_BYTES, 8, 2.0)
        self.parole = Parole(self.tier, 10.0, lambda: self.now)
        self.entries = self.parole._entries(0)

    def mark(self, oid: int) -> None:
        """What the reader does after a second failure."""
        self.entries[oid] = layout.ENTRY_QUARANTINED
        self.tier.core.tables[0]["quarantined"] += 1

    def after(self, seconds: float) -> int:
        self.now += seconds
        return self.parole.review()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "store")


def test_nothing_is_quarantined(rig: Rig) -> None:
    assert rig.after(1000) == 0


def test_backoff_doubles_and_is_bounded(rig: Rig) -> None:
    rig.mark(7)
    wait = 10.0
    for _ in range(10):
        assert rig.after(0) == 0
        assert rig.after(wait - 0.1) == 0
        assert rig.after(0.1) == 1
        assert rig.entries[7] == layout.ENTRY_ABSENT
        assert rig.tier.core.tables[0]["quarantined"] == 0
        rig.mark(7)
        wait = min(2 * wait, 640.0)


def test_each_record_has_its_own_time(rig: Rig) -> None:
    rig.mark(1)
    rig.after(0)
    rig.mark(2)
    assert rig.after(5) == 0
    assert rig.after(5) == 1
    assert list(np.flatnonzero(rig.entries == layout.ENTRY_QUARANTINED)) == [2]
    assert rig.after(5) == 1


def test_a_new_generation_starts_afresh(rig: Rig) -> None:
    rig.mark(1)
    rig.after(0)
    rig.after(10)
    rig.parole.forget(0)
    rig.mark(1)
    rig.after(0)
    assert rig.after(10) == 1


def test_a_device_that_is_gone_does_not_fill_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for oid in range(60):
        rig.mark(oid)
    rig.after(0)
    assert len(caplog.messages) == 9
    assert "52 more records" in caplog.messages[-1]
    rig.mark(60)
    rig.after(0)
    assert len(caplog.messages) == 10
    assert "record 60 of" in caplog.messages[-1]
