"""The fuzzer of bench/ in small: a real daemon stays up, others get what they ask for, everything is counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

FUZZ = Path(__file__).parents[2] / "bench" / "fuzz.py"
ENTRIES, MESSAGES = 200_000, 300


def test_rubbish_harms_nobody(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, str(FUZZ), "--entries", str(ENTRIES), "--messages", str(MESSAGES), "--rounds", "1"]
    roots = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*command, "--out", str(out)], env={**os.environ, "PYTHONPATH": roots}, capture_output=True, text=True
    )
    # Exit code 1 may tell of the times, which one short round on a busy machine cannot show.
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["state"] == "ready"
    assert found["entries_taken"] >= ENTRIES
    assert found["entries_invalid"] > ENTRIES // 2
    assert found["records_compared"] > 0
    zeros = ("wrong_records", "records_that_never_came", "descriptors_left", "sessions_left", "invalid_of_others")
    assert {name: found[name] for name in (*zeros, "entries_not_counted")} == dict.fromkeys(
        (*zeros, "entries_not_counted"), 0
    )
