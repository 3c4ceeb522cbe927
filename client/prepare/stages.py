"""The stages of a preparation that needs text: quantize every layer, then fit what refinement adds to it.

Each stage keeps what it made of a layer in the work folder; what is there is not made again.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from strataflux.client.prepare.bases.awq import AwqSettings, fold_scales, quantize_awq
from strataflux.client.prepare.bases.lnq import LnqSettings, quantize_lnq
from strataflux.client.prepare.bases.matrices import CodebookCodes, GroupedCodes, power_cost, round_groups
from strataflux.client.prepare.bases.rtn import EXPONENT, FACTORS, LEAST_FACTOR, RtnSettings
from strataflux.client.prepare.bases.sqllm import SqllmSettings, quantize_sqllm
from strataflux.client.prepare.calibrate import Calibration, walk_back, walk_forward
from strataflux.client.prepare.fit_layer import FitRun, fit_layer
from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.prepare.settings import FitSettings, PrepareSettings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.statistics import LayerStatistics, row_groups
from strataflux.client.prepare.work import WorkFolder
from strataflux.client.runtime.models import SETS, LayerWeights

__all__ = ["Stages", "stage_steps"]


def stage_steps(layers: int, settings: PrepareSettings) -> int:
    """How often :meth:`Stages.run` calls ``advance``."""
    return layers * (2 if _needs_gradients(settings) else 1) + layers


def _needs_gradients(settings: PrepareSettings) -> bool:
    return isinstance(settings.base, SqllmSettings | LnqSettings)


class Stages:
    """Runs the stages for one model."""

    def __init__(self, source: ModelSource, settings: PrepareSettings, work: WorkFolder) -> None:
        self._source, self._settings, self._work = source, settings, work
        self._device = torch.device(settings.device)

    def run(self, advance: Callable[[], object]) -> None:
        """Quantize all layers, then make the refinement of each.

        Raises:
            DamagedModel: weights or activations that are not finite; the layer is named.
        """
        self._quantize(advance)
        self._refine(advance)

    def exact(self, index: int) -> LayerWeights:
        """Layer ``index`` as residuals are taken against it: with the base's scales folded in, if it has any."""
        layer = self._source.layer(index)
        _, scales = self._work.load_base(index, self._settings.base.bits, self._settings.group)
        return fold_scales(self._source.config, layer, scales) if scales else layer

    def matrices(self, index: int) -> Mapping[str, GroupedCodes | CodebookCodes]:
        """The quantized matrices of layer ``index``."""
        return self._work.load_base(index, self._settings.base.bits, self._settings.group)[0]

    def refinement(self, index: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Codes [outputs, inputs] int8 and scales [outputs] float32 of layer ``index`` by projection set."""
        kept = self._work.load("refinement", index)
        return {name: (kept[f"{name}.codes"], kept[f"{name}.scales"]) for name in SETS}

    def _calibration(self, walk: str) -> Calibration:
        base, tokens = self._settings.base, self._settings.tokens
        assert tokens is not None, "settings without text have no stages that calibrate"
        guides = base.guide_groups if isinstance(base, LnqSettings) else 1
        return Calibration(tokens, self._work.states(walk), self._device, guide_groups=guides)

    def _quantize(self, advance: Callable[[], object]) -> None:
        source, layers = self._source, self._source.config.layers
        if _needs_gradients(self._settings):
            walk_forward(source, self._calibration("exact"), None, advance, keep=True)
            walk_back(source, self._calibration("exact"), self._visit, advance)
        elif isinstance(self._settings.base, AwqSettings):
            walk_forward(source, self._calibration("exact"), self._visit, advance, keep=False)
        else:
            for index in range(layers):
                if not self._work.has("base", index):
                    self._visit(index, source.layer(index).to(self._device), LayerStatistics({}, {}))
                advance()

    def _visit(self, index: int, layer: LayerWeights, found: LayerStatistics) -> None:
        base, config, scales = self._settings.base, self._source.config, {}
        if isinstance(base, AwqSettings):
            made = quantize_awq(f"layers.{index}", config, layer, found.inputs, base)
            matrices: Mapping[str, GroupedCodes | CodebookCodes] = made.matrices
            scales = dict(made.scales)
        else:
            matrices = {name: self._matrix(f"layers.{index}.{name}", name, layer, found) for name in SETS}
        self._work.save_base(index, matrices, scales)

    def _matrix(
        self, subject: str, name: str, layer: LayerWeights, found: LayerStatistics
    ) -> GroupedCodes | CodebookCodes:
        base, weight = self._settings.base, layer.projections[name]
        if isinstance(base, RtnSettings):
            shrink = torch.linspace(1.0, LEAST_FACTOR, FACTORS)
            return round_groups(subject, weight, base.bits, base.group, shrink, power_cost(EXPONENT))
        start = quantize_sqllm(weight, found.outputs[name].fisher, base.bits)
        if not isinstance(base, LnqSettings):
            return start
        groups = row_groups(self._source.config, name, base.guide_groups)
        return quantize_lnq(weight, start, found.outputs[name].hessians, groups)

    def _refine(self, advance: Callable[[], object]) -> None:
        """Residuals, fitted if wanted, in codes."""
        states = self._work.states("refined")
        if self._settings.fit and not any(states.folder.glob("*.npy")):
            states.save("hidden.0", self._source.embedding()[self._calibration("refined").tokens])
        for index in range(self._source.config.layers):
            if not self._work.has("refinement", index):
                values = self._residuals(index)
                if self._settings.fit:
                    values = self._fit(self._settings.fit, index, values)
                codes = {}
                for name, value in values.items():
                    codes[f"{name}.scales"] = residual_scales(value)
                    codes[f"{name}.codes"] = residual_codes(value, codes[f"{name}.scales"])
                self._work.save("refinement", index, codes)
            states.drop(f"hidden.{index}")
            advance()

    def _residuals(self, index: int) -> dict[str, Tensor]:
        exact, matrices = self.exact(index), self.matrices(index)
        return {name: exact.projections[name] - matrices[name].dequantized() for name in SETS}

    def _fit(self, settings: FitSettings, index: int, residuals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # The layer's refinement is saved after its state, so an interruption between them repeats the layer.
        states, k, config = self._work.states("refined"), self._settings.k, self._source.config
        exact, matrices = self.exact(index), self.matrices(index)
        dequantized = {name: matrices[name].dequantized() for name in SETS}
        low = replace(exact, projections=dequantized).to(self._device)
        turns = self._calibration("refined").turns(config)
        run = FitRun(config, turns, (k,), k, settings.multipliers, settings.multiplier is None)
        on_device = {name: residual.to(self._device) for name, residual in residuals.items()}
        after, fits = fit_layer(run, low, on_device, states.load(f"hidden.{index}"))
        states.save(f"hidden.{index + 1}", after)
        return {name: fits[k][name].values.cpu() for name in SETS}
