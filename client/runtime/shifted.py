"""All layers over whole sequences, with refinement selected earlier (lead) or added later (lag) than its projection.

The residual stream has a state before each half of a block: position 2l before the attention of layer l, 2l + 1 before
its MLP, 2L before the last norm. A shift of s blocks is 2s positions, in steps of half a block:

- ``qkv`` and ``gate_up`` read the stream. Their channels are selected from the state s blocks earlier, put through the
  norm of the layer that will use them; the products are with the true input.
- ``o`` and ``down`` write to it. Their products are added s blocks after their projection's own output.

Positions before the first are the first, positions after the last are the last. With s = 0 the result is that of
:func:`strataflux.client.runtime.block.run_block` to the bit.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.functional import rms_norm, silu

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.block import attention_of, mix_heads
from strataflux.client.runtime.models import SETS, LayerWeights, ModelConfig

__all__ = ["SHIFTS", "Refinement", "check_shift", "run_shifted"]

SHIFTS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Supported shifts, in blocks."""


class Refinement(Protocol):
    """Multiplies by resident weights, and by what refines them."""

    def base(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Outputs [..., outputs] of a projection set's resident weights for ``x`` [..., inputs]."""

    def refined(self, layer: int, name: str, x: Tensor, ranks: Tensor) -> Tensor | None:
        """What refinement adds to them, with channels selected by the magnitudes of ``ranks`` [..., inputs].

        None: nothing. Called after :meth:`base` of the same set, sets in the order a step needs them.
        """


def check_shift(shift: Mapping[str, float]) -> None:
    """Refuse shifts that are not supported.

    Raises:
        MisuseError: naming the projection set.
    """
    if shift.keys() != set(SETS):
        raise MisuseError("shift", f"shifts of {', '.join(shift)}", f"one for each of {', '.join(SETS)}", "name all")
    for name, blocks in shift.items():
        if blocks not in SHIFTS:
            raise MisuseError(f"shift of {name}", f"{blocks} blocks", "0, 0.5, 1, 1.5 or 2", "choose one of these")


def run_shifted(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    hidden: Tensor,
    turns: tuple[Tensor, Tensor],
    shift: Mapping[str, float],
    refinement: Refinement,
) -> Tensor:
    """The hidden states [sequences, n, hidden] after all ``layers``, before the last norm.

    Args:
        config: the model's dimensions.
        layers: only their norms and windows are used here.
        hidden: [sequences, n, hidden] before the first layer.
        turns: the rotary table's rows of the n positions.
        shift: blocks for each projection set.
        refinement: multiplies.
    """
    run = _Run(config, shift, refinement, hidden, 2 * len(layers))
    for index, layer in enumerate(layers):
        qkv = run.read(index, "qkv", layer.attention_norm)
        run.write(index, "o", mix_heads(config, layer, qkv, turns, attention_of(layer)))
        gate, up = run.read(index, "gate_up", layer.mlp_norm).chunk(2, -1)
        run.write(index, "down", silu(gate) * up)
    return run.stream[-1]


class _Run:
    """The stream so far, and what will be added to it."""

    def __init__(
        self, config: ModelConfig, shift: Mapping[str, float], refinement: Refinement, hidden: Tensor, last: int
    ) -> None:
        self.stream = [hidden]
        self._config, self._shift, self._refinement, self._last = config, shift, refinement, last
        self._due: dict[int, list[Tensor]] = {}

    def read(self, layer: int, name: str, norm: Tensor) -> Tensor:
        now = len(self.stream) - 1
        x = self._normed(now, norm)
        behind = round(2 * self._shift[name])
        ranks = self._normed(max(0, now - behind), norm) if behind else x
        y = self._refinement.base(layer, name, x)
        added = self._refinement.refined(layer, name, x, ranks)
        return y if added is None else y + added

    def write(self, layer: int, name: str, x: Tensor) -> None:
        now, behind = len(self.stream), round(2 * self._shift[name])
        y = self._refinement.base(layer, name, x)
        added = self._refinement.refined(layer, name, x, x)
        if added is not None and behind:
            self._due.setdefault(min(self._last, now + behind), []).append(added)
        elif added is not None:
            y = y + added
        state = self.stream[-1] + y
        for late in self._due.pop(now, []):
            state = state + late
        self.stream.append(state)

    def _normed(self, position: int, norm: Tensor) -> Tensor:
        return rms_norm(self.stream[position], (self._config.hidden,), norm, self._config.norm_epsilon)
