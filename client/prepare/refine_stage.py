"""The second stage: what refinement adds to each quantized layer, fitted if that is wanted, in records.

What it made of a layer is kept in the work folder; what is there is not made again.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from strataflux.client.prepare.bases.awq import fold_scales
from strataflux.client.prepare.bases.matrices import MatrixCodes
from strataflux.client.prepare.calibrate import Calibration, require_finite
from strataflux.client.prepare.encode import Encoded, LayerValues, encode_columns, encode_layer
from strataflux.client.prepare.fit_layer import FitRun, LayerMoments, fit_layer
from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.work import WorkFolder
from strataflux.client.runtime.models import SETS, LayerWeights
from strataflux.client.schemes import BUNDLES, budgets_by_set

__all__ = ["RefineStage"]

_STAGE = "refinement"


class RefineStage:
    """Makes the refinement of one model whose quantized layers are in the work folder."""

    def __init__(self, source: ModelSource, settings: PrepareSettings, work: WorkFolder) -> None:
        self._source, self._settings, self._work = source, settings, work
        self._device = torch.device(settings.device)

    def run(self, advance: Callable[[], object]) -> None:
        """Make the refinement of every layer; calls ``advance`` after each.

        Raises:
            DamagedModel: activations that are not finite; the layer is named.
        """
        states = self._work.states("refined")
        if self._settings.fit and not any(states.folder.glob("*.npy")):
            states.save("hidden.0", self._source.embedding()[self._calibration().tokens])
        for index in range(self._source.config.layers):
            if not self._work.has(_STAGE, index):
                self._make(index)
            states.drop(f"hidden.{index}")
            advance()

    def exact(self, index: int) -> LayerWeights:
        """Layer ``index`` as residuals are taken against it: with the base's scales folded in, if it has any."""
        layer = self._source.layer(index)
        _, scales = self._work.load_base(index, self._settings.base.bits, self._settings.group)
        return fold_scales(self._source.config, layer, scales) if scales else layer

    def matrices(self, index: int) -> Mapping[str, MatrixCodes]:
        """The quantized matrices of layer ``index``."""
        return self._work.load_base(index, self._settings.base.bits, self._settings.group)[0]

    def input_scales(self, index: int) -> dict[str, Tensor]:
        """Scales [inputs] of the projection sets of layer ``index``; empty if the base has none."""
        return self._work.load_base(index, self._settings.base.bits, self._settings.group)[1]

    def refinement(self, index: int) -> dict[str, Encoded]:
        """What the store gets of layer ``index``."""
        return _unpacked(self._work.load(_STAGE, index))

    def rung(self, index: int, rung: int) -> dict[str, Encoded]:
        """Columns of layer ``index`` fitted for ``rung``."""
        return _unpacked(self._work.load(_ladder(rung), index))

    def _calibration(self) -> Calibration:
        tokens = self._settings.tokens
        assert tokens is not None, "settings without text have no stages that calibrate"
        return Calibration(tokens, self._work.states("refined"), self._device)

    def _make(self, index: int) -> None:
        # The layer's refinement is saved last, so an interruption before it repeats the layer.
        exact, settings = self.exact(index), self._settings
        low = {name: matrix.dequantized() for name, matrix in self.matrices(index).items()}
        residuals = {name: exact.projections[name] - low[name] for name in SETS}
        columns: dict[str, Tensor] = {**residuals, BUNDLES: residuals["down"]}
        if settings.fit:
            moments = self._run_layer(index, replace(exact, projections=low), residuals, exact.projections["down"])
            columns |= self._fitted(index, moments, columns)
        values = LayerValues(columns, residuals["gate_up"], exact.projections["down"])
        self._work.save(_STAGE, index, _packed(encode_layer(values, settings.sets)))

    def _run_layer(self, index: int, low: LayerWeights, residuals: Mapping[str, Tensor], down: Tensor) -> LayerMoments:
        settings, states = self._settings, self._work.states("refined")
        assert settings.fit is not None, "only fitting runs layers"
        budgets = {name: (budget,) for name, budget in settings.stored_budgets.items()}
        ladder = [settings.rung_budgets(rung) for rung in settings.ladder]
        rungs = {name: sorted({one[name] for one in ladder}) for name in settings.sets}
        scheme = settings.chosen_scheme
        turns = self._calibration().turns(self._source.config)
        carried = budgets_by_set(settings.k, scheme)
        tried, plain_too = settings.fit.multipliers, settings.fit.multiplier is None
        run = FitRun(self._source.config, turns, budgets, carried, scheme, tried, plain_too, rungs)
        plain = {name: _as_stored(residual).to(self._device) for name, residual in residuals.items()}
        hidden = states.load(f"hidden.{index}")
        after, moments = fit_layer(run, low.to(self._device), plain, hidden, down.to(self._device))
        require_finite(index, after)
        states.save(f"hidden.{index + 1}", after)
        return moments

    def _fitted(self, index: int, moments: LayerMoments, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is fitted for the store; what is for the ladder is kept on the way."""
        settings, fitted = self._settings, {}
        rungs: dict[int, dict[str, Encoded]] = {rung: {} for rung in settings.ladder}
        for name, budget in settings.stored_budgets.items():
            residual = columns[name].to(self._device)
            fit = moments.fit(name, budget, residual)
            fitted[name] = fit.values.cpu()
            multiplier = settings.fit.usual if settings.fit and not budget else fit.multiplier
            for rung, encoded in rungs.items():
                found = moments.fit_rung(name, settings.rung_budgets(rung)[name], residual, multiplier)
                encoded[name] = encode_columns(found.cpu())
        for rung, encoded in rungs.items():
            self._work.save(_ladder(rung), index, _packed(encoded))
        return fitted


def _ladder(rung: int) -> str:
    return f"ladder.{rung}"


def _as_stored(residual: Tensor) -> Tensor:
    scales = residual_scales(residual)
    return residual_codes(residual, scales) * scales[:, None]


def _packed(encoded: Mapping[str, Encoded]) -> dict[str, Tensor]:
    records = {f"{name}.records": one.records for name, one in encoded.items()}
    return records | {f"{name}.scales": one.scales for name, one in encoded.items()}


def _unpacked(kept: Mapping[str, Tensor]) -> dict[str, Encoded]:
    names = [name.removesuffix(".records") for name in kept if name.endswith(".records")]
    return {name: Encoded(kept[f"{name}.records"], kept[f"{name}.scales"]) for name in names}
