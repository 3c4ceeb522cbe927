"""``strataflux top`` beside a real daemon: what it counts, and what a terminal shows."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from strataflux.client.cli.main import main
from strataflux.client.control import Control
from strataflux.client.watch import look, rates
from tests.fakes.watch import Watch
from tests.system.conftest import COUNT, STOP_SECONDS, SmallStore, Start
from tests.system.test_daemon import attach, read
from tests.system.test_demo import PROGRAM

pytestmark = pytest.mark.system


def test_rates_are_the_daemons(start: Start, store: SmallStore, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    with Control(daemon.folder) as control, attach(daemon.folder, store) as session:
        before = look(control)
        read(session, store, 1)
        found = rates(look(control), before)
        assert found.fills_per_second > 0
        assert found.steps_per_second > 0
        (row,) = found.sessions
        assert row.pid == os.getpid()
        (misses,) = found.misses
        assert (misses.set, misses.records) == ("qkv", COUNT)
        assert misses.per_second == pytest.approx(found.fills_per_second)
        with pytest.raises(SystemExit) as left:
            main(["top", "--interval", "0.1", f"--runtime-dir={daemon.folder}", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert (left.value.code, said["state"], len(said["sessions"])) == (0, "ready", 1)
    see_in_a_terminal(daemon.folder)


def test_a_step_that_waits_is_one_step(start: Start, store: SmallStore) -> None:
    """It lets go of its slots while it waits, and begins again."""
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    with Control(daemon.folder) as control, attach(daemon.folder, store) as session:
        for seed in range(3):
            read(session, store, seed)
        assert session.stats().waits >= 3
        (row,) = Watch().wait_for(lambda: [one for one in control.sessions() if one.stats.steps >= 3])
        assert row.stats.steps == 3


def see_in_a_terminal(folder: Path) -> None:
    """A page comes, and q ends it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-c", PROGRAM, "top", "--interval", "60", f"--runtime-dir={folder}"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        shown = b""
        while b"resident" not in shown:
            shown += os.read(ours, 65536)
        assert b"stratafluxd" in shown
        os.write(ours, b"q")
        assert process.wait(STOP_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
