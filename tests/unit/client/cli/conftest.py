"""A tiny model as a file, and prepared; and a way to run the command in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.cli.main import main
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf


@dataclass(frozen=True)
class Said:
    """How a command left, and what it wrote."""

    code: int | str | None
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> Said:
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return Said(left.value.code, said.out, said.err)

    return command


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_source: Any) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_source, gguf_tensors(tiny_source))
    return path


@pytest.fixture
def tiny_prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "prepared", PrepareSettings())
