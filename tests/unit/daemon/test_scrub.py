"""A scrub reads every record of every store at its pace, and says which are damaged."""

from pathlib import Path

import pytest

from strataflux.daemon.config import Config, resolve_config
from strataflux.daemon.reload import merge
from strataflux.daemon.scrub import Scrubber
from tests.unit.proto.test_verify import flip, make


def test_a_pass_finds_damage_at_its_pace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = make(tmp_path / "store")
    flip(manifest, 40)
    pauses: list[float] = []
    scrubber = Scrubber(lambda: [manifest.folder], 86_400 * 1000, pauses.append)
    assert scrubber.scrub(manifest.folder) == 1
    assert scrubber.bytes == sum(section.count * section.stride for section in manifest.sections)
    assert sum(pauses) == pytest.approx(scrubber.bytes / 1000)
    assert "record 40 of" in caplog.text


def test_without_a_budget_nothing_is_read(tmp_path: Path) -> None:
    manifest = make(tmp_path / "store")
    scrubber = Scrubber(lambda: [manifest.folder], 0)
    assert scrubber.scrub(manifest.folder) is None
    assert scrubber.bytes == 0


def test_a_store_that_is_gone_is_no_end(tmp_path: Path) -> None:
    assert Scrubber(list, 1 << 30).scrub(tmp_path / "gone") is None


def test_start_and_stop(tmp_path: Path) -> None:
    manifest = make(tmp_path / "store")
    scrubber = Scrubber(lambda: [manifest.folder], 1 << 60)
    scrubber.start()
    scrubber.stop()
    assert scrubber.bad.get(manifest.folder, 0) == 0


def test_a_reload_changes_limits_and_leaves_memory_for_a_restart() -> None:
    wanted = resolve_config(
        {"life": {"drain_seconds": 9}, "reader": {"queue_depth": 8}, "log": {"level": "debug"}}, "t"
    )
    merged, later = merge(Config(), wanted)
    assert (merged.life.drain_seconds, merged.log.level) == (9, "debug")
    assert merged.reader == Config().reader
    assert later == ["reader"]
