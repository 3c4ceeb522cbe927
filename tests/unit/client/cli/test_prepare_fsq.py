"""``strataflux prepare --fsq``: codes over a model and over its low-bit base, trained, taken up again, refused."""

import string
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.prepare import fsq_stage
from strataflux.client.prepare.fsq_file import load_codes, weights_digest
from strataflux.client.prepare.fsq_tune_model import write_more
from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from tests.unit.client.cli.conftest import Run
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("".join(Random(1).choices(string.ascii_lowercase + " ,.", k=4000)))
    return path


def words(model: Path, out: Path, prose: Path, *more: object) -> tuple[object, ...]:
    return ("prepare", model, out, "--calibration", prose, "--calibration-tokens", 2048, *more, "--json")


@pytest.mark.parametrize("base", ["rtn", "awq", "nf4"])
def test_codes_over_the_base_and_over_the_original(
    base: str, tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run
) -> None:
    said = run(*words(tiny_gguf, tmp_path / "out", prose, "--base", base, "--fsq", "8x,4x"))
    assert said.code == 0, said.err
    prepared = open_prepared(tmp_path / "out")
    assert list(prepared.codes) == ["4x", "8x"]
    found = said.json()["codes"]
    for name, size in (("4x", 32), ("8x", 16)):
        assert (found[name]["bytes"], found[name]["weights"], found[name]["levels"]) == (size, "base", "mixed")
        codes = load_codes(prepared.codes[name], prepared.config, weights_digest(prepared))
        assert max(layer.grid.nbytes for layer in codes.layers) == size
    assert max(found["4x"]["key_errors"]) < max(found["8x"]["key_errors"]) < 1

    said = run(*words(tiny_gguf, tmp_path / "over", prose, "--fsq", "8x", "--fsq-weights", "original"))
    assert said.code == 0, said.err
    source, other = open_source(tiny_gguf), open_prepared(tmp_path / "over").codes["8x"]
    original = load_codes(other, source.config, weights_digest(source))
    low_bit = load_codes(prepared.codes["8x"], source.config, weights_digest(prepared))
    assert not torch.equal(original.layers[0].decoder, low_bit.layers[0].decoder)


def test_wider_than_the_rank_is_said(tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run) -> None:
    options = ("--fsq", "2x", "--fsq-levels", 16, "--fsq-bound", "tanh", "--calibration-tokens", 3072)
    said = run(*words(tiny_gguf, tmp_path / "out", prose, *options))
    assert said.code == 0, said.err
    assert "128 coordinates, but keys and values have" in said.err
    assert "--fsq-levels mixed or 256" in said.err


def test_training_is_never_worse_on_held_out_text(tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run) -> None:
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "a.txt").write_text(prose.read_text())
    (texts / "deep" / "b.md").write_text(prose.read_text() * 5)
    (texts / "c.bin").write_bytes(b"\xff\xfe\xfd")
    said = run(
        *words(tiny_gguf, tmp_path / "out", prose, "--base", "nf4", "--fsq", "16x", "--tune", 0.02, "--text", texts)
    )
    assert said.code == 0, said.err
    told = said.json()["codes"]["16x"]
    before, after = told["held_out_kl"]
    assert after <= before
    assert told["tuned_seconds"] >= 1.2
    assert "KL on held-out text" in said.err


@pytest.mark.parametrize("minutes", [0, 0.03])
def test_codes_in_two_tiers_are_evaluated_as_they_were_prepared(
    minutes: float, tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run
) -> None:
    longer = tmp_path / "longer.txt"
    longer.write_text(prose.read_text() * 3)
    training = ("--tune", minutes, "--text", longer) + (("--own-text", 1500) if minutes else ())
    said = run(*words(tiny_gguf, tmp_path / "out", prose, "--fsq", "8x", "--tiers", "16x", *training))
    assert said.code == 0, said.err
    told = said.json()["codes"]["8x"]
    assert (told["bytes"], told["resident_bytes"]) == (16, 8)
    assert "16 bytes a token and layer, 8 of them resident" in said.err
    if minutes:
        assert told["held_out_kl"][1] <= told["held_out_kl"][0]
    prepared = open_prepared(tmp_path / "out")
    codes = load_codes(prepared.codes["8x"], prepared.config, weights_digest(prepared))
    evaluated = ("--context", 64, "--windows", 1, "--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--kv-oracle", "--json")
    said = run("eval", tmp_path / "out", "--text", prose, *evaluated)
    assert said.code == 0, said.err
    tokens = prepared.tokenizer().encode(prose.read_text()).ids[:64]
    weights = DecoderWeights.read(prepared)
    coarse = fsq_logits(weights, [tier.coarse for tier in codes.tiers], tokens[:-1])
    expected = score_logits(coarse, dense_reference(weights, tokens)).kl
    assert said.json()["kv"]["base_kl"] == pytest.approx(expected, rel=1e-4)


