"""The first stage of a preparation that needs text: quantize every layer.

What it made of a layer is kept in the work folder; what is there is not made again.
"""

from collections.abc import Callable, Mapping

import torch

from strataflux.client.prepare.bases.awq import AwqSettings, quantize_awq
from strataflux.client.prepare.bases.descent import block_descent
from strataflux.client.prepare.bases.lnq import LnqSettings, quantize_lnq
from strataflux.client.prepare.bases.matrices import MatrixCodes, power_cost, round_groups
from strataflux.client.prepare.bases.nf4 import Nf4Settings, quantize_nf4
from strataflux.client.prepare.bases.rtn import EXPONENT, FACTORS, LEAST_FACTOR, RtnSettings
from strataflux.client.prepare.bases.sqllm import SqllmSettings, quantize_sqllm
from strataflux.client.prepare.calibrate import Calibration, walk_back, walk_forward
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.statistics import LayerStatistics, row_groups
from strataflux.client.prepare.work import WorkFolder
from strataflux.client.runtime.models import SETS, LayerWeights

__all__ = ["QuantizeStage"]


class QuantizeStage:
    """Quantizes one model."""

    def __init__(self, source: ModelSource, settings: PrepareSettings, work: WorkFolder) -> None:
        self._source, self._settings, self._work = source, settings, work
        self._device = torch.device(settings.device)
        self._descend = block_descent(self._device)

    @staticmethod
    def steps(layers: int, settings: PrepareSettings) -> int:
        """How often :meth:`run` calls ``advance``."""
        return layers * (2 if _needs_gradients(settings) else 1)

    def run(self, advance: Callable[[], object]) -> None:
        """Quantize all layers.

        Raises:
            DamagedModel: weights or activations that are not finite; the layer is named.
        """
        source, base = self._source, self._settings.base
        if _needs_gradients(self._settings):
            walk_forward(source, self._calibration(), None, advance, keep=True)
            walk_back(source, self._calibration(), self._visit, advance)
        elif isinstance(base, AwqSettings):
            walk_forward(source, self._calibration(), self._visit, advance, keep=False)
        else:
            for index in range(source.config.layers):
                if not self._work.has("base", index):
                    self._visit(index, source.layer(index).to(self._device), LayerStatistics({}, {}))
                advance()

    def _calibration(self) -> Calibration:
        base, tokens = self._settings.base, self._settings.tokens
        assert tokens is not None, "settings without text have no stages that calibrate"
        guides = base.guide_groups if isinstance(base, LnqSettings) else 0
        inputs = not _needs_gradients(self._settings)
        return Calibration(tokens, self._work.states("exact"), self._device, guide_groups=guides, inputs=inputs)

    def _visit(self, index: int, layer: LayerWeights, found: LayerStatistics) -> None:
        base, config, scales = self._settings.base, self._source.config, {}
        if isinstance(base, AwqSettings):
            made = quantize_awq(f"layers.{index}", config, layer, found.inputs, base)
            matrices: Mapping[str, MatrixCodes] = made.matrices
            scales = dict(made.scales)
        else:
            matrices = {name: self._matrix(f"layers.{index}.{name}", name, layer, found) for name in SETS}
        self._work.save_base(index, matrices, scales)

    def _matrix(self, subject: str, name: str, layer: LayerWeights, found: LayerStatistics) -> MatrixCodes:
        base, weight = self._settings.base, layer.projections[name]
        if isinstance(base, Nf4Settings):
            return quantize_nf4(subject, weight, base)
        if isinstance(base, RtnSettings):
            shrink = torch.linspace(1.0, LEAST_FACTOR, FACTORS)
            return round_groups(subject, weight, base.bits, base.group, shrink, power_cost(EXPONENT))
        start = quantize_sqllm(weight, found.outputs[name].fisher, base.bits)
        if not isinstance(base, LnqSettings):
            return start
        groups = row_groups(self._source.config, name, base.guide_groups)
        return quantize_lnq(weight, start, found.outputs[name].hessians, groups, descend=self._descend)


def _needs_gradients(settings: PrepareSettings) -> bool:
    return isinstance(settings.base, SqllmSettings | LnqSettings)
