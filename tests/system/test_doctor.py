"""The commands an operator asks with, against a real daemon."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.cli.main import main
from tests.system.conftest import COUNT, SmallStore, Start
from tests.system.test_daemon import attach, read

pytestmark = pytest.mark.system


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[Any, dict[str, Any]]:
    """A command's exit code and its JSON object."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, words), "--json"])
    return left.value.code, json.loads(capsys.readouterr().out)


def test_status_stores_sessions_and_a_proven_round_trip(
    start: Start, store: SmallStore, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start("--store", store.path, "--direct-io", "off")
    daemon.expect(b"READY=1")
    where = f"--runtime-dir={daemon.folder}"
    with attach(daemon.folder, store) as session:
        read(session, store, 1)
        code, said = ask(capsys, "sessions", where)
        assert code == 0
        assert [row["pid"] for row in said["sessions"]] == [os.getpid()]
        code, said = ask(capsys, "status", where)
        assert (code, said["info"]["state"], said["info"]["degraded"]) == (0, "ready", {})
        assert said["stats"]["fills"]["fills"] >= 256
        code, said = ask(capsys, "stores", where)
        assert (code, said["stores"][0]["records"], said["stores"][0]["path"]) == (0, COUNT, store.path)
    code, said = ask(capsys, "doctor", "--round-trip", where)
    assert said["round_trip"]["missed"]
    assert said["round_trip"]["fill_seconds"] > 0
    # The page cache is in use because the test asked for it; nothing else may be off on its account.
    assert code == 1
    assert "direct I/O" in {finding["name"] for finding in said["findings"]}
    assert not {"daemon", "group", "state", "stores", "corruption"} & {f["name"] for f in said["findings"]}


def test_a_configuration_with_an_unknown_key_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[reader]\ndepth = 3\n")
    code, said = ask(capsys, "doctor", f"--config={config}", f"--runtime-dir={tmp_path / 'nowhere'}")
    assert code == 1
    by_name = {finding["name"]: finding for finding in said["findings"]}
    assert "reader.depth" in by_name["config"]["found"]
    assert by_name["config"]["remedy"] == "remove it, or mend its spelling"
    assert "start stratafluxd" in by_name["daemon"]["remedy"]
    assert not said["ok"]
