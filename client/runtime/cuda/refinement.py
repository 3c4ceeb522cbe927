"""What a step adds to its projections: selection, look-up and refinement on side lanes, early or late as set.

The stream has a state before each half of a block: position 2l before the attention of layer l, 2l + 1 before its MLP,
2L before the last norm. ``qkv`` and ``gate_up`` read it: with a shift of s blocks their channels are selected from the
state 2s positions earlier (through their own norm) and the records fetched to the device meanwhile; only the product
with the true input remains. ``o`` and ``down`` write to it: their refinement is added 2s positions later. This is what
:mod:`strataflux.client.runtime.shifted` computes, in the order of Appendix G: fork, go on, join where it is consumed.

Results go to accumulators that the consuming kernel adds and clears: no projection waits for its refinement, and its
own kernel writes without atomics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.lanes import MAIN, Lanes, join
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.models import SETS
from strataflux.client.runtime.shifted import check_shift
from strataflux.client.schemes import budgets_by_set, require_scheme
from strataflux.client.weights import record_bases
from strataflux.kernels.gpu.fetch import Staging, fetch
from strataflux.kernels.gpu.norm import add_norm
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, score_thresholds, select_and_look_up
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.refine import record_bytes

__all__ = ["N_LANES", "READERS", "Budget", "NoRefinement", "Refinement"]

READERS: Final = (0, 2)
"""Sets (numbers in ``SETS``) that read the residual stream; the others write to it."""
_SET_LANE: Final = 1
_APPLY_LANE: Final = {0: 5, 2: 6}
N_LANES: Final = 7
"""Lanes of a step: the main one, one for each set, one for each reader's product with what was fetched ahead."""


@dataclass(frozen=True)
class Budget:
    """How much of what is refined, and when.

    Raises:
        MisuseError: on construction: a budget or shift out of range, or for an unknown set.
    """

    k: Mapping[str, int]
    """Channels per 1,024 of each set."""
    shift: Mapping[str, float]
    """Blocks of fetch lead or lag of each set."""
    programs: int = 64
    """Programs that fetch ahead, or refine: the more, the fuller the link and the fewer are left to projections."""
    ordered: bool = False
    """Add each output's records in list order: equal lists give equal bits, and the link is filled less well."""

    def __post_init__(self) -> None:
        budgets_by_set(self.k, "channels")
        check_shift(self.shift)
        if self.programs < 1:
            raise MisuseError("programs", f"{self.programs}", "at least 1", "64 fill a link")

    @classmethod
    def common(cls, k: int, shift: float = 0.0, programs: int = 64) -> "Budget":
        """The same for all sets."""
        return cls(dict.fromkeys(SETS, k), dict.fromkeys(SETS, shift), programs)


class NoRefinement:
    """Leaves every projection at its resident precision."""

    def begin(self) -> None:
        """Nothing to begin."""

    def state_ready(self, position: int, states: Tensor) -> None:
        """Nothing to fetch ahead."""

    def input_ready(self, layer: int, number: int, x: Tensor) -> None:
        """Nothing to add."""

    def of_reader(self, number: int) -> Tensor | None:
        """Nothing was added."""

    def of_state(self, position: int) -> Tensor | None:
        """Nothing was added."""

    def end(self) -> None:
        """Nothing to end."""


