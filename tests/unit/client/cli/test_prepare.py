"""``strataflux prepare``: a prepared folder that is whole, or an explanation and nothing."""

from pathlib import Path

import pytest

from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.verify import verify_prepared
from tests.unit.client.cli.conftest import Run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_prepares_and_says_what(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    said = run("prepare", tiny_gguf, tmp_path / "out", "--bits", 4, "--k", 16, "--json")
    assert said.code == 0
    prepared = open_prepared(tmp_path / "out")
    verify_prepared(prepared)
    assert (prepared.manifest.bits, prepared.manifest.k["qkv"]) == (4, 16)
    found = said.json()
    assert found["identity_digest"] == prepared.manifest.digest
    assert found["resident_bytes"] == prepared.resident_bytes
    assert names(tmp_path) == ["out", "tiny.gguf"]


def test_a_person_reads_one_line(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    said = run("prepare", tiny_gguf, tmp_path / "out")
    assert (said.code, said.err) == (0, "")
    assert len(said.out.splitlines()) == 1
    assert "3 bits in groups of 64" in said.out


def test_a_prepared_model_is_replaced_only_by_force(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run("prepare", tiny_gguf, out).code == 0
    said = run("prepare", tiny_gguf, out, "--bits", 2)
    assert said.code == 2
    assert "--force" in said.err
    assert open_prepared(out).manifest.bits == 3
    assert run("prepare", tiny_gguf, out, "--bits", 2, "--force").code == 0
    assert open_prepared(out).manifest.bits == 2
    assert names(tmp_path) == ["out", "tiny.gguf"]


def test_other_files_are_never_replaced(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.tex"):
        said = run("prepare", tiny_gguf, out, "--force")
        assert said.code == 2
        assert "no prepared model" in said.err
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("option", "value", "named"), [("--bits", 5, "bits"), ("--group", 96, "group"), ("--base", "gptq", "--base")]
)
def test_settings_that_do_not_exist(
    option: str, value: object, named: str, tmp_path: Path, tiny_gguf: Path, run: Run
) -> None:
    said = run("prepare", tiny_gguf, tmp_path / "out", option, value, "--json")
    assert said.code == 2
    assert said.json()["error"]["subject"] == named
    assert names(tmp_path) == ["tiny.gguf"]


def test_a_truncated_file_leaves_nothing(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-1000])
    said = run("prepare", tiny_gguf, tmp_path / "out")
    assert said.code == 2
    assert "tiny.gguf" in said.err
    assert names(tmp_path) == ["tiny.gguf"]


def test_a_disk_that_refuses_is_a_failure(
    tmp_path: Path, tiny_gguf: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strataflux.client.prepare.write.StoreWriter", refuse)
    said = run("prepare", tiny_gguf, tmp_path / "out")
    assert said.code == 1
    assert "No space left" in said.err
    assert names(tmp_path) == ["tiny.gguf"]
