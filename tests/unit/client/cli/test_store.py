from pathlib import Path

import pytest

from strataflux.client.cli.store import Throttle
from tests.unit.client.cli.conftest import Run
from tests.unit.proto.test_verify import RECORDS, flip, make


def test_verify_and_repair(tmp_path: Path, run: Run) -> None:
    manifest = make(tmp_path / "store")
    make(tmp_path / "copy")
    assert run("store", "verify", manifest.folder, "--json").json() == {"records": RECORDS, "bad": [], "generation": 1}
    flip(manifest, 40)
    said = run("store", "verify", manifest.folder, "--json")
    assert (said.code, said.json()["bad"]) == (1, [40])
    assert "store repair" in run("store", "verify", manifest.folder).out
    said = run("store", "repair", manifest.folder, "--from", tmp_path / "copy", "--json")
    assert (said.code, said.json()) == (0, {"replaced": [40], "generation": 2})
    assert run("store", "verify", manifest.folder, "--threads", 1).code == 0
    said = run("store", "repair", manifest.folder, "--from", tmp_path / "copy", "--json")
    assert said.json() == {"replaced": [], "generation": 2}


def test_a_store_is_no_copy_of_itself(tmp_path: Path, run: Run) -> None:
    manifest = make(tmp_path / "store")
    (tmp_path / "link").symlink_to(manifest.folder)
    said = run("store", "repair", manifest.folder, "--from", tmp_path / "link")
    assert said.code == 2
    assert "the damaged store itself" in said.err


def test_no_store(tmp_path: Path, run: Run) -> None:
    assert run("store", "verify", tmp_path).code == 2


def test_a_throttle_waits_for_what_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("strataflux.client.cli.store.time.monotonic", lambda: 50.0)
    monkeypatch.setattr("threading.Event.wait", lambda self, seconds: waits.append(seconds))
    throttle = Throttle(1000)
    for _ in range(3):
        throttle(500)
    assert waits == [0.0, 0.5, 1.0]
    Throttle(0)(1 << 40)
    assert len(waits) == 3
