"""The race of bench/serve: its parts, and a run in little over a real daemon and whatever rivals are installed."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.pages import ROOT

BENCH = ROOT / "bench"
LITTLE = ("--seconds", "0.05", "--records", "20000", "--budget-mib", "4", "--step", "256", "--sessions", "1,2")

Module = Callable[[str], Any]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.syspath_prepend(BENCH)
    return lambda name: importlib.import_module(f"serve.{name}")


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCH / "serve"), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.system
@pytest.mark.slow
def test_a_race_in_little(tmp_path: Path) -> None:
    trace, out, page = tmp_path / "made.npz", tmp_path / "race.json", tmp_path / "page.md"
    keys = np.random.default_rng(3).integers(0, 4000, (32, 100))
    np.savez(trace, **{"0.o": keys, "n0.o": np.array(4000)})  # type: ignore[arg-type]  # names are not keywords here
    only = "strataflux; strataflux, waiting; mmap; lmdb"
    options = ("--big-records", 30_000, "--trace", trace, "10%", "--folder", tmp_path / "f", "--only", only)
    said = run(*LITTLE, *options, "--out", out)
    assert said.returncode == 0, said.stderr
    found = json.loads(out.read_text())
    rows = found["rows"]
    there = {"strataflux", "strataflux, waiting", "mmap"} | ({"lmdb"} if importlib.util.find_spec("lmdb") else set())
    assert {row["rival"] for row in rows} == there
    assert {row["stage"] for row in rows} == {"base", "big", "made at 10%"}
    assert all(row["lookups"] > 0 and row["cpu_us"] > 0 for row in rows)
    # Whoever waits is served whole; where all is resident, nobody has to.
    assert all(row["served"] == 1 for row in rows if row["rival"] != "strataflux" or row["kind"] in ("hits", "latency"))
    assert {row["sessions"] for row in rows} == {1, 2}
    assert found["failed"] == []
    assert "lmcache" in found["skipped"]
    assert list((tmp_path / "f").iterdir()) == []
    page.write_text("before\n<!-- race: begin -->\nof another run\n<!-- race: end -->\nafter\n")
    assert run("report", out, "--page", page).returncode == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- race: begin -->\n\n2")
    assert text.endswith("<!-- race: end -->\nafter\n")
    assert "of another run" not in text
    assert "| strataflux |" in text


def row(rival: str, kind: str, skew: float | None = None, **figures: float) -> dict[str, Any]:
    usual = {"stage": "base", "sessions": 1, "served": 1.0, "limited": True, "cpu_us": 1.0}
    return {**usual, "own_bytes": 0, "page_cache_bytes": 0, "rival": rival, "kind": kind, "skew": skew, **figures}


def test_aims_and_losses_are_told(module: Module) -> None:
    rows = [
        row("strataflux", "hits", rate=30e6),
        row("mmap", "hits", rate=50e6),
        row("lmdb", "hits", rate=4e6),
        row("strataflux", "cold", rate=50e3, cpu_us=6.0),
        row("lmdb", "cold", rate=40e3, cpu_us=5.0),
        row("strataflux", "steps", 0.9, p50_us=1.0, p99_us=9.0),
        row("mmap", "steps", 0.9, p50_us=1.0, p99_us=10.0),
    ]
    report = module("report")
    found = {"rows": rows}
    assert [(round(value, 2), met) for _, value, met in report.aims(found)] == [
        (7.5, False),
        (0.6, True),
        (1.25, True),
        (1.2, False),
        (0.9, True),
    ]
    lost = report.winners(found)
    assert any("hits/s: mmap" in line for line in lost)
    assert any("CPU a cold record: lmdb" in line for line in lost)
    assert not any("step" in line or "cold records/s" in line for line in lost)


def test_popular_records_are_popular_and_lie_anywhere(module: Module) -> None:
    streams = module("streams")
    ranks = np.arange(1000)
    keys = streams.scattered(ranks, 1000)
    assert sorted(keys.tolist()) == ranks.tolist()
    assert gcd(streams._MULTIPLIER, 1 << 20) == gcd(streams._MULTIPLIER, 20_000_000) == 1
    for skew in (0.6, 1.0, 1.2):
        steps = streams.zipf_steps(1000, skew, 64, 256, seed=1)
        assert steps.shape == (64, 256)
        assert (steps.min(), steps.max()) >= (0, 0)
        assert steps.max() < 1000
        counts = np.bincount(steps.ravel(), minlength=1000)[keys]
        # By rank: the first tenth is asked for more than any other tenth, the more the larger the exponent.
        tenths = counts.reshape(10, 100).sum(axis=1)
        assert tenths[0] == tenths.max() > 2 * tenths[9]
    assert sorted(streams.shuffled(5, 50, 1).tolist()) == list(range(5, 50))


def test_a_group_holds_the_page_cache_down(module: Module, tmp_path: Path) -> None:
    confine, usage = module("confine"), module("usage")
    path = tmp_path / "data"
    path.write_bytes(bytes(24 << 20))
    usage.drop_page_cache([path])
    assert usage.page_cache_bytes(path) == 0
    with confine.make_group("test") as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        program = (
            "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); "
            "usage = int(open(sys.argv[2]).read()); open(sys.argv[3], 'w').write(str(usage + (8 << 20))); "
            "file = open(sys.argv[4], 'rb', buffering=0)\nwhile file.read(65536): pass"
        )
        words = [sys.executable, "-c", program, group.folder, group.usage, group.limit, path]
        subprocess.run([str(word) for word in words], check=True)
    assert 0 < usage.page_cache_bytes(path) < 12 << 20
