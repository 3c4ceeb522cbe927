"""``strataflux eval --kv`` without misses and against a fake daemon; with a real one in tests/system."""

import string
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from strataflux.client.prepare.prepared import PreparedModel
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

CONTEXT = 600
OPTIONS = ("--kv", "2/2", "--context", CONTEXT, "--fraction", "1/8", "--json")


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("k"), [], ring_log2=14) as fake:
        yield fake


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(Random(1).choices(string.ascii_lowercase + " ", k=1400)))
    return path


def test_without_misses(tiny_gguf: Path, text: Path, run: Run) -> None:
    said = run("eval", tiny_gguf, "--text", text, "--kv-oracle", *OPTIONS)
    assert said.code == 0, said.err
    found = said.json()
    kv = found["kv"]
    assert 0 < kv["refined_kl"] < kv["base_kl"]
    assert (kv["hit_rate"], kv["oracle"]) == (1.0, True)
    # Two layers of two heads: three tiles of 2 · 128 · 16 codes of 2 bits and 432 float16; 256 exact tokens of both.
    assert kv["bytes_resident"] == 4 * (3 * (1024 + 864) + 256 * 2 * 16 * 2)
    assert (found["tokens"], found["windows"], found["fraction"], found["resident"]) == (256, 1, "1/8", "2/2")


def test_through_a_daemon_that_has_everything(tiny_gguf: Path, text: Path, daemon: FakeDaemon, run: Run) -> None:
    oracle = run("eval", tiny_gguf, "--text", text, "--kv-oracle", *OPTIONS).json()["kv"]
    said = run("eval", tiny_gguf, "--text", text, "--windows", 2, "--runtime-dir", daemon.path.parent, *OPTIONS)
    assert said.code == 0, said.err
    found = said.json()
    kv = found["kv"]
    assert kv["hit_rate"] > 0.95  # what is put in one step is there in one of the next
    assert kv["bytes_resident"] == oracle["bytes_resident"]
    assert kv["refined_kl"] < kv["base_kl"]
    assert (found["engine"], found["windows"], kv["blocks_unrefined"]) == ("fake", 2, 0)
    assert kv["tokens_per_second"] > 0


def test_what_the_steps_before_selected(tiny_gguf: Path, text: Path, daemon: FakeDaemon, run: Run) -> None:
    options = ("--text", text, *OPTIONS, "--kv-select", "before:3")
    oracle = run("eval", tiny_gguf, "--kv-oracle", *options).json()
    now = run("eval", tiny_gguf, "--text", text, "--kv-oracle", *OPTIONS).json()
    assert (oracle["select"], now["select"]) == ("before:3", "step")
    assert oracle["kv"]["refined_kl"] != now["kv"]["refined_kl"]
    found = run("eval", tiny_gguf, "--runtime-dir", daemon.path.parent, *options).json()["kv"]
    assert 0 < found["refined_kl"] < found["base_kl"]
    assert found["hit_rate"] > 0.95  # what is put in one step is there in one of the next


def test_through_a_daemon_that_has_nothing(tiny_gguf: Path, text: Path, daemon: FakeDaemon, run: Run) -> None:
    daemon.cache_puts = False
    options = ("--text", text, "--runtime-dir", daemon.path.parent)
    kv = run("eval", tiny_gguf, *options, *OPTIONS).json()["kv"]
    assert (kv["hits"], kv["hit_rate"]) == (0, 0.0)
    # Two layers of two heads, an eighth of the 32 groups of each tile: one tile to token 384, two to 512, then three.
    assert kv["lookups"] == 2 * 2 * 4 * ((384 - 344) + 2 * (512 - 384) + 3 * (600 - 512))
    assert kv["refined_kl"] == pytest.approx(kv["base_kl"], rel=0.02)


def test_low_bit_weights_can_have_a_low_bit_cache(tiny_prepared: PreparedModel, text: Path, run: Run) -> None:
    found = run("eval", tiny_prepared.folder, "--text", text, "--kv-oracle", *OPTIONS).json()
    assert 0 < found["kv"]["refined_kl"] < found["kv"]["base_kl"]


def test_windows_begin_where_told(tiny_gguf: Path, text: Path, run: Run) -> None:
    options = ("--text", text, "--kv-oracle", "--kv", "3/2", "--context", 300, "--json")
    apart = [run("eval", tiny_gguf, *options, "--starts", start).json()["kv"]["base_kl"] for start in (5, 600)]
    both = run("eval", tiny_gguf, *options, "--starts", "5,600").json()["kv"]["base_kl"]
    assert both == pytest.approx(sum(apart) / 2)


def test_heads_that_are_no_power_of_two_are_named(tmp_path: Path, tiny_source: Any, text: Path, run: Run) -> None:
    source = tiny_source.with_config(hidden=96, head_dim=24)
    path = tmp_path / "odd.gguf"
    write_gguf(path, source, gguf_tensors(source))
    said = run("eval", path, "--text", text, *OPTIONS)
    assert said.code == 2
    assert "head_dim is 24" in said.json()["error"]["found"]


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (("--kv", "5/2"), "--kv"),
        (("--kv", "two"), "--kv"),
        (("--kv", "2/2", "--refine-kv", "5/4"), "--refine-kv"),
        (("--kv", "2/2", "--group", "3"), "--group"),
        (("--kv", "2/2", "--fraction", "2"), "--fraction"),
        (("--kv", "2/2", "--fraction", "1/0"), "--fraction"),
        (("--kv", "2/2", "--kv-select", "after"), "--kv-select"),
        (("--kv", "2/2", "--kv-select", "before:0"), "kept_steps"),
        (("--kv", "2/2", "--starts", "-5"), "--starts"),
        (("--kv", "2/2", "--context", 5000), "text.txt"),
        (("--kv", "2/2", "--k", 3), "--k"),
        (("--kv", "2/2", "--kv-oracle", "--kv-cache", "5%"), "--kv-cache"),
        (("--kv", "2/2", "--context", 300, "--kv-cache", "0%"), "--kv-cache"),
        (("--kv", "2/2", "--context", 300, "--runtime-dir", "/nowhere"), "/nowhere"),
    ],
)
def test_refusals(options: tuple[object, ...], subject: str, tiny_gguf: Path, text: Path, run: Run) -> None:
    said = run("eval", tiny_gguf, "--text", text, *options, "--json")
    assert said.code == 2
    assert subject in said.json()["error"]["subject"]
