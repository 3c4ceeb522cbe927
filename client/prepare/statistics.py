"""What calibration learns about a layer: its inputs' moments, and how the loss depends on its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from strataflux.client.runtime.models import ModelConfig

__all__ = ["InputStatistics", "InputSums", "LayerStatistics", "OutputStatistics", "OutputSums", "row_groups"]


@dataclass(frozen=True)
class InputStatistics:
    """Means over tokens of a projection set's input x."""

    mean_abs: Tensor
    """E|x|, [inputs] float32."""
    second: Tensor
    """E[x xᵀ], [inputs, inputs] float32."""


@dataclass(frozen=True)
class OutputStatistics:
    """How the loss depends on a projection set, with g the gradient by its output and x its input."""

    fisher: Tensor
    """[outputs, inputs] float32: squared weight gradients ``(Σ_tokens g xᵀ)²`` of sequences, summed over them."""
    hessians: Tensor
    """[row groups, inputs, inputs] float32: ``Σ_tokens s x xᵀ`` with s the mean of g² over the group's rows."""


@dataclass(frozen=True)
class LayerStatistics:
    """All that is known of one layer, by projection set."""

    inputs: Mapping[str, InputStatistics]
    outputs: Mapping[str, OutputStatistics]
    """Empty if no gradients were asked for."""


def row_groups(config: ModelConfig, set_name: str, count: int) -> list[slice]:
    """Each matrix of a projection set in ``count`` runs of rows, as equal as its rows allow.

    Groups never span matrices: queries, keys and values differ in how the loss depends on them. None for a ``count``
    of 0.
    """
    keys = config.kv_heads * config.head_dim
    parts = {
        "qkv": (config.heads * config.head_dim, keys, keys),
        "o": (config.hidden,),
        "gate_up": (config.intermediate, config.intermediate),
        "down": (config.hidden,),
    }[set_name]
    groups: list[slice] = []
    first = 0
    for rows in parts:
        borders = [first + rows * i // count for i in range(count + 1)] if count else []
        groups += [slice(start, stop) for start, stop in pairwise(borders)]
        first += rows
    return groups


class InputSums:
    """Adds up :class:`InputStatistics` over batches."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._magnitude = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._second = torch.zeros(inputs, inputs, device=device)
        self._tokens = 0

    def add(self, x: Tensor) -> None:
        """Take in ``x`` [..., inputs]."""
        x = x.reshape(-1, x.shape[-1])
        self._magnitude += x.abs().sum(0, dtype=torch.float64)
        self._second.addmm_(x.T, x)
        self._tokens += x.shape[0]

    def result(self) -> InputStatistics:
        """The means so far."""
        return InputStatistics((self._magnitude / self._tokens).float(), self._second / self._tokens)


class OutputSums:
    """Adds up :class:`OutputStatistics` over batches of whole sequences."""

    def __init__(self, shape: tuple[int, int], groups: list[slice], device: torch.device) -> None:
        outputs, inputs = shape
        self._groups = groups
        self._fisher = torch.zeros(outputs, inputs, device=device)
        self._hessians = torch.zeros(len(groups), inputs, inputs, device=device)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Take in inputs [sequences, n, inputs] and gradients by outputs [sequences, n, outputs]."""
        for one, by_output in zip(x, gradient, strict=True):
            self._fisher += (by_output.T @ one).square_()
        x, squares = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1]).square()
        for hessian, rows in zip(self._hessians, self._groups, strict=True):
            hessian.addmm_((x * squares[:, rows].mean(-1, keepdim=True)).T, x)

    def result(self) -> OutputStatistics:
        """The sums so far."""
        return OutputStatistics(self._fisher, self._hessians)
