import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from strataflux.client.cli import output
from strataflux.client.cli.output import Output, emit_json, print_error, progress


def test_json_holds_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"kl": np.float32(0.5), "n": np.int64(3), "at": Path("/x"), "list": (1, {"ok": np.bool_(True)})})
    assert json.loads(capsys.readouterr().out) == {"kl": 0.5, "n": 3, "at": "/x", "list": [1, {"ok": True}]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("-inf")])
def test_json_has_no_number_that_is_not_finite(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"ppl": value})
    assert json.loads(capsys.readouterr().out) == {"ppl": None}


def test_json_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(TypeError):
        emit_json({"object": object()})


def test_with_json_only_the_result_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.print("for a person")
    out.result({"a": 1})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": 1}
    assert said.err == "for a person\n"


def test_without_json_a_person_reads_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=False)
    out.print("for a person")
    out.result({"a": 1})
    assert capsys.readouterr().out == "for a person\n"


def test_error_without_parts_is_told_by_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("not [bold]so"))
    assert capsys.readouterr().err == "error: not [bold]so\n"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "another path"),
        (errno.ENOENT, "check"),
        (errno.EIO, "run this again"),
    ],
)
def test_an_error_of_the_system_gets_its_parts(number: int, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error(OSError(number, os.strerror(number), "/a/path"), as_json=True)
    told = json.loads(capsys.readouterr().out)["error"]
    assert (told["subject"], told["found"]) == ("/a/path", os.strerror(number))
    assert told["expected"]
    assert remedy in told["remedy"]


def test_quick_work_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("preparing", total=2) as advance:
        advance()
        advance()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_long_wait_shows_itself_without_any_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", 0.0)
    with progress("waiting for the daemon"):
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        for timer in timers:
            timer.join()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "waiting for the daemon ...\n"
