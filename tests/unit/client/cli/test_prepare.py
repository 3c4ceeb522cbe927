"""``strataflux prepare``: a prepared folder that is whole, or an explanation and nothing."""

from pathlib import Path
from typing import Any

import pytest

from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import BASES
from strataflux.client.prepare.verify import verify_prepared
from tests.unit.client.cli.conftest import Run
from tests.unit.client.prepare.test_sources import gguf_tensors, hf_tensors, write_gguf, write_hf


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

    monkeypatch.setattr("strataflux.client.prepare.publish.StoreWriter", refuse)
    said = run("prepare", tiny_gguf, tmp_path / "out")
    assert said.code == 1
    assert "No space left" in said.err
    assert names(tmp_path) == ["tiny.gguf"]


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("he saw the sea, the ship, the harbour; then he went home and slept. " * 60)
    return path


@pytest.mark.parametrize(
    ("options", "base", "bits_per_weight"),
    [
        (("--base", "awq"), "awq", 3 + 24 / 64),
        (("--base", "sqllm", "--bits", 2), "sqllm", None),
        (("--base", "lnq", "--guide-groups", 1, "--fit", "auto"), "lnq", None),
        (("--fit", "auto"), "rtn", 3 + 24 / 64),
        (("--base", "sqllm", "--fit", "auto", "--mlp", "bundles"), "sqllm", None),
    ],
)
def test_bases_that_calibrate(
    options: tuple[object, ...],
    base: str,
    bits_per_weight: float | None,
    tmp_path: Path,
    tiny_gguf: Path,
    prose: Path,
    run: Run,
) -> None:
    text = ("--calibration", prose, "--calibration-tokens", 2048)
    said = run("prepare", tiny_gguf, tmp_path / "out", *options, *text, "--json")
    assert said.code == 0, said.err
    found, prepared = said.json(), open_prepared(tmp_path / "out")
    verify_prepared(prepared)
    assert (found["base"], prepared.manifest.base) == (base, base)
    assert bits_per_weight is None or found["bits_per_weight"] == pytest.approx(bits_per_weight)
    assert names(tmp_path) == ["out", "prose.txt", "tiny.gguf"]
    scored = run("eval", tmp_path / "out", "--text", prose, "--tokens", 40, "--windows", 2, "--dense", "--json")
    assert scored.code == 0, scored.err
    rows = scored.json()
    assert rows["bits_per_weight"] == found["bits_per_weight"]
    assert 0 < rows["refined"]["kl"] < rows["base"]["kl"]
    assert rows["reference"]["ppl"] > 1


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("changes", "written"),
    [({"architecture": "qwen3", "head_dim": 32}, {}), ({"tied_head": False}, {"rope_scaling": LLAMA3})],
    ids=["qwen3", "llama3"],
)
def test_folders_of_both_architectures_with_every_base(
    base: str,
    changes: dict[str, Any],
    written: dict[str, Any],
    tmp_path: Path,
    tiny_source: Any,
    prose: Path,
    run: Run,
) -> None:
    source = tiny_source.with_config(intermediate=128, **changes)
    write_hf(tmp_path / "model", source, hf_tensors(source), **written)
    fixed = ("--fit", "auto", "--mlp", "both", "--calibration", prose, "--calibration-tokens", 2048)
    said = run("prepare", tmp_path / "model", tmp_path / "out", "--base", base, *fixed, "--json")
    assert said.code == 0, said.err
    assert said.json()["sets"] == ["qkv", "o", "gate_up", "down", "mlp"]
    verify_prepared(open_prepared(tmp_path / "out"))
    scored = run("eval", tmp_path / "out", "--text", prose, "--tokens", 40, "--windows", 1, "--dense", "--json")
    assert scored.code == 0, scored.err
    assert 0 < scored.json()["refined"]["kl"] < 1.05 * scored.json()["base"]["kl"]


def test_both_schemes_and_a_ladder_for_a_tuner(tmp_path: Path, tiny_source: Any, prose: Path, run: Run) -> None:
    narrow, model = tiny_source.with_config(intermediate=128), tmp_path / "narrow.gguf"
    write_gguf(model, narrow, gguf_tensors(narrow))
    text = ("--calibration", prose, "--calibration-tokens", 2048)
    said = run("prepare", model, tmp_path / "a", "--mlp", "both", "--fit", "auto", *text, "--json")
    assert said.code == 0, said.err
    assert said.json()["sets"] == ["qkv", "o", "gate_up", "down", "mlp"]
    assert (said.json()["mlp"], said.json()["ladder"]) == ("channels", [8, 128])
    said = run("prepare", model, tmp_path / "b", "--fit", "auto", "--ladder", "64,16,32", *text, "--json")
    assert said.json()["ladder"] == [16, 64]
    for options in (("--fit", "auto", "--ladder", "none"), ("--ladder", "auto")):
        said = run("prepare", model, tmp_path / "c", *options, *text, "--force", "--json")
        assert said.json()["ladder"] == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--mlp", "neurons"), "expected: channels, bundles, both"),
        (("--fit", "auto", "--ladder", "a few"), "'a few'"),
        (("--fit", "auto", "--ladder", "8,5000"), "expected: budgets of 1 to 1024"),
        (("--ladder", "8"), "without fitting"),
    ],
)
def test_schemes_and_ladders_that_do_not_exist(
    options: tuple[str, ...], named: str, tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run
) -> None:
    said = run("prepare", tiny_gguf, tmp_path / "out", *options, "--calibration", prose, "--calibration-tokens", 2048)
    assert said.code == 2
    assert named in said.err
    assert names(tmp_path) == ["prose.txt", "tiny.gguf"]


def test_an_interrupted_command_is_taken_up_again_unless_told_to_restart(
    tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("--calibration", prose, "--calibration-tokens", 2048)
    words = ("prepare", tiny_gguf, tmp_path / "out", "--base", "awq", *text, "--json")
    work = tmp_path / ".out.work" / "base" / "0.safetensors"
    made: list[int] = []

    def interrupt(*_arguments: object, **_names: object) -> None:
        made.append(work.stat().st_mtime_ns)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("strataflux.client.prepare.write.publish", interrupt)
        assert run(*words).code == 130
        assert run(*words).code == 130
        assert run(*words, "--restart").code == 130
    assert made[0] == made[1] < made[2]
    assert not (tmp_path / "out").exists()
    assert run(*words).code == 0
    assert names(tmp_path) == ["out", "prose.txt", "tiny.gguf"]


def test_a_calibration_text_that_is_too_short(tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run) -> None:
    said = run("prepare", tiny_gguf, tmp_path / "out", "--base", "awq", "--calibration", prose, "--json")
    assert said.code == 2
    assert said.json()["error"]["expected"] == "at least 16384 for calibration"
    assert int(said.json()["error"]["found"].removesuffix(" tokens")) < 16384
    assert names(tmp_path) == ["prose.txt", "tiny.gguf"]


def test_fits_that_do_not_exist(tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    for wrong in ("some", "-1", "nan"):
        assert run("prepare", tiny_gguf, tmp_path / "out", "--fit", wrong).code == 2