class Refinement:
    """Refines one model from the records of one table.

    Within a step: ``begin``; ``state_ready`` for each state that is read, then ``input_ready`` for each projection,
    before its product is queued; ``of_reader`` and ``of_state`` where the sums are consumed; ``end``. All of it only
    queues launches.
    """

    def __init__(self, model: DeviceModel, block: DeviceBlock, table: int, budget: Budget, lanes: Lanes) -> None:
        """Allocate everything.

        Raises:
            MisuseError: the model has no refinement scales, or its MLPs have no records of channels.
        """
        require_scheme(model.sets, "channels")
        if any(layer.scales is None for layer in model.layers):
            raise MisuseError("refinement", "weights without refinement scales", "low-bit weights", "prepare a model")
        config, device = model.config, model.device
        # fixed after construction
        self._model, self._block, self._table, self._lanes, self._budget = model, block, table, lanes, budget
        self._k = [budget.k[name] for name in SETS]
        self._behind = [round(2 * budget.shift[name]) for name in SETS]
        self._shapes = [config.set_shape(name) for name in SETS]
        self._bases = record_bases(config, model.sets)
        self._thresholds = score_thresholds(device)
        self._readers = self._who_reads(2 * config.layers)
        # device memory, reused in each step
        self._selections = [Selection(k, inputs, device) for k, (_, inputs) in zip(self._k, self._shapes, strict=True)]
        self._ranks = {number: torch.zeros(config.hidden, dtype=torch.float16, device=device) for number in READERS}
        self._staging = {number: self._stagings(number, device) for number in READERS}
        self._sums = {number: torch.zeros(self._shapes[number][0], device=device) for number in READERS}
        self._late = torch.zeros(2 * config.layers + 1, config.hidden, device=device)
        # while a step is queued
        self._used: set[int] = set()
        self._fetched: dict[tuple[int, int], object] = {}
        self._applied: dict[tuple[int, int], object] = {}
        self._due_reader: dict[int, object] = {}
        self._due_state: dict[int, list[object]] = {}

    @property
    def bytes_per_step(self) -> int:
        """Bytes of records that a step selects."""
        counts = [selection.channels.numel() for selection in self._selections]
        sizes = [record_bytes(outputs) for outputs, _ in self._shapes]
        return self._model.config.layers * sum(c * s for c, s in zip(counts, sizes, strict=True))

    def begin(self) -> None:
        """Queue the step's first node."""
        self._used.clear()
        self._lanes.run(MAIN, lambda _: begin_step(self._block.tensor))

    def state_ready(self, position: int, states: Tensor) -> None:
        """States [positions, hidden] are there up to ``position``: fetch what later layers select from this one."""
        for layer, number in self._readers.get(position, ()):
            lane = self._fork(_SET_LANE + number)
            owner, ranks = self._model.layers[layer], self._ranks[number]
            norm = owner.attention_norm if number == 0 else owner.mlp_norm
            epsilon = self._model.config.norm_epsilon
            self._lanes.run(lane, partial(_norm, states[position], norm, ranks, epsilon))
            self._select(lane, layer, number, ranks)
            ring = self._staging[number]
            if (last := self._applied.get((layer - len(ring), number))) is not None:
                self._lanes.wait(lane, last)  # its rows are free
            self._lanes.run(lane, partial(self._fetch, number, ring[layer % len(ring)]))
            self._fetched[layer, number] = self._lanes.mark(lane)

    def input_ready(self, layer: int, number: int, x: Tensor) -> None:
        """The input ``x`` [inputs] of a set is there: add to its accumulator what is present."""
        if not self._k[number]:
            return
        ahead = number in READERS and self._behind[number] > 0
        lane = self._fork(_APPLY_LANE[number] if ahead else _SET_LANE + number)
        selection = self._selections[number]
        if ahead:
            self._lanes.wait(lane, self._fetched.pop((layer, number)))
            selection = self._staging[number][layer % len(self._staging[number])].selection
        else:
            self._select(lane, layer, number, x)
        target, state = self._target(layer, number)
        scales = self._model.layers[layer].scales
        assert scales is not None
        plan = _plan(self._shapes[number][0], self._budget, here=ahead)
        self._lanes.run(lane, lambda _: refine(target, x, selection, scales[number], plan))
        done = self._lanes.mark(lane)
        if number in READERS:
            self._due_reader[number] = done
            self._applied[layer, number] = done
        else:
            self._due_state.setdefault(state, []).append(done)

    def of_reader(self, number: int) -> Tensor | None:
        """What was added to the outputs of the set whose product was queued last, [outputs]; clear it when read."""
        done = self._due_reader.pop(number, None)
        if done is None:
            return None
        self._lanes.wait(MAIN, done)
        return self._sums[number]

    def of_state(self, position: int) -> Tensor | None:
        """What refinement adds to the state at ``position``, [hidden]; clear it when read."""
        marks = self._due_state.pop(position, [])
        for done in marks:
            self._lanes.wait(MAIN, done)
        return self._late[position] if marks else None

    def end(self) -> None:
        """Queue the step's last node, after all lanes."""
        join(self._lanes, self._used)
        self._fetched.clear()
        self._applied.clear()
        self._lanes.run(MAIN, lambda _: end_step(self._block.tensor))

    def _fetch(self, number: int, staging: Staging, early: bool) -> None:  # noqa: ARG002 (it does not start early)
        fetch(self._selections[number], staging, record_bytes(self._shapes[number][0]), self._budget.programs)

    def _fork(self, lane: int) -> int:
        self._lanes.wait(lane, self._lanes.mark(MAIN))
        self._used.add(lane)
        return lane

    def _select(self, lane: int, layer: int, number: int, x: Tensor) -> None:
        block, selection = self._block.tensor, self._selections[number]
        first = int(self._bases[SETS[number]][layer])
        self._lanes.run(
            lane,
            lambda early: select_and_look_up(
                x, block, self._thresholds, selection, self._table, first, early=early
            ),
        )  # fmt: skip

    def _target(self, layer: int, number: int) -> tuple[Tensor, int]:
        """The accumulator of a set's refinement, and the state it belongs to (for those that write to the stream)."""
        if number in READERS:
            return self._sums[number], -1
        state = min(2 * self._model.config.layers, 2 * layer + (number + 1) // 2 + self._behind[number])
        return self._late[state], state

    def _who_reads(self, last: int) -> dict[int, list[tuple[int, int]]]:
        """For each position the (layer, set) whose channels are selected from its state, earlier than they are used."""
        readers: dict[int, list[tuple[int, int]]] = {}
        for position in range(last):
            layer, number = position // 2, READERS[position % 2]
            if self._behind[number] and self._k[number]:
                readers.setdefault(max(0, position - self._behind[number]), []).append((layer, number))
        return readers

    def _stagings(self, number: int, device: torch.device) -> list[Staging]:
        """As many as are in use at once: fetched before the last of them is consumed."""
        behind, (outputs, inputs) = self._behind[number], self._shapes[number]
        count = behind // 2 + 2 if behind and self._k[number] else 0
        return [Staging(self._k[number], inputs, record_bytes(outputs), device) for _ in range(count)]


def _norm(state: Tensor, weight: Tensor, ranks: Tensor, epsilon: float, early: bool) -> None:
    add_norm(state, None, None, weight, None, ranks, epsilon, early=early)


def _plan(outputs: int, budget: Budget, *, here: bool) -> RefinePlan:
    """How refinement is spread: a few programs read host memory, the whole device what is here already.

    The plans are those that did best at the sizes of Llama-3.1-8B's sets (docs/PERFORMANCE.md): with fewer outputs
    several programs share an output's records, or else too few of them would be in flight.
    """
    wide = outputs >= 16384
    if here:
        return RefinePlan(4096, 32, 32 if wide else 8, 1, 4)
    if budget.ordered and not wide:
        return RefinePlan(budget.programs, 64, 32, 1, 8)
    return RefinePlan(budget.programs, 32, 32, 1 if wide else 4, 4)
