"""``strataflux simulate``: what it prints, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.client.cli.conftest import Run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    rows = {f"{layer}.o": np.sort(rng.zipf(1.4, (60, 6)) % 32, axis=1) for layer in range(3)}
    scores = {"s" + name: np.ones(keys.shape, np.float16) for name, keys in rows.items()}
    np.savez(tmp_path / "made.npz", **rows, **scores)  # type: ignore[arg-type]  # names are not keywords here
    return tmp_path / "made.npz"


def test_json_has_every_policy_the_optimum_and_the_default(run: Run, trace: Path) -> None:
    said = run("simulate", trace, "--policy", "sieve,blend", "--capacity", "10%,50%", "--json")
    assert said.code == 0
    value = said.json()
    assert set(value) == {"made", "weighted", "default"}
    assert value["default"] == "blend"
    assert list(value["made"]) == ["10%", "50%"]
    for rates in value["made"].values():
        assert set(rates) == {"lru", "sieve", "blend", "belady"}
        assert all(rates["belady"] >= rate for rate in rates.values())
    assert value["weighted"]["made"]["50%"]["lru"] == pytest.approx(value["made"]["50%"]["lru"])


def test_fill_and_lru_modes_change_the_numbers(run: Run, trace: Path) -> None:
    def lru(*words: str) -> float:
        value = run("simulate", trace, "--policy", "lru", "--capacity", "10%", "--json", *words).json()
        return float(value["made"]["10%"]["lru"])

    exact = lru()
    assert lru("--lru", "lazy") != exact
    assert lru("--fill", "next-step") != exact


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--policy", "belady"), "--policy"),
        (("--capacity", "0%"), "--capacity"),
        (("--capacity", "10"), "--capacity"),
        (("--fill", "later"), "--fill"),
        (("--lru", "fuzzy"), "--lru"),
    ],
)
def test_bad_options_are_refused(run: Run, trace: Path, words: tuple[str, str], found: str) -> None:
    said = run("simulate", trace, *words, "--json")
    assert said.code == 2
    assert said.json()["error"]["subject"] == found


def test_two_files_of_one_name_are_refused(run: Run, trace: Path) -> None:
    assert run("simulate", trace, trace).code == 2


def test_a_table_for_people(run: Run, trace: Path) -> None:
    said = run("simulate", trace, "--policy", "lru", "--capacity", "25%")
    assert said.code == 0
    assert "made: hit rate" in said.out
    assert "belady" in said.out


def test_a_plot_is_written(run: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "rates.png"
    assert run("simulate", trace, "--policy", "lru", "--capacity", "10%,25%", "--plot", out, "--json").code == 0
    assert out.read_bytes()[1:4] == b"PNG"


def test_without_matplotlib_a_plot_is_refused_first(run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = run("simulate", trace, "--plot", "rates.png", "--json")
    assert said.code == 2
    assert "[bench]" in said.json()["error"]["remedy"]
