"""Exit codes, and the one voice of refusals."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.daemon.__main__ import main
from strataflux.daemon.config import LogConfig
from strataflux.daemon.logs import configure_logging


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("strataflux")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_right_configuration_is_said_to_be_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check-config", "--weight-cache", "2MiB"]) == 0
    assert capsys.readouterr().out == "configuration is right\n"


def test_a_refusal_says_what_stands_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[cache]\nsize = 3\n")
    assert main(["--config", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"stratafluxd: error: {path}:cache.size",
        "  found:    an unknown key",
        "  expected: one of kv_bytes, policy, warm_start, weight_bytes",
        "  remedy:   remove it, or mend its spelling",
    ]


def test_a_mistyped_key_does_not_wait_for_compiled_code() -> None:
    program = (
        "import sys\nfrom strataflux.daemon.__main__ import main\n"
        "code = main(['--engine', 'spdk'])\n"
        "print(code, sorted({'numba', 'grpc', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "2 []\n"


def test_json_log_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(level="info", json=True))
    log = logging.getLogger("strataflux.test")
    log.info("a %s", "line\nbreak")
    log.debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "strataflux.test", "a line\nbreak")
    assert "ValueError: why" in second["exception"]


def test_text_log_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(level="warning"))
    logging.getLogger("strataflux.test").info("not shown")
    logging.getLogger("strataflux.test").warning("shown")
    assert capsys.readouterr().err == "WARNING shown\n"
