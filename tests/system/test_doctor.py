"""The commands an operator asks with, against a real daemon."""

import grp
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.cli.main import main
from tests.system.conftest import COUNT, SmallStore, Start
from tests.system.test_daemon import attach, read
from tests.system.test_places import CONFINE, IO_URING_SETUP

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


_OTHER_USER = """
import dataclasses, json, os, pathlib, sys
from strataflux.client import doctor
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps([dataclasses.asdict(finding) for finding in doctor.check_access(pathlib.Path(sys.argv[1]))]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_who_is_not_in_the_group_is_told_which(start: Start, store: SmallStore, tmp_path: Path) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    command = [sys.executable, "-c", _OTHER_USER, str(daemon.folder)]
    (finding,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (finding["name"], finding["found"]) == ("group", f"{daemon.folder} cannot be entered")
    assert grp.getgrgid(daemon.folder.stat().st_gid).gr_name in finding["remedy"]


def test_io_uring_that_a_sandbox_denies_is_found_where_no_daemon_runs(tmp_path: Path) -> None:
    command = [*CONFINE, "deny", str(IO_URING_SETUP), sys.executable, "-c"]
    command += ["from strataflux.client.cli.main import main; main()", "doctor", "--json", f"--runtime-dir={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    by_name = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert 'reader.engine = "threads"' in by_name["io_uring"]["remedy"]
    assert done.returncode == 1


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
