"""Fitting a prepared model anew, and the ladder of fits beside its store."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.bases.awq import AwqSettings
from strataflux.client.prepare.bases.nf4 import Nf4Settings
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.bases.sqllm import SqllmSettings
from strataflux.client.prepare.fit import SelectionMoments, fitted_values
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.refinement import ladder_rungs, read_refinement
from strataflux.client.prepare.refit import refit, refit_steps
from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.prepare.settings import FitSettings, PrepareSettings, default_ladder
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.prepare.write import prepare
from strataflux.kernels.topk import largest_mask

TOKENS = torch.randint(0, 250, (8, 16), generator=torch.Generator().manual_seed(0))
FITTED = PrepareSettings(RtnSettings(3, 64), 128, FitSettings(), TOKENS, mlp="both", ladder=(64, 512))
BUDGETS = {"qkv": 300, "o": 0, "gate_up": 128, "down": 90}
NEURONS = {"qkv": 300, "o": 100, "gate_up": 0, "down": 60}


@pytest.fixture
def tiny_source(tiny_source: Any) -> Any:
    return tiny_source.with_config(intermediate=128)


def content(folder: Path) -> dict[str, bytes]:
    names = ("refine/records.bin", "resident.safetensors", "calibration.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    "settings",
    [
        FITTED,
        replace(FITTED, base=AwqSettings(3, 64), mlp="channels"),
        replace(FITTED, base=SqllmSettings(3), fit=FitSettings(1.0), mlp="bundles", ladder=()),
        replace(FITTED, base=Nf4Settings(), mlp="channels", ladder=()),
    ],
    ids=["rtn-both", "awq-channels", "sqllm-bundles", "nf4-channels"],
)
def test_it_is_as_if_prepared_with_those_budgets(tmp_path: Path, tiny_source: Any, settings: PrepareSettings) -> None:
    budgets = NEURONS if settings.mlp == "bundles" else BUDGETS
    prepared = prepare(tiny_source, tmp_path / "a", settings)
    before, rungs = prepared.manifest, ladder_rungs(prepared)
    calls: list[None] = []
    found = refit(prepared, tiny_source, budgets, advance=lambda: calls.append(None))
    assert len(calls) == refit_steps(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    expected = prepare(tiny_source, tmp_path / "b", replace(settings, k=budgets))
    assert found.manifest == expected.manifest
    assert found.manifest.digest != before.digest
    assert content(found.folder) == content(expected.folder)
    assert ladder_rungs(found) == rungs == settings.ladder
    verify_prepared(open_prepared(found.folder))


def test_the_same_budgets_give_the_same_model(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", FITTED)
    before = content(prepared.folder)
    assert refit(prepared, tiny_source, 128).manifest == prepared.manifest
    assert content(prepared.folder) == before


def test_the_other_scheme_of_a_store_that_serves_both(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", FITTED)
    found = refit(prepared, tiny_source, NEURONS, "bundles")
    assert (found.manifest.mlp_scheme, dict(found.manifest.k)) == ("bundles", NEURONS)
    # As many bytes of channels as 60 neurons are.
    assert found.fitted_budgets == {"qkv": 300, "o": 100, "gate_up": 80, "down": 80, "mlp": 60}


def test_an_interruption_leaves_the_old_model_and_the_next_run_goes_on(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", FITTED)
    before = content(prepared.folder)
    for reached in range(1, refit_steps(prepared)):
        calls = 0

        def stop(limit: int = reached) -> None:
            nonlocal calls
            calls += 1
            if calls == limit:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            refit(prepared, tiny_source, BUDGETS, advance=stop)
        assert content(prepared.folder) == before
    first = tmp_path / ".a.work" / "refinement" / "0.safetensors"
    made = first.stat().st_mtime_ns
    kept: list[int] = []
    found = refit(prepared, tiny_source, BUDGETS, advance=lambda: kept.append(first.stat().st_mtime_ns))
    assert set(kept) == {made}
    other = prepare(tiny_source, tmp_path / "b", replace(FITTED, k=BUDGETS))
    assert content(found.folder) == content(other.folder)


def test_refusals(tmp_path: Path, tiny_source: Any) -> None:
    plain = prepare(tiny_source, tmp_path / "plain", PrepareSettings())
    with pytest.raises(MisuseError, match="plain residuals, which suit any budget"):
        refit(plain, tiny_source, 32)
    fitted = prepare(tiny_source, tmp_path / "fitted", replace(FITTED, mlp="channels"))
    other = type(tiny_source)(tiny_source.config, seed=5)
    with pytest.raises(InputError, match="the model it was made of"):
        refit(fitted, other, 32)
    with pytest.raises(MisuseError, match="1025"):
        refit(fitted, tiny_source, 1025)
    with pytest.raises(MisuseError, match="--mlp both"):
        refit(fitted, tiny_source, 32, "bundles")
    (fitted.folder / "calibration.safetensors").unlink()
    with pytest.raises(InputError, match="no calibration"):
        refit(fitted, tiny_source, 32)


def nth_layer(prepared: PreparedModel, budgets: dict[str, int] | None, index: int = 0) -> dict[str, torch.Tensor]:
    return list(read_refinement(prepared, None, budgets))[index]


def test_a_rung_is_the_fit_for_its_budget_on_every_second_sequence(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", replace(FITTED, fit=FitSettings(0.3)))
    layer, low = tiny_source.layer(0), prepared.layer(0)
    hidden = tiny_source.embedding()[TOKENS[::2]].flatten(0, 1)
    x = rms_norm(hidden, (64,), layer.attention_norm, tiny_source.config.norm_epsilon)
    moments = SelectionMoments(64, x.device)
    moments.add(x, largest_mask(x, 512))
    residual = layer.projections["qkv"] - low.projections["qkv"]
    values = fitted_values(residual, moments, 0.3)
    found = nth_layer(prepared, dict.fromkeys(BUDGETS, 512))["qkv"]
    stored = nth_layer(prepared, None)["qkv"]
    scales = residual_scales(values)
    expected = residual_codes(values, scales) * scales[:, None]
    # Here and there a value within rounding of the middle between two codes.
    assert float((found - expected).square().mean()) < 1e-2 * float((stored - expected).square().mean())


def test_where_the_residual_was_best_a_rung_has_it_too(tmp_path: Path, tiny_source: Any) -> None:
    # Tokens drawn at random have nothing in common for a fit to find.
    prepared = prepare(tiny_source, tmp_path / "a", replace(FITTED, ladder=(512,)))
    same = [
        name
        for name, own in nth_layer(prepared, dict.fromkeys(BUDGETS, 512), 1).items()
        if torch.equal(own, nth_layer(prepared, None, 1)[name])
    ]
    assert same


def test_each_set_takes_the_nearest_fit(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", replace(FITTED, fit=FitSettings(1.0)))
    assert ladder_rungs(prepared) == (64, 512)
    rungs = {k: nth_layer(prepared, dict.fromkeys(BUDGETS, k), 1) for k in (64, 128, 512)}
    mixed = nth_layer(prepared, {"qkv": 40, "o": 100, "gate_up": 300, "down": 250}, 1)
    for name, k in {"qkv": 64, "o": 128, "gate_up": 512, "down": 128}.items():
        assert torch.equal(mixed[name], rungs[k][name])
        assert not torch.equal(rungs[64][name], rungs[512][name])
    bundles = list(read_refinement(prepared, "bundles", {"qkv": 128, "o": 128, "gate_up": 0, "down": 380}))[1]
    stored = list(read_refinement(prepared, "bundles"))[1]
    assert torch.equal(bundles["gate_up"], stored["gate_up"])
    assert not torch.equal(bundles["down"], stored["down"])


def test_plain_residuals_have_no_ladder_and_need_none(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "a", PrepareSettings())
    assert (ladder_rungs(prepared), prepared.fitted_budgets) == ((), None)
    stored = nth_layer(prepared, None)
    assert all(torch.equal(one, stored[name]) for name, one in nth_layer(prepared, dict.fromkeys(BUDGETS, 9)).items())
    with pytest.raises(MisuseError, match="without fitting"):
        PrepareSettings(ladder=(8,))
    with pytest.raises(MisuseError, match="2000"):
        replace(FITTED, ladder=(2000,))


@pytest.mark.parametrize(("k", "rungs"), [(32, (8, 128)), (1, (4,)), (400, (100, 1024)), (1024, (256,))])
def test_the_ladder_by_default(k: int, rungs: tuple[int, ...]) -> None:
    assert default_ladder(k) == rungs
