"""``generate`` and ``bench`` where there is no GPU, and what is refused of them anywhere."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.prepare.prepared import PreparedModel
from tests.unit.client.cli.conftest import Run

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_no_gpu_is_told_and_not_quietly_replaced(tiny_prepared: PreparedModel, tmp_path: Path, run: Run) -> None:
    said = run("generate", tiny_prepared.folder, "he", "--device", "cuda", "--runtime-dir", tmp_path, "--json")
    assert said.code == 2
    assert said.json()["error"]["subject"] == "--device cuda"
    assert "--device cpu" in said.json()["error"]["remedy"]


@without_gpu
@pytest.mark.parametrize("command", ["decode", "kernels"])
def test_benchmarks_of_a_gpu_need_one(command: str, run: Run) -> None:
    said = run("bench", command, "--json")
    assert said.code == 2
    assert "GPU" in said.json()["error"]["expected"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--device", "tpu"), "--device"),
        (("--device", "cuda", "--miss", "wait:5"), "--miss"),
        (("--device", "cuda", "--platform", "shared"), "--platform"),
        (("--device", "cuda", "--platform", "dedicated", "--kv", "2/2"), "--refine-kv"),
        (("--kv", "5/2"), "--kv"),
    ],
)
def test_refusals(options: tuple[str, ...], named: str, tiny_prepared: PreparedModel, run: Run) -> None:
    said = run("generate", tiny_prepared.folder, "he", *options)
    assert said.code == 2
    assert named in said.err


@pytest.mark.parametrize(("option", "value"), [("--device", "cpu"), ("--base", "5-bit"), ("--kv", "2")])
def test_refusals_of_benchmarks(option: str, value: str, run: Run) -> None:
    said = run("bench", "decode", option, value)
    assert said.code == 2
    assert option in said.err
