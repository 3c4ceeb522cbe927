"""``strataflux serve`` refuses before it reads a model, and says what to change."""

import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.cli.main import main
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.proto.extras import install_command
from tests.unit.client.conftest import TinySource


@pytest.fixture
def folder(tmp_path: Path, tiny_source: TinySource) -> Path:
    return prepare(tiny_source, tmp_path / "prepared", PrepareSettings()).folder


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as left:
        main(["serve", *map(str, words), "--json"])
    assert left.value.code == 2
    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    assert error["remedy"]
    return error


def test_a_port_in_use(folder: Path, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, folder, "--port", taken)
    assert error["found"] == f"127.0.0.1:{taken} (Address already in use)"


def test_an_address_of_another_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "192.0.2.1:0" in refusal(capsys, folder, "--host", "192.0.2.1", "--port", 0)["found"]


def test_a_daemon_that_is_required_and_absent(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, folder, "--port", 0, "--runtime-dir", tmp_path, "--require-daemon")
    assert error["kind"] == "DaemonUnavailableError"


def test_more_context_than_the_model_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, folder, "--context", 1 << 20)
    assert error["subject"] == "--context"
    assert "at most the model's" in error["expected"]


@pytest.mark.parametrize("content", ["", "  \n", "ключ"])
def test_a_key_file_without_a_key(
    content: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(content)
    assert "key" in refusal(capsys, folder, "--api-key-file", tmp_path / "key")["subject"]
    assert "nowhere" in refusal(capsys, folder, "--api-key-file", tmp_path / "nowhere")["subject"]


def test_a_chat_template_that_does_not_compile(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jinja").write_text("{% for %}")
    assert refusal(capsys, folder, "--chat-template", tmp_path / "bad.jinja")["expected"] == "a Jinja template"


def test_what_is_not_installed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    error = refusal(capsys, folder)
    assert (error["found"], install_command("serve") in error["remedy"]) == ("no uvicorn", True)
