"""``strataflux tune`` with a timer and a daemon that are not real; with real ones in tests/system."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from strataflux.client import tune_run, tuning
from strataflux.client.prepare.candidates import Candidate, Timing
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import FitSettings, PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.schemes import stored_budgets
from strataflux.client.tune_run import TuneSettings, search_space
from strataflux.client.tuning import selection_of
from strataflux.client.weights import WeightRefiner
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run


class Machine:
    """A step takes 1 ms, and 1 us more for each channel of budget, a tenth of that for sets that are shifted."""

    def __init__(self, *_arguments: object, **_names: object) -> None:
        pass

    def __call__(self, candidate: Candidate) -> Timing:
        pairs = zip(candidate.k, candidate.shift, strict=True)
        slowdown = sum(k * (0.1 if blocks else 1.0) for k, blocks in pairs) / 1000
        return Timing(1e-3 * (1 + slowdown), 1e-3, slowdown)


class NoDaemon:
    """Stands where a private daemon would."""

    runtime_dir = Path("/nowhere")

    def __init__(self, *_arguments: object, **_names: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("he was here, and then he was not; he had gone there. " * 12)
    return path


@pytest.fixture
def fitted(tmp_path: Path, tiny_gguf: Path) -> PreparedModel:
    """Fitted for k = 32 and two rungs, with records for both ways to refine the MLP."""
    return prepare(open_source(tiny_gguf), tmp_path / "fitted", fitting(ladder=(8, 128)))


def fitting(**changes: Any) -> PrepareSettings:
    tokens = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))
    return PrepareSettings(fit=FitSettings(), tokens=tokens, mlp="both", **changes)


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_run, "PrivateDaemon", NoDaemon)
    monkeypatch.setattr(tune_run, "DecodeTimer", Machine)


def test_budgets_are_found_listed_and_kept(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    options = ("--reference", tiny_gguf, "--text", text, "--tokens", 8, "--slowdown", "10%")
    said = run("tune", tiny_prepared.folder, *options, "--json")
    assert said.code == 0, said.err
    found = said.json()
    assert 95 <= sum(found["k"].values()) <= 100
    assert found["slowdown"] == pytest.approx(sum(found["k"].values()) / 1000)
    assert found["kl"] < found["base_kl"]
    assert found["shift"] == dict.fromkeys(SETS, 0.0)
    assert {tuple(one) for one in (trial["k"] for trial in found["candidates"])} == {SETS}
    assert {tuple(trial["shift"].values()) for trial in found["candidates"]} == {(0.0,) * 4}
    assert [trial["kl"] for trial in found["candidates"] if trial["kl"] is not None]
    assert found["candidates"][-1]["confirming"]
    assert found["complete"]
    kept = open_prepared(tiny_prepared.folder)
    assert dict(kept.manifest.k) == found["k"]
    assert kept.manifest.digest == tiny_prepared.manifest.digest
    verify_prepared(kept)


def test_what_was_fitted_is_fitted_anew_at_the_budgets_that_were_found(
    fitted: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    before = fitted.manifest.digest
    said = run("tune", fitted.folder, "--reference", tiny_gguf, "--text", text, "--slowdown", "20%", "--json")
    assert said.code == 0, said.err
    found = said.json()
    assert {trial["mlp_scheme"] for trial in found["candidates"]} == {"channels", "bundles"}
    assert found["refitted"]
    kept = open_prepared(fitted.folder)
    assert kept.manifest.digest != before
    assert (dict(kept.manifest.k), kept.manifest.mlp_scheme) == (found["k"], found["mlp_scheme"])
    wanted = stored_budgets(found["k"], found["mlp_scheme"], kept.sets)
    assert kept.fitted_budgets == wanted
    assert found["kl_stored"] != found["kl"]
    verify_prepared(kept)

    # What is fitted for its budgets already is left alone.
    again = run("tune", fitted.folder, "--reference", tiny_gguf, "--text", text, "--slowdown", "20%", "--json").json()
    assert again["k"] == found["k"]
    assert not again["refitted"]
    assert open_prepared(fitted.folder).manifest.digest == kept.manifest.digest


def test_fitted_values_without_a_ladder_are_refused(
    tmp_path: Path, tiny_source: Any, tiny_gguf: Path, text: Path, run: Run
) -> None:
    alone = prepare(tiny_source, tmp_path / "alone", fitting())
    said = run("tune", alone.folder, "--reference", tiny_gguf, "--text", text)
    assert said.code == 2
    assert "qkv 32" in said.err
    assert "--ladder auto" in said.err


@pytest.mark.parametrize("options", [("--platform", "dedicated"), ("--miss", "wait:20")])
def test_shifts_are_searched_where_something_waits(
    options: tuple[str, ...], tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", text, "--json", *options)
    assert said.code == 0, said.err
    found = said.json()
    tried = {tuple(trial["shift"].values()) for trial in found["candidates"]}
    assert {(blocks,) * 4 for blocks in (0.0, 0.5, 1.0, 1.5, 2.0)} < tried
    kept = open_prepared(tiny_prepared.folder).manifest
    assert dict(kept.shift) == found["shift"]
    assert any(kept.shift.values())


def test_a_person_reads_a_table(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", text, "--tokens", 8)
    assert "chosen" in said.out
    assert "too slow" in said.out
    assert "% slower, and KL 0." in said.out


def test_time_that_is_up_is_told(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", text, "--minutes", 0)
    assert said.code == 0
    assert "--minutes" in said.out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--slowdown", "5"), "--slowdown"),
        (("--slowdown", "-5%"), "--slowdown"),
        (("--platform", "cloud"), "'cloud'"),
        (("--miss", "hurry"), "--miss"),
        (("--weight-cache", "120%"), "--weight-cache"),
        ((), "no unquantized model"),
    ],
)
def test_refusals(options: tuple[str, ...], named: str, tiny_prepared: PreparedModel, run: Run) -> None:
    before = (tiny_prepared.folder / "prepared.json").read_bytes()
    said = run("tune", tiny_prepared.folder, *options)
    assert said.code == 2
    assert named in said.err
    assert (tiny_prepared.folder / "prepared.json").read_bytes() == before


def test_a_text_that_is_too_short_is_told_with_both_numbers(
    tiny_prepared: PreparedModel, tiny_gguf: Path, tmp_path: Path, run: Run
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("he was")
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", short)
    assert said.code == 2
    assert "258" in said.err


def test_no_daemon_no_change(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    # A file where the daemon would make its folder: it cannot start, and says so.
    monkeypatch.setattr("strataflux.client.launch.sys.executable", "/bin/false")
    before = (tiny_prepared.folder / "prepared.json").read_bytes()
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", text)
    assert said.code == 2
    assert "stratafluxd" in said.err
    assert (tiny_prepared.folder / "prepared.json").read_bytes() == before


def test_budgets_that_select_alike_are_one_candidate(tiny_prepared: PreparedModel) -> None:
    selection = selection_of(tiny_prepared.config)
    # 64 inputs are a sixteenth of a chunk: 16 and 23 channels per 1,024 select one.
    one, same, more = (Candidate((k, 16, 16, 16)) for k in (16, 23, 32))
    assert selection(one) == selection(same) != selection(more)
    assert selection(one) != selection(Candidate(one.k, (0.5, 0.0, 0.0, 0.0)))


def test_skipping_searches_no_shifts(tiny_prepared: PreparedModel) -> None:
    assert search_space(tiny_prepared, TuneSettings(0.05)).shifts == ((0.0,) * 4,)
    assert len(search_space(tiny_prepared, TuneSettings(0.05, dedicated=True)).shifts) == 5


def test_steps_are_measured_in_pairs_through_a_session(
    tmp_path_factory: pytest.TempPathFactory, tiny_prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    weights = DecoderWeights.read(tiny_prepared)
    looked: list[Any] = []
    refine = WeightRefiner.refine

    def spy(self: Any, *arguments: Any) -> None:
        looked.append(arguments[:2])
        refine(self, *arguments)

    monkeypatch.setattr(WeightRefiner, "refine", spy)
    stores = [open_store(tiny_prepared.store)]
    with FakeDaemon(tmp_path_factory.mktemp("t"), stores, ring_log2=14) as fake:
        timer = tuning.DecodeTimer(tiny_prepared, weights, [1, 2, 3], fake.path.parent, rounds=2)
        assert timer(Candidate((8, 8, 0, 8), (1.0, 0.0, 0.5, 2.0))) == Timing(1.0, 1.0, 0.0)
    # A pass that fills the cache and two that count, of three steps through two layers of four sets.
    assert len(looked) == 3 * 3 * 2 * 4
