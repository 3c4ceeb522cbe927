"""What a step adds to its projections: selected, looked up and fetched in time, early or late as set.

The stream has a state before each half of a block: position 2l before the attention of layer l, 2l + 1 before its MLP,
2L before the last norm. ``qkv`` and ``gate_up`` read it: with a shift of s blocks their channels are selected from the
state 2s positions earlier (through their own norm) and the records fetched to the device meanwhile; only the product
with the true input remains. ``o`` and ``down`` write to it: their refinement is added 2s positions later. This is what
:mod:`strataflux.client.runtime.shifted` computes.

There are two ways. Few records with launches between their selection and their use go *ahead*: as errands of those
launches, with none of their own and no join (:mod:`~strataflux.client.runtime.cuda.ahead`). What has no launch between,
as every set with s = 0, and what errands have no time for go *beside*
(:mod:`~strataflux.client.runtime.cuda.beside`). Sums wait in accumulators that the consuming kernel adds and clears,
one for each way and set, so that each is written in one order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda.ahead import Ahead
from strataflux.client.runtime.cuda.beside import Beside
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import READERS, Budget
from strataflux.client.runtime.cuda.lanes import MAIN, Lanes
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.records import Records
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import require_scheme
from strataflux.kernels.gpu.errands import Errands
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.refine import record_bytes
from strataflux.kernels.topk import selected_count

__all__ = ["NoRefinement", "Refinement"]


class NoRefinement:
    """Leaves every projection at its resident precision."""

    def bind(self, states: Tensor, inputs: Sequence[Tensor]) -> None:
        """Nothing to look at."""

    def begin(self) -> None:
        """Nothing to begin."""

    def input_ready(self, layer: int, number: int) -> Errands | None:
        """Nothing to do beside the product."""

    def of_reader(self, layer: int, number: int) -> Tensor | None:
        """Nothing was added."""

    def of_state(self, position: int) -> Sequence[Tensor]:  # noqa: ARG002 (none at any)
        """Nothing was added."""
        return ()

    def end(self) -> None:
        """Nothing to end."""


class Refinement:
    """Refines one model from the records of one table.

    Once: ``bind``. Within a step: ``begin``; ``input_ready`` for each projection, before its product is queued, which
    takes the errands along; ``of_reader`` and ``of_state`` where the sums are consumed; ``end``. All of it only queues
    launches.
    """

    def __init__(self, model: DeviceModel, block: DeviceBlock, table: int, budget: Budget, lanes: Lanes) -> None:
        """Plan, and allocate everything.

        Raises:
            MisuseError: the model has no refinement scales, or its MLPs have no records of channels.
        """
        require_scheme(model.sets, "channels")
        if any(layer.scales is None for layer in model.layers):
            raise MisuseError("refinement", "weights without refinement scales", "low-bit weights", "prepare a model")
        config, device, records = model.config, model.device, Records.of(model, block, table)
        # fixed after construction
        self._config, self._block, self._lanes, self._budget = config, block, lanes, budget
        self._ahead, self._beside = Ahead(model, records, budget), Beside(model, records, budget, lanes)
        self._written = self._who_writes()
        self._inputs: Sequence[Tensor] = ()
        # device memory, reused in each step
        self._sums = {number: torch.zeros(config.set_shape(SETS[number])[0], device=device) for number in READERS}
        self._late = torch.zeros(2, len(SETS), 2 * config.layers + 1, config.hidden, device=device)
        # while a step is queued
        self._due: dict[tuple[int, int], object] = {}

    @property
    def bytes_per_step(self) -> int:
        """Bytes of records that a step selects."""
        shapes = {name: self._config.set_shape(name) for name in SETS}
        each = (selected_count(self._budget.k[name], n) * record_bytes(m) for name, (m, n) in shapes.items())
        return self._config.layers * sum(each)

    def bind(self, states: Tensor, inputs: Sequence[Tensor]) -> None:
        """Take the step's own buffers, which stay where they are.

        Args:
            states: [2L + 1, hidden] float32, of the residual stream.
            inputs: of each set, [L, inputs] float16.
        """
        self._inputs = inputs
        self._beside.bind(states)
        self._ahead.bind(states, inputs, self._sums, self._late[0])

    def begin(self) -> None:
        """Queue the step's first node."""
        self._lanes.run(MAIN, lambda _: begin_step(self._block.tensor))

    def input_ready(self, layer: int, number: int) -> Errands | None:
        """The input of a set is there. What the launch of its product is to do beside it, or None."""
        if number in READERS:
            self._beside.state_ready(2 * layer + number // 2)
        if self._budget.k[SETS[number]] and not self._ahead.goes(layer, number):
            target = self._sums[number] if number in READERS else self._late[1, number, self._target(layer, number)]
            x = self._inputs[number][layer]
            self._due[layer, number] = self._beside.refine(layer, number, x, target)
        return self._ahead.errands(layer, number)

    def of_reader(self, layer: int, number: int) -> Tensor | None:
        """What was added to the outputs of a set whose product was queued, [outputs]; clear it when read."""
        if not self._budget.k[SETS[number]]:
            return None
        self._wait(layer, number)
        return self._sums[number]

    def of_state(self, position: int) -> Sequence[Tensor]:
        """What refinement adds to the state at ``position``, each [hidden]; clear them when read."""
        parts = {}
        for layer, number in self._written.get(position, ()):
            way = int(not self._ahead.goes(layer, number))
            parts[way, number] = self._late[way, number, position]
            self._wait(layer, number)
        return list(parts.values())

    def end(self) -> None:
        """Queue the step's last node, after all lanes."""
        self._beside.join()
        self._lanes.run(MAIN, lambda _: end_step(self._block.tensor))

    def _wait(self, layer: int, number: int) -> None:
        if (due := self._due.pop((layer, number), None)) is not None:
            self._lanes.wait(MAIN, due)

    def _target(self, layer: int, number: int) -> int:
        """The state that the refinement of a set which writes to the stream belongs to."""
        return min(2 * self._config.layers, 2 * layer + (number + 1) // 2 + self._budget.behind()[number])

    def _who_writes(self) -> dict[int, list[tuple[int, int]]]:
        """For each position the (layer, set) whose refinement is added there."""
        writers: dict[int, list[tuple[int, int]]] = {}
        for number, name in enumerate(SETS):
            if number not in READERS and self._budget.k[name]:
                for layer in range(self._config.layers):
                    writers.setdefault(self._target(layer, number), []).append((layer, number))
        return writers
