"""What stands for a GPU where there is none: the same step, products by expanded weights, lanes of one's own."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.cuda.lanes import Operation
from strataflux.client.runtime.cuda.linear import LowbitLinear
from strataflux.client.runtime.cuda.model import DeviceModel, load_prepared
from strataflux.kernels.gpu.errands import Errands
from strataflux.kernels.lowbit_gemv import unpack


class Expanded:
    """The values of packed weights as a matrix: Triton's interpreter takes half a minute for what this does at once."""

    x_dtype = torch.float16
    y_dtype = torch.float32

    def __init__(self, packed: LowbitLinear) -> None:
        self.rows, self.inputs, self.bytes = packed.rows, packed.inputs, packed.bytes
        self._matrix = unpack(packed.weights).float()

    def multiply(self, x: Tensor, y: Tensor, *, early: bool, errands: Errands | None = None) -> Tensor:
        if errands is not None:
            errands.run()
        return torch.mv(self._matrix, x.float(), out=y)


def emulated_model(prepared: PreparedModel) -> DeviceModel:
    """The prepared model on this processor."""
    model = load_prepared(prepared, torch.device("cpu"))
    layers = []
    for layer in model.layers:
        packed = [linear for linear in layer.linears if isinstance(linear, LowbitLinear)]
        layers.append(replace(layer, linears=[Expanded(linear) for linear in packed]))
    return replace(model, layers=layers)


class ShuffledLanes:
    """Keeps what is queued, and runs it in a random order of those that marks and waits allow.

    A missing wait shows itself: some order lets the reader run before its writer.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._operations: list[Operation] = []
        self._needs: list[set[int]] = []
        self._last: dict[int, set[int]] = {}

    def run(self, lane: int, operation: Operation) -> None:
        self._needs.append(set(self._last.get(lane, ())))
        self._last[lane] = {len(self._operations)}
        self._operations.append(operation)

    def mark(self, lane: int) -> object:
        return frozenset(self._last.get(lane, ()))

    def wait(self, lane: int, mark: object) -> None:
        assert isinstance(mark, frozenset)
        self._last[lane] = self._last.get(lane, set()) | mark

    def flush(self) -> list[int]:
        """Run it all; the order that was taken."""
        order: list[int] = []
        left = set(range(len(self._operations)))
        while left:
            ready = [i for i in left if not self._needs[i] & left]
            chosen = self._random.choice(sorted(ready))
            self._operations[chosen](False)
            left.remove(chosen)
            order.append(chosen)
        self._operations.clear()
        self._needs.clear()
        self._last.clear()
        return order


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())


def logits_over(step: object, tokens: Sequence[int]) -> Tensor:
    """[n, vocabulary] of a function from token to logits."""
    assert callable(step)
    return torch.stack([step(token) for token in tokens])
