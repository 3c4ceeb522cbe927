"""Commands about KV, each a process with a real daemon of its own, on a tiny model as a file."""

import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.test_demo import Place, tiny_source
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

pytestmark = pytest.mark.system

CONTEXT = 560
COMMON = ("--kv", "2/2", "--refine-kv", "4/4", "--group", 4, "--fraction", "1/8", "--context", CONTEXT)


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path, tmp_path_factory.mktemp("x"))
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_source(), gguf_tensors(tiny_source()))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(1).choices(string.ascii_lowercase + " ", k=1400)))
    return path


def test_eval_says_what_refinement_is_worth_and_that_waiting_misses_nothing(
    place: Place, model: Path, text: Path
) -> None:
    oracle = place.run("eval", model, "--text", text, *COMMON, "--kv-oracle")
    assert 0 < oracle["kv"]["refined_kl"] < oracle["kv"]["base_kl"]
    assert (oracle["kv"]["hit_rate"], oracle["kv"]["oracle"]) == (1.0, True)
    # Four pages of slots hold a part of the records: what is waited for is read from the disk.
    waited = place.run("eval", model, "--text", text, *COMMON, "--miss", "wait:60000", "--kv-cache", "10%")
    assert waited["kv"].keys() == oracle["kv"].keys()
    assert waited["kv"]["base_kl"] == pytest.approx(oracle["kv"]["base_kl"])
    assert waited["kv"]["refined_kl"] == pytest.approx(oracle["kv"]["refined_kl"], rel=0.01)
    assert waited["kv"]["bytes_resident"] == oracle["kv"]["bytes_resident"] > 0
    assert 0 < waited["kv"]["hit_rate"] < 1
    assert waited["kv"]["hits"] < waited["kv"]["lookups"]
    assert (waited["waits"] > 0, waited["deadlines_exceeded"], waited["kv"]["blocks_unrefined"]) == (True, 0, 0)
    assert (waited["context"], waited["windows"], waited["tokens"]) == (CONTEXT, 1, 256)
    assert place.leftovers() == []


def test_a_skipped_miss_costs_accuracy_and_no_more(place: Place, model: Path, text: Path) -> None:
    found = place.run("eval", model, "--text", text, *COMMON, "--kv-cache", "10%")
    assert found["kv"]["refined_kl"] < found["kv"]["base_kl"]
    assert (found["waits"], found["steps_invalid"], found["kv"]["oracle"]) == (0, 0, False)
    assert 0 < found["kv"]["hit_rate"] < 1


def test_running_ahead_reads_before_misses_and_says_what_came_of_it(place: Place, model: Path, text: Path) -> None:
    options = ("--kv-cache", "10%", "--read-ahead", 1, "--miss", "budget:20%")
    found = place.run("eval", model, "--text", text, *COMMON, *options)
    assert found["kv"]["refined_kl"] < found["kv"]["base_kl"]
    assert (found["read_ahead"], found["miss"], found["steps_invalid"]) == (1, "budget:20%", 0)
    told = found["prefetches"]
    assert told["asked"] >= told["fills"] > 0
    assert told["used"] + told["unused"] <= told["fills"]


def test_bench_put_takes_every_block(place: Place, tmp_path: Path) -> None:
    found = place.run("bench", "put", "--blocks", 8, "--rounds", 1, "--folder", tmp_path / "bench")
    assert (found["refused"], found["blocks"]) == (0, 8)
    assert found["bytes_per_second"] > 0
    assert found["step_microseconds_quiet"] > 0
    assert (found["ratio_to_fio"] is None) == (found["fio_bytes_per_second"] is None)
    assert list((tmp_path / "bench").iterdir()) == []


def test_codes_in_two_tiers_through_a_daemon_say_what_they_cost(place: Place, model: Path, text: Path) -> None:
    text.write_text("".join(random.Random(1).choices(string.ascii_lowercase + " ", k=6000)))
    sizes = ("--kv", "fsq:16x", "--refine-kv", "fsq:4x", "--fraction", "1/8", "--context", 300, "--windows", 1)
    command = ("eval", model, "--text", text, *sizes, "--calibration-tokens", 4096)
    oracle = place.run(*command, "--kv-oracle")
    found = place.run(*command, "--miss", "wait:60000")
    assert found["kv"]["refined_kl"] == pytest.approx(oracle["kv"]["refined_kl"], rel=0.02)
    assert found["kv"]["whole_kl"] < found["kv"]["refined_kl"] < found["kv"]["base_kl"]
    assert 0 < found["hits"] <= found["lookups"]
    assert (found["blocks_unrefined"], found["steps_invalid"], found["deadlines_exceeded"]) == (0, 0, 0)
    assert place.leftovers() == []
