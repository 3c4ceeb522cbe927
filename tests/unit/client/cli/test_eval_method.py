"""``strataflux eval --kv METHOD``: windows at once, token by token through a cache of codes, and what is refused."""

import json
import string
from pathlib import Path
from random import Random
from typing import Any

import pytest

from strataflux.client.evaluate.methods.registry import METHODS
from tests.unit.client.cli.conftest import Run
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

WINDOW = ("--context", 64, "--windows", 2, "--calibration-tokens", 2048, "--json")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(Random(1).choices(string.ascii_lowercase + " ,.", k=4000)))
    return path


@pytest.fixture
def coded(tmp_path: Path, tiny_gguf: Path, text: Path, run: Run) -> Path:
    calibration = ("--calibration", text, "--calibration-tokens", 2048)
    said = run("prepare", tiny_gguf, tmp_path / "out", *calibration, "--fsq", "16x,4x", "--json")
    assert said.code == 0, said.err
    return tmp_path / "out"


def test_windows_at_once_and_token_by_token_agree(coded: Path, text: Path, run: Run) -> None:
    found = {}
    for name in ("fsq:4x", "fsq:16x"):
        for mode in ((), ("--sequential",)):
            said = run("eval", coded, "--text", text, "--kv", name, *WINDOW, *mode)
            assert said.code == 0, said.err
            found[name, bool(mode)] = said.json()["kv"]
        dense, sequential = found[name, False], found[name, True]
        assert sequential["kl"] == pytest.approx(dense["kl"], rel=0.02)
        assert sequential["bytes"] == dense["bytes"]
        assert dense["prepared"]
    assert found["fsq:16x", True]["bytes"] == 63 * 2 * 8
    assert 0 < found["fsq:4x", False]["kl"] < found["fsq:16x", False]["kl"]


def test_a_model_as_published_is_converted_by_what_is_not_scored(tiny_gguf: Path, text: Path, run: Run) -> None:
    said = run("eval", tiny_gguf, "--text", text, "--kv", "fsq:4x", *WINDOW)
    assert said.code == 0, said.err
    assert "converted here" in said.err
    found = said.json()
    assert (found["weights"], found["tokens"], found["windows"]) == ("original", 63, 2)
    assert 0 < found["kv"]["kl"] < 0.1
    assert not found["kv"]["prepared"]


def test_codes_over_the_original_are_judged_over_it(
    tmp_path: Path, tiny_gguf: Path, tiny_source: Any, text: Path, run: Run
) -> None:
    calibration = ("--calibration", text, "--calibration-tokens", 2048)
    words = ("prepare", tiny_gguf, tmp_path / "out", *calibration, "--fsq", "4x", "--fsq-weights", "original")
    assert run(*words).code == 0
    command = ("eval", tmp_path / "out", "--text", text, "--kv", "fsq:4x", *WINDOW)
    found = run(*command).json()
    assert (found["weights"], found["kv"]["prepared"]) == ("original", True)
    other = tiny_source.with_config()
    other.cache["norm"] = 1 + other.tensor("norm", 64)
    write_gguf(tiny_gguf, other, gguf_tensors(other))
    said = run(*command)
    assert said.code == 2
    assert "codes made over weights" in said.json()["error"]["found"]
    tiny_gguf.unlink()
    said = run(*command)
    assert said.json()["error"]["remedy"] == "name it by --reference"


def test_codes_in_two_tiers_as_if_nothing_missed(tmp_path: Path, tiny_gguf: Path, text: Path, run: Run) -> None:
    calibration = ("--calibration", text, "--calibration-tokens", 2048)
    assert run("prepare", tiny_gguf, tmp_path / "out", *calibration, "--fsq", "4x").code == 0
    command = ("eval", tmp_path / "out", "--text", text, "--kv", "fsq:16x", "--refine-kv", "fsq:4x", "--kv-oracle")
    size = ("--context", 320, "--windows", 1, "--calibration-tokens", 2048, "--json")
    said = run(*command, "--fraction", "1/32", "--group", 1, *size)
    assert said.code == 0, said.err
    kv = said.json()["kv"]
    assert kv["whole_kl"] < kv["refined_kl"] < kv["base_kl"]
    assert kv["recovered"] == pytest.approx((kv["base_kl"] - kv["refined_kl"]) / (kv["base_kl"] - kv["whole_kl"]))
    assert (kv["resident"], kv["refined"], kv["bytes_resident"]) == ("fsq:16x", "fsq:4x", 319 * 2 * 8)
    more = run(*command, "--fraction", "1", "--group", 8, *size).json()["kv"]
    assert more["refined_kl"] == pytest.approx(more["whole_kl"], rel=0.01)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_reached(name: str, tiny_gguf: Path, text: Path, run: Run) -> None:
    ratio = ":16x" if name == "fsq+pyramid" else ":4x"
    amount = {"ratio": ratio, "bits": f":{max(METHODS[name].allowed, default=0)}", "none": ""}[METHODS[name].amount]
    options = ("--context", 320, "--windows", 1, "--calibration-tokens", 2048, "--json")
    said = run("eval", tiny_gguf, "--text", text, "--kv", name + amount, *options)
    assert said.code == 0, said.err
    kv = said.json()["kv"]
    assert kv["kl"] >= -1e-6
    assert (kv["ratio"] > 1) == (name != "exact")
    assert json.dumps(kv)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (("--kv", "fsq"), "--kv"),
        (("--kv", "fsq:0.5x"), "--kv"),
        (("--kv", "nothing:8x"), "--kv"),
        (("--kv", "palu:4x", "--sequential"), "--sequential"),
        (("--kv", "fsq:4x", "--sequential"), "--sequential"),
        (("--kv", "fsq:4x", "--tokens", 5), "--tokens"),
        (("--kv", "fsq:4x", "--dense"), "--dense"),
        (("--kv", "fsq:4x", "--runtime-dir", "/nowhere"), "--runtime-dir"),
        (("--kv", "fsq:4x", "--kv-oracle"), "--kv-oracle"),
        (("--kv", "fsq:4x", "--calibration-tokens", 9000, "--calibration", "short.txt"), "calibration"),
        (("--kv", "2/2", "--sequential"), "--sequential"),
        (("--kv", "fsq:16x", "--refine-kv", "palu:8x"), "--refine-kv"),
        (("--kv", "palu:16x", "--refine-kv", "fsq:8x"), "--kv"),
        (("--kv", "fsq:8x", "--refine-kv", "fsq:8x"), "--refine-kv"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--sequential"), "--sequential"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--tasks", "retrieval"), "--tasks"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--device", "cuda"), "--device"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--fraction", "2"), "--fraction"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:8x", "--kv-oracle", "--kv-cache", "5%"), "--kv-cache"),
        (("--kv", "fsq:16x", "--refine-kv", "fsq:4x", "--group", 3), "--group"),
        (("--kv", "fsq:4x", "--context", 5000), "text.txt"),
    ],
)
def test_refusals(
    options: tuple[object, ...], subject: str, tmp_path: Path, tiny_gguf: Path, text: Path, run: Run
) -> None:
    (tmp_path / "short.txt").write_text("short")
    words = [tmp_path / word if word == "short.txt" else word for word in options]
    size = () if "--context" in options else ("--context", 64)
    said = run("eval", tiny_gguf, "--text", text, *words, *size, "--json")
    assert said.code == 2
    assert subject in said.json()["error"]["subject"]
