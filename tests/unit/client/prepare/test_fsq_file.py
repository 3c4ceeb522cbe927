"""Codes on disk: what is read is what was written, and over no other model."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.client.errors import InputError
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_file import FsqAbout, load_codes, read_about, save_codes, weights_digest
from strataflux.client.prepare.fsq_request import FsqRequest
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.refit import refit
from strataflux.client.prepare.settings import FitSettings, PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.kernels.fsq_nested import FsqTier

TOKENS = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))
DIGEST = "5" * 64


@pytest.fixture(scope="module")
def about() -> FsqAbout:
    return FsqAbout(16, 0, "clamp", "base", DIGEST, 60, (0.1, 0.2), (0.3, 0.4), 12.5, (0.06, 0.03))


@pytest.fixture
def saved(tiny_source: Any, tmp_path: Path, about: FsqAbout) -> Path:
    made = convert(tiny_source, TOKENS, FsqSettings(16, 0, "clamp"), torch.device("cpu"))
    path = tmp_path / "8x.safetensors"
    save_codes(path, [one.layer for one in made], about)
    return path


def test_what_is_read_is_what_was_converted(tiny_source: Any, saved: Path, about: FsqAbout) -> None:
    made = convert(tiny_source, TOKENS, FsqSettings(16, 0, "clamp"), torch.device("cpu"))
    codes = load_codes(saved, tiny_source.config, DIGEST)
    assert codes.about == about == read_about(saved)
    for one, found in zip(made, codes.layers, strict=True):
        assert found.grid == one.layer.grid
        for part in ("encoder", "encoder_bias", "decoder", "decoder_bias"):
            assert torch.equal(getattr(found, part), getattr(one.layer, part)), part
    assert codes.nbytes == sum(one.layer.grid.nbytes for one in made)
    assert [path.name for path in saved.parent.iterdir()] == ["8x.safetensors"]


@pytest.fixture
def tiers(tiny_source: Any) -> list[FsqTier]:
    made = convert(tiny_source, TOKENS, FsqSettings(16, 0, "clamp"), torch.device("cpu"))
    return divide_codes(tiny_source, [one.layer for one in made], TOKENS, 8, torch.device("cpu"))


@pytest.fixture
def saved_tiers(tiers: list[FsqTier], tmp_path: Path, about: FsqAbout) -> Path:
    path = tmp_path / "tiers.safetensors"
    save_codes(path, tiers, replace(about, resident_nbytes=8))
    return path


def test_tiers_are_read_as_they_were_divided(tiny_source: Any, tiers: list[FsqTier], saved_tiers: Path) -> None:
    codes = load_codes(saved_tiers, tiny_source.config, DIGEST).to(torch.device("cpu"))
    assert codes.about.resident_nbytes == 8
    for one, found, whole in zip(tiers, codes.tiers, codes.layers, strict=True):
        assert found.grid == one.grid
        assert found.whole is whole
        assert torch.equal(whole.decoder, one.whole.decoder)
        assert torch.equal(found.coarse_decoder, one.coarse_decoder)
        assert torch.equal(found.coarse_bias, one.coarse_bias)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda about: about.update(resident_nbytes=7), "8 resident bytes a token in layer 0.*7"),
        (lambda about: about.update(resident_nbytes=0), "format 2 with 0"),
        (lambda about: (about.pop("resident_nbytes"), about.update(format=1)), "16 tensors.*2 layers of 5"),
        (lambda about: about.update(bound="tanh"), "do not nest"),
    ],
)
def test_headers_of_tiers_that_are_wrong_are_named(
    change: Callable[[dict[str, Any]], object], named: str, tiny_source: Any, saved_tiers: Path
) -> None:
    change_header(saved_tiers, change)
    with pytest.raises(InputError, match=named):
        load_codes(saved_tiers, tiny_source.config, DIGEST)


def test_codes_of_another_model_are_refused(tiny_source: Any, saved: Path) -> None:
    with pytest.raises(InputError, match=r"weights 555555555555….*weights [0-9a-f]{12}…, the model's"):
        load_codes(saved, tiny_source.config, weights_digest(tiny_source))


def test_codes_come_along_when_refinement_is_fitted_anew(tiny_source: Any, tmp_path: Path) -> None:
    request = FsqRequest("8x", FsqSettings(16, 0, "clamp"))
    settings = PrepareSettings(k=8, fit=FitSettings(1.0), tokens=TOKENS, codes=(request,))
    prepared = prepare(tiny_source, tmp_path / "prepared", settings)
    before = prepared.manifest.identity["base_weights_sha256"], weights_digest(prepared)
    again = refit(prepared, tiny_source, 64)
    assert again.manifest.identity["base_weights_sha256"] != before[0]
    assert weights_digest(again) == before[1]
    assert load_codes(again.codes["8x"], again.config, weights_digest(again)).about.weights == "base"


def test_every_tensor_counts_in_a_models_digest(tiny_source: Any) -> None:
    source = tiny_source.with_config(architecture="qwen3", tied_head=False)
    before = weights_digest(source)
    assert weights_digest(source) == before
    for name in list(source.cache):
        source.cache[name].view(-1)[-1].add_(1)
        assert weights_digest(source) != before, name
        source.cache[name].view(-1)[-1].sub_(1)


def test_other_dimensions_are_refused(tiny_source: Any, saved: Path) -> None:
    for other in ({"layers": 3}, {"hidden": 128}, {"kv_heads": 4}):
        with pytest.raises(InputError, match=r"8x\.safetensors"):
            load_codes(saved, replace(tiny_source.config, **other), DIGEST)


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header["__metadata__"]["fsq"])
    change(about)
    header["__metadata__"]["fsq"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda about: about.update(format=3), "format 3.*format 1 or 2"),
        (lambda about: about.update(format=2), "format 2 with 0 resident bytes"),
        (lambda about: about.update(resident_nbytes=8), "format 1 with 8 resident bytes"),
        (lambda about: about.pop("bound"), "header"),
        (lambda about: about.update(bound="round"), "bound 'round'"),
        (lambda about: about.update(nbytes=15), "16 bytes a token in layer 0"),
        (lambda about: about.update(surprise=1), "header"),
        (lambda about: about.pop("held_out"), "header"),
        (lambda about: about.update(nbytes="16"), "header.*nbytes '16'"),
        (lambda about: about.update(weights_sha256=None), "header.*weights_sha256 None"),
        (lambda about: about.update(key_errors=["low"]), "header.*key_errors"),
    ],
)
def test_headers_that_are_wrong_are_named(
    change: Callable[[dict[str, Any]], object], named: str, tiny_source: Any, saved: Path
) -> None:
    change_header(saved, change)
    with pytest.raises(InputError, match=named):
        load_codes(saved, tiny_source.config, DIGEST)


def test_files_that_are_damaged_or_missing_are_refused(tiny_source: Any, saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-8:] = b"\xff" * 8  # the last decoder bias: not a number
    saved.write_bytes(data)
    with pytest.raises(InputError, match=r"layers\.1\.decoder_bias"):
        load_codes(saved, tiny_source.config, DIGEST)
    saved.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"8x\.safetensors"):
        load_codes(saved, tiny_source.config, DIGEST)
    with pytest.raises(InputError, match=r"nothing\.safetensors"):
        read_about(tmp_path / "nothing.safetensors")
