"""One decode step on the device, from a token to the next: every launch of it, queued in one order.

Everything lies in buffers that are made once, so that the launches can be captured in a graph and replayed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from strataflux.client.runtime.cuda.attention import Attention
from strataflux.client.runtime.cuda.lanes import MAIN, Lanes
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.sampling import Sampler
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.gpu.errands import Errands
from strataflux.kernels.gpu.gate import gate
from strataflux.kernels.gpu.heads import Heads, split_heads
from strataflux.kernels.gpu.norm import add_norm

__all__ = ["Refining", "Step"]

_QKV, _O, _GATE_UP, _DOWN = range(4)


class Refining(Protocol):
    """What adds precision to a step; :class:`~strataflux.client.runtime.cuda.refinement.Refinement` says more."""

    def bind(self, states: Tensor, inputs: Sequence[Tensor]) -> None:
        """The step's own buffers, which stay where they are."""

    def begin(self) -> None:
        """The step begins."""

    def input_ready(self, layer: int, number: int) -> Errands | None:
        """A projection's input is there; its product is queued next, and takes these errands along."""

    def of_reader(self, layer: int, number: int) -> Tensor | None:
        """What was added to a projection's outputs, or None; whoever reads it clears it."""

    def of_state(self, position: int) -> Sequence[Tensor]:
        """What was added to a state; whoever reads it clears it."""

    def end(self) -> None:
        """The step ends."""


class Step:
    """Attributes are device memory: what a step reads and what it leaves.

    Attributes:
        token: [1] int64: the token to append; the next one after the step.
        position: [1] int32: where it is appended; one more after the step.
        logits: [vocabulary] of 16-bit floats, of the next token.
    """

    def __init__(
        self, model: DeviceModel, attention: Attention, refining: Refining, sampler: Sampler, lanes: Lanes
    ) -> None:
        """Allocate every buffer."""
        config, device = model.config, model.device
        # fixed after construction
        self.model, self.attention, self.sampler = model, attention, sampler
        self._refining, self._lanes, self._last = refining, lanes, 2 * config.layers
        cosine, sine = (table.to(device) for table in rotary_table(config, attention.context))
        self._forms = [
            Heads(config.heads, config.kv_heads, cosine, sine, layer.query_norm, layer.key_norm, config.norm_epsilon)
            for layer in model.layers
        ]
        linears = model.layers[0].linears
        # device memory
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(config.vocabulary, dtype=model.head.dtype, device=device)
        self._states = torch.zeros(self._last + 1, config.hidden, device=device)
        self._embedded = torch.zeros(1, config.hidden, dtype=model.embedding.dtype, device=device)
        # Inputs are read by their refinement even layers later: one for each layer.
        self._inputs = [
            torch.zeros(config.layers, linear.inputs, dtype=linear.x_dtype, device=device) for linear in linears
        ]
        self._outputs = [torch.zeros(linear.rows, dtype=linear.y_dtype, device=device) for linear in linears]
        self._final = torch.zeros(config.hidden, dtype=model.head.dtype, device=device)
        shapes = (config.heads, config.kv_heads, config.kv_heads)
        self._heads = [torch.zeros(n, config.head_dim, dtype=torch.float16, device=device) for n in shapes]
        refining.bind(self._states, self._inputs)

    def run(self) -> None:
        """Queue the step."""
        self._refining.begin()
        self._lanes.run(MAIN, self._embed)
        added: Tensor | None = None
        for number, layer in enumerate(self.model.layers):
            qkv = self._read(number, _QKV, layer.attention_norm, added)
            self._mix(number, qkv)
            added = self._multiply(number, _O)
            gate_up = self._read(number, _GATE_UP, layer.mlp_norm, added)
            self._gate(number, gate_up)
            added = self._multiply(number, _DOWN)
        self._advance(self._last, self.model.norm, added, self._final)
        self._lanes.run(MAIN, self._finish)
        # What attention has beside still reads the position.
        self._lanes.run(MAIN, lambda _: self.attention.join())
        self._lanes.run(MAIN, lambda _: self.position.add_(1))
        self._refining.end()

    def _read(self, layer: int, number: int, norm: Tensor, added: Tensor | None) -> Tensor:
        """The outputs of a set that reads the residual stream, after ``added`` went into it."""
        position = 2 * layer + (number == _GATE_UP)
        self._advance(position, norm, added, self._inputs[number][layer])
        return self._multiply(layer, number)

    def _advance(self, position: int, norm: Tensor, added: Tensor | None, x: Tensor) -> None:
        """The state at ``position`` and its norm."""
        before = self._states[max(0, position - 1)]
        after = self._states[position] if position else None
        late, epsilon = self._refining.of_state(position), self.model.config.norm_epsilon
        self._lanes.run(MAIN, lambda early: add_norm(before, added, late, norm, after, x, epsilon, early=early))

    def _multiply(self, layer: int, number: int) -> Tensor:
        """A set's product with its input; refinement is queued first, since its few programs need a place to begin."""
        linear, x, y = self.model.layers[layer].linears[number], self._inputs[number][layer], self._outputs[number]
        errands = self._refining.input_ready(layer, number)
        found: list[Tensor] = []
        self._lanes.run(MAIN, lambda early: found.append(linear.multiply(x, y, early=early, errands=errands)))
        return found[0] if found else y  # lanes that run later are for linears that write where they are told

    def _gate(self, layer: int, gate_up: Tensor) -> None:
        """The input of ``down``."""
        late, x = self._refining.of_reader(layer, _GATE_UP), self._inputs[_DOWN][layer]
        self._lanes.run(MAIN, lambda early: gate(gate_up, late, x, early=early))

    def _mix(self, layer: int, qkv: Tensor) -> None:
        """Attention of this position, into the input of ``o``."""
        form, (queries, keys, values) = self._forms[layer], self._heads
        late, out = self._refining.of_reader(layer, _QKV), self._inputs[_O][layer]
        self._lanes.run(
            MAIN, lambda early: split_heads(qkv, late, form, self.position, queries, keys, values, early=early)
        )
        attend = partial(self.attention.attend, layer, queries, keys, values, self.position, out)
        self._lanes.run(MAIN, lambda early: attend(early=early))

    def _embed(self, early: bool) -> None:  # noqa: ARG002 (torch launches these)
        torch.index_select(self.model.embedding, 0, self.token, out=self._embedded)
        self._states[0].copy_(self._embedded[0])

    def _finish(self, early: bool) -> None:  # noqa: ARG002 (torch launches these)
        torch.mm(self._final[None], self.model.head.t(), out=self.logits[None])
        self.sampler.choose(self.logits, self.token)
