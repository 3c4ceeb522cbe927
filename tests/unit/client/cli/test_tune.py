"""``strataflux tune`` with a timer and a daemon that are not real; with real ones in tests/system."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from strataflux.client import launch, tuning
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.tune import Candidate
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.weights import WeightRefiner
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run


class Machine:
    """A step takes 1 ms, and 1 us more for each channel of budget."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __call__(self, candidate: Candidate | None) -> float:
        return 1e-3 + (sum(candidate.k) if candidate else 0) * 1e-6


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
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PrivateDaemon", NoDaemon)
    monkeypatch.setattr(tuning, "DecodeTimer", Machine)


def test_budgets_are_found_listed_and_kept(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    options = ("--reference", tiny_gguf, "--text", text, "--tokens", 8, "--slowdown", "10%")
    said = run("tune", tiny_prepared.folder, *options, "--json")
    assert said.code == 0, said.err
    found = said.json()
    assert sum(found["k"].values()) == 100
    assert found["slowdown"] == pytest.approx(0.1)
    assert {tuple(one) for one in (trial["k"] for trial in found["candidates"])} == {SETS}
    assert [trial["kl"] for trial in found["candidates"] if trial["kl"] is not None]
    kept = open_prepared(tiny_prepared.folder)
    assert dict(kept.manifest.k) == found["k"]
    assert kept.manifest.digest == tiny_prepared.manifest.digest
    verify_prepared(kept)


def test_a_person_reads_a_table(
    tiny_prepared: PreparedModel, tiny_gguf: Path, text: Path, no_machine: None, run: Run
) -> None:
    said = run("tune", tiny_prepared.folder, "--reference", tiny_gguf, "--text", text, "--tokens", 8)
    assert "chosen" in said.out
    assert "too slow" in said.out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--slowdown", "5"), "--slowdown"),
        (("--platform", "dedicated"), "--platform"),
        ((), "no unquantized model"),
    ],
)
def test_refusals(options: tuple[str, ...], named: str, tiny_prepared: PreparedModel, run: Run) -> None:
    said = run("tune", tiny_prepared.folder, *options)
    assert said.code == 2
    assert named in said.err


def test_steps_are_measured_through_a_session(
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
        timer = tuning.DecodeTimer(tiny_prepared, weights, [1, 2, 3], fake.path.parent)
        assert timer(None) == 1.0
        assert not looked
        assert timer(Candidate((8, 8, 0, 8))) == 1.0
    # Four rounds of three steps through two layers of four sets.
    assert len(looked) == 4 * 3 * 2 * 4
