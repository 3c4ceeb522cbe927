"""The script behind docs/RESULTS.md: every row, on a machine that compiles nothing."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.client.prepare.bases.rtn import EXPONENT, FACTORS, LEAST_FACTOR
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

BENCH = Path(__file__).parents[3] / "bench"


def run(script: str, *words: object) -> str:
    """Output of a script of bench/ in a process where importing Numba fails."""
    program = "import runpy, sys; sys.modules['numba'] = None; runpy.run_path(sys.argv[0], run_name='__main__')"
    path = BENCH / script
    command = [sys.executable, "-c", f"import sys; sys.argv = sys.argv[1:]; {program}", str(path), *map(str, words)]
    roots = os.pathsep.join(sys.path)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": roots})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def parts(tmp_path: Path, tiny_source: Any) -> list[Path]:
    narrow = tiny_source.with_config(intermediate=128)
    write_gguf(tmp_path / "tiny.gguf", narrow, gguf_tensors(narrow))
    run("pack_model.py", tmp_path / "tiny.gguf", tmp_path / "parts", "--parts", 3)
    found = sorted((tmp_path / "parts").iterdir())
    assert b"".join(part.read_bytes() for part in found) == (tmp_path / "tiny.gguf").read_bytes()
    assert len(found) == 3
    return found


def test_every_base_and_its_table(tmp_path: Path, parts: list[Path]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("he went to the sea, and there he saw a ship; it was gone when he was back. " * 20)
    small = ("--windows", 2, "--window", 48, "--sequences", 4, "--length", 64, "--calibration", "rest")
    said = run("weights_sweep.py", "--model", *parts, "--text", text, "--bits", 2, 3, *small)
    rows = [json.loads(line) for line in said.splitlines()]
    made = {(row["base"], row["bits"], row["guides"]) for row in rows}
    codebooks = {(base, bits, guides) for bits in (2, 3) for base, guides in (("sqllm", 0), ("lnq", 1), ("lnq", 4))}
    assert made == codebooks | {("rtn", 3, 0), ("awq", 3, 0)}
    for key in made:
        own = [row for row in rows if (row["base"], row["bits"], row["guides"]) == key]
        assert len(own) == 18
        kl = {row["k"]: row["kl"] for row in own if not row["fit"] and (row["mlp"], row["shift"]) == ("channels", 0)}
        assert 0 < kl[1024] < 0.2 * kl[0]
    (tmp_path / "rows.jsonl").write_text(said)
    table = run("weights_table.py", tmp_path / "rows.jsonl")
    assert "| lnq 3-bit, 4 groups | 4.78" in table
    assert table.count("\n| awq 3-bit, g64 |") == 3
    assert "| - |" not in table


def test_normal_floats_have_four_bits_and_no_other(tmp_path: Path, parts: list[Path]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("he went to the sea, and there he saw a ship; it was gone when he was back. " * 20)
    small = ("--windows", 1, "--window", 48, "--sequences", 4, "--length", 64, "--calibration", "rest")
    words = ("--bases", "nf4", "--bits", 3, 4, "--k", 32, "--no-fit", "--no-shifts")
    said = run("weights_sweep.py", "--model", *parts, "--text", text, *small, *words)
    rows = [json.loads(line) for line in said.splitlines()]
    assert {(row["base"], row["bits"], row["bits_per_weight"]) for row in rows} == {("nf4", 4, 4.25)}
    kl = {row["k"]: row["kl"] for row in rows if row["mlp"] == "channels"}
    assert 0 < kl[1024] < 0.2 * kl[0]


def test_its_rounding_is_the_base_that_is_prepared() -> None:
    script = runpy.run_path(str(BENCH / "weights_sweep.py"))
    assert script["RTN_EXPONENT"] == EXPONENT
    assert torch.equal(script["RTN_SHRINK"], torch.linspace(1.0, LEAST_FACTOR, FACTORS))