def test_a_model_that_writes_takes_no_more_memory_than_may_be_kept(
    tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = list[int]()

    def told(*given: Any) -> Any:
        at_once.append(given[-1])
        return write_more(*given)

    monkeypatch.setattr(fsq_stage, "write_more", told)
    monkeypatch.setattr(fsq_stage, "_KEPT_BYTES", 1)
    (longer := tmp_path / "longer.txt").write_text(prose.read_text() * 3)
    training = ("--tune", "1e-4", "--text", longer, "--own-text", 100)
    said = run(*words(tiny_gguf, tmp_path / "out", prose, "--fsq", "8x", *training))
    assert said.code == 0, said.err
    assert at_once == [1]


def test_what_an_interrupted_run_converted_is_not_converted_again(
    tmp_path: Path, tiny_gguf: Path, prose: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(tiny_gguf, tmp_path / "out", prose, "--fsq", "8x")
    first = tmp_path / ".out.work" / "fsq-8x" / "0.safetensors"
    keep = fsq_stage.FsqStage._keep

    def interrupt(stage: Any, name: str, index: int, made: Any) -> None:
        if index == 1:
            raise KeyboardInterrupt
        keep(stage, name, index, made)

    with monkeypatch.context() as patched:
        patched.setattr(fsq_stage.FsqStage, "_keep", interrupt)
        assert run(*command).code == 130
        made = first.stat().st_mtime_ns
        assert run(*command).code == 130
        assert first.stat().st_mtime_ns == made
    assert not (tmp_path / "out").exists()
    said = run(*command)
    assert said.code == 0, said.err
    whole = run(*words(tiny_gguf, tmp_path / "whole", prose, "--fsq", "8x"))
    assert said.json()["codes"] == whole.json()["codes"]
    assert not first.exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--fsq", "16"), "write --fsq 16x"),
        (("--fsq", "0.5x"), "ratios from 1x on"),
        (("--fsq", "1000x"), "0 bytes a token"),
        (("--fsq", "8x", "--fsq-levels", "5"), "divide a byte"),
        (("--fsq", "8x", "--fsq-bound", "round"), "tanh, floor, clamp"),
        (("--fsq", "8x", "--fsq-weights", "mine"), "base, original"),
        (("--fsq-levels", "16"), "no --fsq"),
        (("--tune", "1"), "no --fsq"),
        (("--fsq", "8x", "--own-text", "9"), "--tune beside it"),
        (("--fsq", "8x", "--tune", "-1"), "-1 minutes"),
        (("--tiers", "16x"), "no --fsq"),
        (("--fsq", "8x", "--tiers", "8x"), "one ratio above 8x"),
        (("--fsq", "8x", "--tiers", "16x,32x"), "one ratio above 8x"),
        (("--fsq", "8x", "--tiers", "16"), "write --tiers 16x"),
        (("--fsq", "8x", "--tiers", "16x", "--fsq-bound", "tanh"), "cells that nest"),
        (("--fsq", "8x", "--tune", "1", "--text", "/nowhere"), "/nowhere"),
    ],
)
def test_refusals(options: tuple[str, ...], named: str, tmp_path: Path, tiny_gguf: Path, run: Run) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a short text of no great length, all the same long enough for one sequence. " * 33)
    said = run("prepare", tiny_gguf, tmp_path / "out", "--calibration", short, "--calibration-tokens", 2048, *options)
    assert said.code == 2
    assert named in said.err
    assert not (tmp_path / "out").exists()


def test_layers_with_windows_stay_as_they_are(tmp_path: Path, tiny_source: Any, prose: Path, run: Run) -> None:
    kinds = ["sliding_attention", "full_attention"]
    window: dict[str, Any] = {"sliding_window": 24, "use_sliding_window": True, "layer_types": kinds}
    source = tiny_source.with_config(architecture="qwen3")
    write_hf(tmp_path / "qwen", source, hf_tensors(source), **window)
    said = run(*words(tmp_path / "qwen", tmp_path / "out", prose, "--fsq", "8x"))
    assert said.code == 0, said.err
    assert "1 of 2 layers attend to the newest 24 positions and stay as they are" in said.err
    assert len(said.json()["codes"]["8x"]["key_errors"]) == 1
    assert open_prepared(tmp_path / "out").config.windows == (24, 0)
    longer = tmp_path / "longer.txt"
    longer.write_text(prose.read_text() * 3)
    trained = ("--tune", 0.02, "--text", longer)
    said = run(*words(tmp_path / "qwen", tmp_path / "trained", prose, "--fsq", "8x", *trained))
    assert said.code == 0, said.err
    before, after = said.json()["codes"]["8x"]["held_out_kl"]
    assert after <= before
    found = {}
    evaluated = ("--context", 64, "--windows", 1, "--calibration-tokens", 2048, "--json")
    for mode in ((), ("--sequential",)):
        said = run("eval", tmp_path / "out", "--text", prose, "--kv", "fsq:8x", *evaluated, *mode)
        assert said.code == 0, said.err
        found[mode] = said.json()["kv"]
        assert found[mode]["bytes"] == 63 * 16 + 24 * 128
        assert found[mode]["facts"]["kept"] == {"layers": [0], "windows": [24]}
    assert found["--sequential",]["kl"] == pytest.approx(found[()]["kl"], rel=0.02)
    said = run("eval", tmp_path / "out", "--text", prose, "--kv", "palu:8x", *evaluated)
    assert said.code == 2
    assert "1 of 2 layers that attend to a window" in said.err
    said = run("eval", tmp_path / "out", "--text", prose, "--kv", "fsq:16x", "--refine-kv", "fsq:8x", *evaluated)
    assert said.code == 2
    assert said.json()["error"]["subject"] == "--refine-kv"
    assert "1 of 2 layers that attend to a window" in said.err


def test_a_model_of_windows_only_has_nothing_to_code(tmp_path: Path, tiny_source: Any, prose: Path, run: Run) -> None:
    write_hf(
        tmp_path / "m", tiny_source, hf_tensors(tiny_source), architectures=["MistralForCausalLM"], sliding_window=24
    )
    said = run(*words(tmp_path / "m", tmp_path / "out", prose, "--fsq", "8x"))
    assert said.code == 2
    assert "2 layers with windows of at most 24 positions" in said.err
    assert not (tmp_path / "out").exists()
    said = run(*words(tmp_path / "m", tmp_path / "out", prose))
    assert said.code == 0, said.err
    said = run("eval", tmp_path / "out", "--text", prose, "--kv", "2/2", "--context", 512, "--windows", 1)
    assert said.code == 2
    assert "layer 0, which attends to 24 positions" in said.err
