"""``strataflux eval`` against a fake daemon; with a real one of its own in tests/system."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from strataflux.client.errors import InputError
from strataflux.client.evaluate import run as evaluate_module
from strataflux.client.evaluate.compare import Row, cut_windows, join_scores, reference_of, score_unrefined
from strataflux.client.prepare.candidates import Candidate
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.tuning import keep
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run

TEXT = "he was here, and then he was not; he had gone there. " * 4


class Control:
    """Counts 1,000 bytes more each time it is asked."""

    def __init__(self, runtime_dir: Path) -> None:
        self.asked = 0

    def stats(self) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(reads=SimpleNamespace(bytes=1000 * self.asked))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def daemon(
    tmp_path_factory: pytest.TempPathFactory, tiny_prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDaemon]:
    monkeypatch.setattr(evaluate_module, "Control", Control)
    with FakeDaemon(tmp_path_factory.mktemp("e"), [open_store(tiny_prepared.store)], ring_log2=14) as fake:
        yield fake


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_everything_resident(
    tiny_prepared: PreparedModel, tiny_gguf: Path, daemon: FakeDaemon, text: Path, run: Run
) -> None:
    daemon.publish(0, *range(daemon.manifests[0].record_count))
    options = ("--text", text, "--reference", tiny_gguf, "--tokens", 70, "--windows", 2, "--k", 1024)
    said = run("eval", tiny_prepared.folder, *options, "--runtime-dir", daemon.path.parent, "--json")
    assert said.code == 0, said.err
    found = said.json()
    assert (found["tokens"], found["windows"], found["miss"], found["engine"]) == (70, 2, "skip", "fake")
    assert found["reference"]["kl"] == 0
    assert 0 < found["refined"]["kl"] < 0.1 * found["base"]["kl"]
    assert 0 < found["refined"]["kl_without_first_64"] < 0.1 * found["base"]["kl_without_first_64"]
    assert (found["refined"]["weight_hit_rate"], found["refined"]["bytes_read"]) == (1.0, 1000)
    assert found["refined"]["tokens_per_second"] > 0
    assert found["k"] == dict.fromkeys(SETS, 1024)
    assert (found["shift"], found["mlp_scheme"]) == (dict.fromkeys(SETS, 0.0), "channels")


def test_what_tuning_kept_is_what_is_scored_and_told(
    tiny_prepared: PreparedModel, daemon: FakeDaemon, text: Path, run: Run
) -> None:
    keep(tiny_prepared, Candidate((128, 64, 128, 32), (0.5, 1.0, 0.0, 2.0)))
    daemon.publish(0, *range(daemon.manifests[0].record_count))
    options = ("--text", text, "--tokens", 20, "--runtime-dir", daemon.path.parent, "--json")
    shifted = run("eval", tiny_prepared.folder, *options).json()
    assert shifted["shift"] == {"qkv": 0.5, "o": 1.0, "gate_up": 0.0, "down": 2.0}
    assert shifted["k"] == {"qkv": 128, "o": 64, "gate_up": 128, "down": 32}
    said = run("eval", tiny_prepared.folder, *options[:-1])
    assert "k = qkv 128, o 64, gate_up 128, down 32; blocks of lead and lag: qkv 0.5, o 1, down 2; MLP by" in said.out
    keep(tiny_prepared, Candidate((128, 64, 128, 32)))
    still = run("eval", tiny_prepared.folder, *options).json()
    assert still["refined"]["ppl"] != shifted["refined"]["ppl"]


def test_all_that_is_there_refines_if_asked_to(
    tiny_prepared: PreparedModel, daemon: FakeDaemon, text: Path, run: Run
) -> None:
    daemon.publish(0, *range(daemon.manifests[0].record_count))
    options = ("--text", text, "--tokens", 20, "--runtime-dir", daemon.path.parent)
    everything = run("eval", tiny_prepared.folder, *options, "--k", 1024, "--json").json()
    joined = ("--k", 8, "--residents", 1016, "--read-ahead", 1)
    found = run("eval", tiny_prepared.folder, *options, *joined, "--json").json()
    assert found["refined"]["ppl"] == pytest.approx(everything["refined"]["ppl"], rel=1e-4)
    assert found["residents"] == 1016
    assert found["refined"]["weight_resident_rate"] > 100
    assert "channels that were there anyway" in run("eval", tiny_prepared.folder, *options, *joined).out
    late = run("eval", tiny_prepared.folder, *options, *joined, "--lag", 0.5, "--json").json()
    assert late["shift"] == {"qkv": 0.0, "o": 0.5, "gate_up": 0.0, "down": 0.5}
    assert late["refined"]["ppl"] != found["refined"]["ppl"]


def test_nothing_resident_is_the_base(tiny_prepared: PreparedModel, daemon: FakeDaemon, text: Path, run: Run) -> None:
    options = ("--text", text, "--tokens", 20, "--runtime-dir", daemon.path.parent)
    found = run("eval", tiny_prepared.folder, *options, "--json").json()
    assert "reference" not in found
    assert found["refined"]["ppl"] == pytest.approx(found["base"]["ppl"], rel=1e-4)
    assert (found["refined"]["kl"], found["refined"]["weight_hit_rate"]) == (None, 0.0)
    said = run("eval", tiny_prepared.folder, *options)
    assert "perplexity only" in said.out


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (("--miss", "never"), "--miss"),
        (("--dense", "--residents", 9), "--residents"),
        (("--dense", "--lag", 1), "--lag"),
        (("--lag", 0.3), "shift of o"),
        (("--weight-cache", "120%"), "--weight-cache"),
        (("--weight-cache", "1MiB", "--runtime-dir", "/nowhere"), "--weight-cache"),
        (("--tokens", 100_000), "text.txt"),
        (("--runtime-dir", "/nowhere", "--tokens", 20), "/nowhere"),
        (("--reference", "/nowhere.gguf", "--tokens", 20), "/nowhere.gguf"),
    ],
)
def test_refusals(
    options: tuple[object, ...], subject: str, tiny_prepared: PreparedModel, text: Path, run: Run
) -> None:
    said = run("eval", tiny_prepared.folder, "--text", text, *options, "--json")
    assert said.code == 2
    assert subject in said.json()["error"]["subject"]


def test_a_folder_that_is_no_prepared_model(tmp_path: Path, run: Run) -> None:
    said = run("eval", tmp_path)
    assert said.code == 2
    assert "prepared.json" in said.err


def test_windows_follow_one_another() -> None:
    assert cut_windows("text", range(10), 3, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(InputError, match="at least 12"):
        cut_windows("text", range(10), 3, 3)


def test_rows_of_one_pass(tiny_source: Any, tiny_prepared: PreparedModel) -> None:
    exact, low = DecoderWeights.read(tiny_source), DecoderWeights.read(tiny_prepared)
    references = [reference_of(exact, window) for window in ([1, 2, 3, 4], [9, 8, 7])]
    joined = join_scores([score_unrefined(low, reference) for reference in references])
    assert joined.tokens == 5
    assert joined.kl > 0
    assert Row(joined).kl_without_first_64 is None
    assert Row(joined, against_reference=False).to_json()["kl"] is None
