"""``strataflux explain`` tells the same of a model before and after it is prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.cli.main import main
from strataflux.client.prepare.settings import PrepareSettings, base_settings
from strataflux.client.prepare.write import prepare
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

MACHINE = {"machine", "verdicts", "suits", "prepared"}


@pytest.fixture
def source(tmp_path: Path, tiny_source: TinySource) -> Path:
    write_hf(tmp_path / "model", tiny_source, hf_tensors(tiny_source))
    return tmp_path / "model"


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: TinySource) -> Path:
    return prepare(tiny_source, tmp_path / "prepared", PrepareSettings(base_settings("rtn", 4, 64))).folder


def explain(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[dict[str, Any], str]:
    with pytest.raises(SystemExit) as left:
        main(["explain", *map(str, words), "--json"])
    assert left.value.code == code
    said = capsys.readouterr()
    value: dict[str, Any] = json.loads(said.out)
    return value, said.err


def test_before_and_after(source: Path, prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, shown = explain(capsys, source, "--bits", 4, "--no-measure")
    after, _ = explain(capsys, prepared, "--no-measure")
    assert {name: value for name, value in before.items() if name not in MACHINE} == {
        name: value for name, value in after.items() if name not in MACHINE
    }
    assert (before["prepared"], after["prepared"], before["machine"]["disk"]) == (False, True, None)
    assert [v["name"] for v in before["verdicts"]] == ["memory", "disk space"]
    for part in ("fast memory", "RAM cache", "disk", "4 bits in groups of 64", "A token looks"):
        assert part in shown


def test_the_machine_is_measured(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "disk").mkdir()
    found, shown = explain(capsys, source, "--base", "awq", "--at", tmp_path / "disk", "--weight-cache", "50%")
    assert found["machine"]["disk"]["reads_per_second"] > 0
    assert found["cache_share"] == pytest.approx(0.5, abs=0.01)
    assert "random reads/s of 4 KiB" in shown
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "subject"),
    [(("--base", "magic"), "--base"), (("--mlp", "magic"), "--mlp"), (("--group", "128"), "group")],
)
def test_settings_that_cannot_be(
    words: tuple[str, ...], subject: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(capsys, source, *words, code=2)[0]["error"]["subject"] == subject


def test_a_prepared_model_is_what_it_is(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = explain(capsys, prepared, "--bits", 3, code=2)[0]["error"]
    assert (error["subject"], error["found"]) == ("--bits", "together with a prepared model")
