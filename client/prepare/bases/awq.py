"""Activation-aware rounding: inputs that carry large activations get finer weights (AWQ, Lin et al. 2024).

Input i of a projection set is scaled, ``W'_{:,i} = W_{:,i} · s_i``, and what produces it divides by ``s_i``: the norm
before ``qkv`` and ``gate_up``, the value rows before ``o``, the up rows before ``down``. The model is the same
function, but rounding W' spares the inputs with large s. With m the mean of |x|, s = m^α normalised by
``sqrt(max s · min s)``; α of 0, 1/20 … 19/20 is chosen by the error of the set's outputs. Query heads that share a
value head share its scales, m averaged over them.

Then each group of weights is clipped to one of ten shares 1.00, 0.95 … 0.55 of its range, again by the error of its
outputs, and rounded (round to nearest, integer zero-points). The residual is taken against the scaled, *unclipped*
weights, so clipping is undone by refinement.

Errors are exact means over the calibration tokens, not over a sample: for weight errors e they are ``eᵀ H e`` with
``H = E[x xᵀ]``, for a group with the diagonal block of H that belongs to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.matrices import GroupedCodes, round_groups
from strataflux.client.prepare.statistics import InputStatistics
from strataflux.client.runtime.models import SETS, LayerWeights, ModelConfig

__all__ = ["ALPHAS", "AWQ_BITS", "AWQ_GROUPS", "CLIPS", "AwqLayer", "AwqSettings", "fold_scales", "quantize_awq"]

AWQ_BITS, AWQ_GROUPS = (3, 4), (64, 128)
"""Supported code widths and group lengths."""
ALPHAS = tuple(step / 20 for step in range(20))
"""The scale search."""
CLIPS = tuple(1 - step / 20 for step in range(10))
"""The clip search."""

_UNCLIPPED = torch.ones(1)
_LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class AwqSettings:
    """What the base is made of.

    Raises:
        MisuseError: on construction, naming the setting and what is supported.
    """

    bits: int = 3
    group: int = 128

    def __post_init__(self) -> None:
        if self.bits not in AWQ_BITS:
            raise MisuseError("bits", f"{self.bits}", "3 or 4 for awq", "choose one of these")
        if self.group not in AWQ_GROUPS:
            raise MisuseError("group", f"{self.group}", "64 or 128", "choose one of these")

    def to_json(self) -> dict[str, Any]:
        """Everything beside the calibration that decides which codes a weight gets."""
        search = {"alphas": len(ALPHAS), "clips": len(CLIPS), "least_clip": CLIPS[-1]}
        return {"name": "awq", "bits": self.bits, "group": self.group, "zero_points": "integer", "search": search}


@dataclass(frozen=True)
class AwqLayer:
    """A layer whose scales are folded in, and its rounded matrices."""

    exact: LayerWeights
    """The same function as the layer that was given; residuals are taken against its matrices."""
    matrices: Mapping[str, GroupedCodes]
    scales: Mapping[str, Tensor]
    """[inputs] float32 of each projection set."""


def quantize_awq(
    name: str, config: ModelConfig, layer: LayerWeights, inputs: Mapping[str, InputStatistics], settings: AwqSettings
) -> AwqLayer:
    """Quantize ``layer``, whose projection sets saw ``inputs``; ``name`` is for errors.

    Raises:
        MisuseError: a set's inputs are not a multiple of the group.
        DamagedModel: a group's range exceeds float16.
    """
    for set_name in SETS:
        if config.set_shape(set_name)[1] % settings.group:
            found = f"{settings.group} for {name}.{set_name} with {config.set_shape(set_name)[1]} inputs"
            raise MisuseError("group", found, "a divisor of the inputs", "use 64")
    scales = {
        set_name: _search_scales(f"{name}.{set_name}", layer.projections[set_name], seen, settings)
        for set_name, seen in _shared(config, inputs).items()
    }
    exact = fold_scales(config, layer, scales)
    matrices = {
        set_name: _clip_and_round(f"{name}.{set_name}", exact.projections[set_name], inputs[set_name], scale, settings)
        for set_name, scale in scales.items()
    }
    return AwqLayer(exact, matrices, scales)


def fold_scales(config: ModelConfig, layer: LayerWeights, scales: Mapping[str, Tensor]) -> LayerWeights:
    """The same function as ``layer`` with the inputs of its sets divided by ``scales`` [inputs]."""
    matrices = {name: layer.projections[name] * scales[name] for name in SETS}
    keys = config.kv_heads * config.head_dim
    # One of the query heads that share a value head speaks for all: their scales are equal.
    by_head = scales["o"].view(config.kv_heads, -1, config.head_dim)
    by_value = by_head[:, 0].reshape(-1)
    matrices["qkv"][-keys:] /= by_value[:, None]
    matrices["gate_up"][config.intermediate :] /= scales["down"][:, None]
    attention_norm, mlp_norm = layer.attention_norm / scales["qkv"], layer.mlp_norm / scales["gate_up"]
    bias = layer.qkv_bias
    if bias is not None:
        bias = torch.cat((bias[:-keys], bias[-keys:] / by_value))
    return replace(layer, attention_norm=attention_norm, mlp_norm=mlp_norm, projections=matrices, qkv_bias=bias)


def _shared(config: ModelConfig, inputs: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """``inputs`` with the mean magnitudes of ``o`` averaged over the query heads that share a value head."""
    by_head = inputs["o"].mean_abs.view(config.kv_heads, -1, config.head_dim)
    averaged = by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)
    return {**inputs, "o": replace(inputs["o"], mean_abs=averaged)}


def _search_scales(name: str, weight: Tensor, seen: InputStatistics, settings: AwqSettings) -> Tensor:
    best, least = torch.ones_like(seen.mean_abs), torch.inf
    for alpha in ALPHAS:
        scale = seen.mean_abs.pow(alpha).clamp(min=_LEAST_SCALE)
        scale = scale / (scale.max() * scale.min()).sqrt()
        low = round_groups(name, weight * scale, settings.bits, settings.group, _UNCLIPPED, _squares)
        error = low.dequantized() / scale - weight
        cost = float(((error @ seen.second) * error).sum())
        if cost < least:
            best, least = scale, cost
    return best


def _clip_and_round(
    name: str, weight: Tensor, seen: InputStatistics, scale: Tensor, settings: AwqSettings
) -> GroupedCodes:
    second = seen.second / (scale[:, None] * scale)
    starts = range(0, weight.shape[1], settings.group)
    blocks = torch.stack([second[start : start + settings.group, start : start + settings.group] for start in starts])
    cost = partial(_output_error, blocks)
    return round_groups(name, weight, settings.bits, settings.group, torch.tensor(CLIPS), cost)


def _squares(error: Tensor) -> Tensor:
    return error.square().sum(-1)


def _output_error(blocks: Tensor, error: Tensor) -> Tensor:
    """``eᵀ H e`` [rows, groups] of ``error`` [rows, groups, group] under ``blocks`` [groups, group, group]."""
    by_group = error.transpose(0, 1)
    return ((by_group @ blocks) * by_group).sum(-1).t()
