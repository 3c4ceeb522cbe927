"""What every base keeps, with plain and fitted refinement: one suite, one list."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.dense import DenseModel, dense_reference, dense_score
from strataflux.client.evaluate.dense_run import refined_dense
from strataflux.client.evaluate.scoring import score
from strataflux.client.prepare.bases.awq import AwqSettings
from strataflux.client.prepare.bases.lnq import LnqSettings
from strataflux.client.prepare.bases.nf4 import Nf4Settings
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.bases.sqllm import SqllmSettings
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import BASES, FitSettings, PrepareSettings, base_settings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.prepare.write import prepare, prepare_steps
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.schemes import stored_schemes
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

TOKENS = torch.randint(0, 250, (8, 16), generator=torch.Generator().manual_seed(0))
SCORED = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()

SETTINGS = [
    PrepareSettings(RtnSettings(3, 64)),
    PrepareSettings(RtnSettings(2, 64), mlp="bundles"),
    PrepareSettings(RtnSettings(3, 64), fit=FitSettings(), tokens=TOKENS),
    PrepareSettings(AwqSettings(3, 64), tokens=TOKENS),
    PrepareSettings(AwqSettings(4, 64), fit=FitSettings(1.0), tokens=TOKENS, mlp="bundles"),
    PrepareSettings(SqllmSettings(2), tokens=TOKENS),
    PrepareSettings(SqllmSettings(4), fit=FitSettings(), tokens=TOKENS, mlp="both", ladder=(8, 128)),
    PrepareSettings(LnqSettings(3, 1), tokens=TOKENS),
    PrepareSettings(LnqSettings(2, 4), fit=FitSettings(), tokens=TOKENS),
    PrepareSettings(Nf4Settings()),
    PrepareSettings(Nf4Settings(), fit=FitSettings(), tokens=TOKENS, mlp="both", ladder=(8,)),
]
NAMES = [f"{one.base.to_json()['name']}{one.base.bits}{'-fit' if one.fit else ''}-{one.mlp}" for one in SETTINGS]


@pytest.fixture
def tiny_source(tiny_source: Any) -> Any:
    """Narrower: the suite prepares it a hundred times."""
    return tiny_source.with_config(intermediate=128)


@pytest.fixture(params=SETTINGS, ids=NAMES)
def settings(request: pytest.FixtureRequest) -> PrepareSettings:
    found: PrepareSettings = request.param
    return found


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "written"),
    [({"architecture": "qwen3", "head_dim": 32, "heads": 6}, {}), ({"tied_head": False}, {"rope_scaling": LLAMA3})],
    ids=["qwen3", "llama3"],
)
def test_other_models_are_prepared_from_their_folders(
    tmp_path: Path, tiny_source: Any, settings: PrepareSettings, changes: dict[str, Any], written: dict[str, Any]
) -> None:
    source = tiny_source.with_config(**changes)
    write_hf(tmp_path / "m", source, hf_tensors(source), **written)
    read = open_source(tmp_path / "m")
    assert read.config.architecture == source.config.architecture
    assert bool(read.config.rope_divisors) == bool(written)
    model = prepare(read, tmp_path / "p", settings)
    verify_prepared(open_prepared(tmp_path / "p"))
    low, reference = DecoderWeights.read(model), dense_reference(DecoderWeights.read(read), SCORED)
    refined = min(
        dense_score(refined_dense(model, low, 512, scheme), reference).kl for scheme in stored_schemes(model.sets)
    )
    assert settings.fit or refined < dense_score(DenseModel(low), reference).kl
    stepped = score(Decoder(low, len(SCORED)).step, reference)
    assert stepped.kl == pytest.approx(dense_score(DenseModel(low), reference).kl, abs=1e-4)


def test_every_base_is_listed() -> None:
    assert {one.base.to_json()["name"] for one in SETTINGS} == set(BASES)


def test_what_was_lost_is_in_the_store(tmp_path: Path, tiny_source: Any, settings: PrepareSettings) -> None:
    calls: list[None] = []
    model = prepare(tiny_source, tmp_path / "p", settings, lambda: calls.append(None))
    assert len(calls) == prepare_steps(tiny_source.config, settings)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    verify_prepared(open_prepared(tmp_path / "p"))
    reference = dense_reference(DecoderWeights.read(tiny_source), SCORED)
    low = DecoderWeights.read(model)
    for scheme in stored_schemes(model.sets):
        every = dict.fromkeys(SETS, 1024) | ({"gate_up": 0} if scheme == "bundles" else {})
        budgets: list[int | dict[str, int]] = [0, 64] if settings.fit else [0, 256, every]
        kl = [dense_score(refined_dense(model, low, k, scheme), reference).kl for k in budgets]
        assert kl == sorted(kl, reverse=True)
        assert settings.fit or kl[-1] < 0.05 * kl[0]


def test_the_manifest_says_what_it_is(tmp_path: Path, tiny_source: Any, settings: PrepareSettings) -> None:
    manifest = prepare(tiny_source, tmp_path / "p", settings).manifest
    assert manifest == open_prepared(tmp_path / "p").manifest
    assert manifest.base == settings.base.to_json()["name"]
    assert (manifest.bits, manifest.group) == (settings.base.bits, settings.group)
    assert manifest.identity["quantizer"] == settings.base.to_json()
    assert ("fit" in manifest.identity["layout"]) == (settings.fit is not None)
    assert manifest.mlp_scheme == ("bundles" if settings.mlp == "bundles" else "channels")
    assert tuple(manifest.identity["layout"]["sets"]) == settings.sets


def files_of(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def test_it_comes_out_the_same_again_and_after_an_interruption(
    tmp_path: Path, tiny_source: Any, settings: PrepareSettings
) -> None:
    whole = prepare(tiny_source, tmp_path / "a", settings)
    for reached in range(1, prepare_steps(tiny_source.config, settings)):
        calls = 0

        def stop(limit: int = reached) -> None:
            nonlocal calls
            calls += 1
            if calls == limit:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(tiny_source, tmp_path / "b", settings, stop)
        assert not (tmp_path / "b").exists()
    again = prepare(tiny_source, tmp_path / "b", settings)
    assert again.manifest == whole.manifest
    assert files_of(again.folder) == files_of(whole.folder)
    for name in files_of(whole.folder):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_weights_that_are_not_finite_name_their_layer(
    tmp_path: Path, tiny_source: Any, settings: PrepareSettings
) -> None:
    tiny_source.layer(1)
    tiny_source.cache["1.up"][0, 0] = torch.inf
    with pytest.raises(DamagedModel, match=r"layers\.1"):
        prepare(tiny_source, tmp_path / "p", settings)
    assert not (tmp_path / "p").exists()


def test_a_resumed_run_does_not_repeat_layers_and_restart_does(tmp_path: Path, tiny_source: Any) -> None:
    settings = PrepareSettings(AwqSettings(3, 64), tokens=TOKENS)
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tiny_source, tmp_path / "p", settings, stop)
    first = tmp_path / ".p.work" / "base" / "0.safetensors"
    made = first.stat().st_mtime_ns
    kept = []
    prepare(tiny_source, tmp_path / "p", settings, lambda: kept.append(first.stat().st_mtime_ns))
    assert set(kept) == {made}
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        prepare(tiny_source, tmp_path / "p", settings, stop)
    made = first.stat().st_mtime_ns
    kept = []
    prepare(tiny_source, tmp_path / "p", settings, lambda: kept.append(first.stat().st_mtime_ns), restart=True)
    assert made not in kept


def test_another_text_does_not_resume_what_was_begun_with_one(tmp_path: Path, tiny_source: Any) -> None:
    one = PrepareSettings(SqllmSettings(3), tokens=TOKENS)
    other = replace(one, tokens=TOKENS.flip(0, 1))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tiny_source, tmp_path / "p", one, stop)
    prepared = prepare(tiny_source, tmp_path / "p", other)
    assert prepared.manifest == prepare(tiny_source, tmp_path / "q", other).manifest
    assert prepared.manifest != prepare(tiny_source, tmp_path / "r", one).manifest


def test_fitted_and_plain_stores_have_different_names(tmp_path: Path, tiny_source: Any) -> None:
    plain = prepare(tiny_source, tmp_path / "a", SETTINGS[0]).manifest
    fitted = prepare(tiny_source, tmp_path / "b", SETTINGS[2]).manifest
    other = prepare(tiny_source, tmp_path / "c", replace(SETTINGS[2], k=16)).manifest
    assert plain.identity["base_weights_sha256"] != ""
    assert len({plain.digest, fitted.digest, other.digest}) == 3


def test_refusals(tmp_path: Path, tiny_source: Any) -> None:
    with pytest.raises(MisuseError, match="no text"):
        PrepareSettings(SqllmSettings(3))
    with pytest.raises(MisuseError, match="no text"):
        PrepareSettings(fit=FitSettings())
    with pytest.raises(MisuseError, match="fit"):
        FitSettings(-1.0)
    with pytest.raises(MisuseError, match="gptq"):
        base_settings("gptq", 3, 64)
    with pytest.raises(MisuseError, match="3 with nf4; expected 4"):
        base_settings("nf4", 3, 64)
    assert (base_settings("nf4", None, 64).bits, base_settings("rtn", None, 64).bits) == (4, 3)
    with pytest.raises(MisuseError, match="128 for qkv with 64 inputs"):
        prepare(tiny_source, tmp_path / "p", PrepareSettings(AwqSettings(3, 128), tokens=TOKENS))
    odd = tiny_source.with_config(intermediate=132)
    with pytest.raises(MisuseError, match="down with 132 inputs; expected a multiple of 8"):
        prepare(odd, tmp_path / "p", PrepareSettings(SqllmSettings(3), tokens=TOKENS))
    assert list(tmp_path.iterdir()) == []


def test_activations_of_the_low_bit_model_that_are_not_finite_name_their_layer(
    tmp_path: Path, tiny_source: Any
) -> None:
    # Each weight is finite and fits its scales; what the second layer makes of its input is not.
    tiny_source.layer(1)
    tiny_source.cache["1.norm.of.mlp"] *= 1e30
    with pytest.raises(DamagedModel, match=r"layers\.1: found \d+ NaN or infinite activations"):
        prepare(tiny_source, tmp_path / "p", PrepareSettings(RtnSettings(3, 64), fit=FitSettings(), tokens=TOKENS))
    assert not (tmp_path / "p").exists()
