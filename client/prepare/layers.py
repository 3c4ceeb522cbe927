"""What is written of each layer, however it was made."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from strataflux.client.prepare.bases.matrices import GroupedCodes, MatrixCodes, NormalFloatCodes
from strataflux.client.prepare.bases.nf4 import Nf4Settings, quantize_nf4
from strataflux.client.prepare.bases.rtn import RtnSettings, quantize_rtn
from strataflux.client.prepare.encode import Encoded, LayerValues, encode_layer
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.refine_stage import RefineStage
from strataflux.client.prepare.residual import residual_scales
from strataflux.client.prepare.source import ModelSource
from strataflux.client.runtime.models import SETS, LayerWeights
from strataflux.client.schemes import BUNDLES
from strataflux.kernels.codebook import pack_planes
from strataflux.kernels.lowbit import pack_codes

__all__ = ["LayerMaker", "StagedLayers", "StreamedLayers"]


class LayerMaker(Protocol):
    """Gives the layers of a prepared model, each twice: its resident tensors, then its records."""

    def resident(self, index: int) -> dict[str, Tensor]:
        """The tensors of layer ``index`` by their names within it, ``qkv.codes`` for one, in file order."""

    def records(self, index: int, resident: PreparedModel, /) -> dict[str, Tensor]:
        """Records by what has some; ``resident`` is what was written."""

    def rung(self, index: int, rung: int, /) -> dict[str, Encoded]:
        """Columns fitted for ``rung``, a budget of the ladder, by projection set; ``mlp`` for those of bundles."""


class StreamedLayers:
    """Round to nearest, or 4-bit NormalFloats, with plain residuals: made on the way, and the residual taken against
    what was written.
    """

    def __init__(self, source: ModelSource, base: RtnSettings | Nf4Settings, sets: Sequence[str]) -> None:
        self._source, self._base, self._sets = source, base, sets

    def resident(self, index: int) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        layer = self._source.layer(index)
        tensors = _exact_parts(layer)
        for name in SETS:
            weight = layer.projections[name]
            packed, low = _streamed(f"layers.{index}.{name}", weight, self._base)
            tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
            scales = residual_scales(weight - low)
            if name in self._sets:
                tensors[f"{name}.refinement_scales"] = scales
        if BUNDLES in self._sets:
            # Their down columns are plain residuals of the last set.
            tensors[f"{BUNDLES}.refinement_scales"] = scales
        return tensors

    def records(self, index: int, resident: PreparedModel) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        exact, low = self._source.layer(index).projections, resident.layer(index).projections
        residuals = {name: exact[name] - low[name] for name in SETS}
        values = LayerValues({**residuals, BUNDLES: residuals["down"]}, residuals["gate_up"], exact["down"])
        scales = {name: resident.refinement_scales(index, name) for name in self._sets}
        return {name: made.records for name, made in encode_layer(values, self._sets, scales).items()}

    def rung(self, index: int, rung: int) -> dict[str, Encoded]:
        """See :class:`LayerMaker`; plain residuals have no ladder."""
        raise ValueError(f"layer {index} has no values fitted for {rung}: plain residuals suit any budget")


class StagedLayers:
    """What a finished stage kept."""

    def __init__(self, stage: RefineStage) -> None:
        self._stage = stage

    def resident(self, index: int) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        exact, refinement = self._stage.exact(index), self._stage.refinement(index)
        tensors = _exact_parts(exact)
        for name, matrix in self._stage.matrices(index).items():
            tensors |= {f"{name}.{part}": tensor for part, tensor in _packed(matrix).items()}
            if name in refinement:
                tensors[f"{name}.refinement_scales"] = refinement[name].scales
        if BUNDLES in refinement:
            tensors[f"{BUNDLES}.refinement_scales"] = refinement[BUNDLES].scales
        return tensors

    def records(self, index: int, _resident: PreparedModel) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        return {name: made.records for name, made in self._stage.refinement(index).items()}

    def rung(self, index: int, rung: int) -> dict[str, Encoded]:
        """See :class:`LayerMaker`."""
        return self._stage.rung(index, rung)


def _exact_parts(layer: LayerWeights) -> dict[str, Tensor]:
    own = {"query_norm": layer.query_norm, "key_norm": layer.key_norm, "qkv_bias": layer.qkv_bias}
    present = {name: tensor for name, tensor in own.items() if tensor is not None}
    return {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm, **present}


def _streamed(subject: str, weight: Tensor, base: RtnSettings | Nf4Settings) -> tuple[dict[str, Tensor], Tensor]:
    """What is resident of ``weight`` [outputs, inputs], and the weights that it stands for."""
    if isinstance(base, Nf4Settings):
        made = quantize_nf4(subject, weight, base)
        return _packed(made), made.dequantized()
    low = quantize_rtn(subject, weight, base)
    return {"codes": low.codes, "scales": low.scales, "zeros": low.zeros}, low.dequantized()


def _packed(matrix: MatrixCodes) -> dict[str, Tensor]:
    if isinstance(matrix, NormalFloatCodes):
        return {"codes": pack_codes(matrix.codes, matrix.bits), "scales": matrix.scales}
    if isinstance(matrix, GroupedCodes):
        return {"codes": pack_codes(matrix.codes, matrix.bits), "scales": matrix.scales, "zeros": matrix.zeros}
    return {"planes": pack_planes(matrix.codes, matrix.bits), "codebook": matrix.codebook}
