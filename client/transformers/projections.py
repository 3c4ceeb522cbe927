"""Projections in place of a model's own: low-bit matrices, and what refines them in a decode step.

A projection set is one matrix here (queries, keys and values for one) where the library has a module for each part.
The first part that is asked for multiplies for all, and the others take their rows of the same outputs: channels are
selected once for a set, and one record refines all its rows.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from strataflux.client.runtime.decoder import Refiner
from strataflux.client.runtime.models import SETS, ModelConfig

__all__ = ["PARTS", "ProjectionSet", "RefinedLinear", "StepRefinement", "part_rows"]

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules of a layer that make up each projection set, in the order of their rows."""

_GATE_UP, _DOWN = SETS.index("gate_up"), SETS.index("down")


def part_rows(config: ModelConfig, name: str) -> list[slice]:
    """The rows of each part of projection set ``name``."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {
        "qkv": (queries, keys, keys),
        "o": (config.hidden,),
        "gate_up": (config.intermediate, config.intermediate),
        "down": (config.hidden,),
    }[name]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class StepRefinement:
    """Adds refinement to the outputs of projection sets while it is on: within a session's step."""

    def __init__(self, refiner: Refiner | None, *, bundles: bool) -> None:
        """``bundles``: the MLP is refined by neurons, for which a token's two sets have to follow one another."""
        # fixed after construction
        self._refiner = refiner
        self._bundles = bundles
        # changed by steps
        self.on = False
        self._gate_up: tuple[Tensor, Tensor] | None = None

    def add(self, layer: int, set_index: int, x: Tensor, y: Tensor) -> None:
        """Add to ``y`` [tokens, outputs] what its set lacks for ``x`` [tokens, inputs]; both float32 and contiguous."""
        if self._refiner is None:
            return
        if self._bundles and set_index == _GATE_UP:
            self._gate_up = x, y  # nothing is added here; each token's is told right before its neurons are selected
            return
        inputs, outputs = x.numpy(), y.numpy()
        for token in range(len(inputs)):
            if self._bundles and set_index == _DOWN and self._gate_up is not None:
                before, gate_up = self._gate_up
                self._refiner.refine(layer, _GATE_UP, before[token].numpy(), gate_up[token].numpy())
            self._refiner.refine(layer, set_index, inputs[token], outputs[token])


class ProjectionSet:
    """One projection set of one layer."""

    def __init__(self, layer: int, name: str, matrix: Tensor, refinement: StepRefinement) -> None:
        """``matrix`` [outputs, inputs] float32 is kept, not copied."""
        # fixed after construction
        self.matrix = matrix
        self._layer, self._set_index = layer, SETS.index(name)
        self._parts = len(PARTS[name])
        self._refinement = refinement
        # changed by calls
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._unread = 0

    def project(self, x: Tensor, rows: slice) -> Tensor:
        """``rows`` of the outputs for ``x`` [..., inputs], in its dtype."""
        if self._output is None or self._input is not x:
            self._input, self._output, self._unread = x, self._multiply(x), self._parts
        outputs = self._output[..., rows]
        self._unread -= 1
        if not self._unread:
            self._input = self._output = None
        return outputs

    def _multiply(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float().contiguous()
        # A vector as the decoder multiplies it: the general product of one row takes another way and more time.
        y = torch.mv(self.matrix, flat[0])[None] if len(flat) == 1 else linear(flat, self.matrix)
        if self._refinement.on:
            self._refinement.add(self._layer, self._set_index, flat, y)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class RefinedLinear(nn.Module):
    """One part of a projection set where the model had a linear layer.

    Pairs: construction / :meth:`bind`; it has no weight before.
    """

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.bias = bias

    def bind(self, projections: ProjectionSet, rows: slice) -> None:
        """Be ``rows`` of ``projections``; ``weight`` is a frozen view of its matrix."""
        self._projections, self._rows = projections, rows
        self.weight = nn.Parameter(projections.matrix[rows], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., outputs] of ``x`` [..., inputs]."""
        y = self._projections.project(x, self._rows)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """As a linear layer says it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
