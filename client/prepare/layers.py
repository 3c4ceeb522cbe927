"""What is written of each layer, however it was made."""

from typing import Protocol

from torch import Tensor

from strataflux.client.prepare.bases.matrices import CodebookCodes, GroupedCodes
from strataflux.client.prepare.bases.rtn import RtnSettings, quantize_rtn
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.stages import Stages
from strataflux.client.runtime.models import SETS, LayerWeights
from strataflux.kernels.codebook import pack_planes
from strataflux.kernels.lowbit import pack_codes

__all__ = ["LayerMaker", "StagedLayers", "StreamedLayers"]


class LayerMaker(Protocol):
    """Gives the layers of a prepared model, each twice: its resident tensors, then its refinement codes."""

    def resident(self, index: int) -> dict[str, Tensor]:
        """The tensors of layer ``index`` by their names within it, ``qkv.codes`` for one."""

    def codes(self, index: int, resident: PreparedModel, /) -> dict[str, Tensor]:
        """Refinement codes [outputs, inputs] int8 by projection set; ``resident`` is what was written."""


class StreamedLayers:
    """Round to nearest with plain residuals: made on the way, and the residual taken against what was written."""

    def __init__(self, source: ModelSource, base: RtnSettings) -> None:
        self._source, self._base = source, base

    def resident(self, index: int) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        layer = self._source.layer(index)
        tensors = _norms(layer)
        for name in SETS:
            weight = layer.projections[name]
            low = quantize_rtn(f"layers.{index}.{name}", weight, self._base)
            tensors |= {f"{name}.codes": low.codes, f"{name}.scales": low.scales, f"{name}.zeros": low.zeros}
            tensors[f"{name}.refinement_scales"] = residual_scales(weight - low.dequantized())
        return tensors

    def codes(self, index: int, resident: PreparedModel) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        exact, low = self._source.layer(index).projections, resident.layer(index).projections
        return {name: residual_codes(exact[name] - low[name], resident.refinement_scales(index, name)) for name in SETS}


class StagedLayers:
    """What finished stages kept."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def resident(self, index: int) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        exact, refinement = self._stages.exact(index), self._stages.refinement(index)
        tensors = _norms(exact)
        for name, matrix in self._stages.matrices(index).items():
            packed = _packed(matrix) | {"refinement_scales": refinement[name][1]}
            tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
        return tensors

    def codes(self, index: int, _resident: PreparedModel) -> dict[str, Tensor]:
        """See :class:`LayerMaker`."""
        return {name: codes for name, (codes, _) in self._stages.refinement(index).items()}


def _norms(layer: LayerWeights) -> dict[str, Tensor]:
    heads = {"query_norm": layer.query_norm, "key_norm": layer.key_norm}
    present = {name: norm for name, norm in heads.items() if norm is not None}
    return {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm, **present}


def _packed(matrix: GroupedCodes | CodebookCodes) -> dict[str, Tensor]:
    if isinstance(matrix, GroupedCodes):
        return {"codes": pack_codes(matrix.codes, matrix.bits), "scales": matrix.scales, "zeros": matrix.zeros}
    return {"planes": pack_planes(matrix.codes, matrix.bits), "codebook": matrix.codebook}
