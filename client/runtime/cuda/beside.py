"""Refinement on side lanes: selected and added while products run, joined where it is consumed (Appendix G).

The way of whatever errands do not take (:meth:`~strataflux.client.runtime.cuda.budget.Budget.by_errands`), and of what
no launch lies between selection and use of. Each set has a lane; captured in a graph it is a branch, forked where what
channels are selected from is there. A set that reads the residual stream with a lead selects from an earlier state and
fetches records to the device, and a second lane adds them once the set's own input is there. All else is selected by
its own input and added from where records lie; one that lags is joined that much later.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from strataflux.client.runtime.cuda.budget import READERS, Budget
from strataflux.client.runtime.cuda.lanes import MAIN, Lanes, join
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.records import Records
from strataflux.client.runtime.models import SETS
from strataflux.kernels.gpu.fetch import Staging, fetch
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, select_and_look_up
from strataflux.kernels.refine import record_bytes

__all__ = ["N_LANES", "Beside"]

_SET_LANE: Final = 1
_ADD_LANE: Final = {number: 1 + len(SETS) + i for i, number in enumerate(READERS)}
N_LANES: Final = 1 + len(SETS) + len(READERS)
"""Lanes of a step: the main one, one for each set, and one for each reader that adds what was fetched with a lead."""
_HERE: Final = RefinePlan(4096)
"""The whole device may add what it has already."""


class Beside:
    """Refines sets of one model on lanes of their own.

    Once: ``bind``. Within a step: ``state_ready`` for each state that is read, then ``refine`` for sets with that
    input; ``join`` at the end.
    """

    def __init__(self, model: DeviceModel, records: Records, budget: Budget, lanes: Lanes) -> None:
        """Allocate selections and staging areas."""
        # fixed after construction
        self._model, self._records, self._lanes, self._programs = model, records, lanes, budget.programs
        shapes = [model.config.set_shape(name) for name in SETS]
        self._plans = [_plan(outputs, budget) for outputs, _ in shapes]
        self._leading = _who_leads(model.config.layers, budget)
        self._states: Tensor | None = None
        # device memory, reused in each layer
        sets = zip(SETS, shapes, strict=True)
        self._selections = [Selection(budget.k[name], inputs, model.device) for name, (_, inputs) in sets]
        self._ranks = {number: torch.zeros(model.config.hidden, device=model.device) for number in READERS}
        self._rings = {number: _ring(model, budget, number) for number in READERS}
        # while a step is queued
        self._used: set[int] = set()
        self._fetched: dict[tuple[int, int], object] = {}
        self._added: dict[tuple[int, int], object] = {}

    def bind(self, states: Tensor) -> None:
        """The step's [2L + 1, hidden] float32, which stay where they are."""
        self._states = states

    def state_ready(self, position: int) -> None:
        """States are there up to ``position``: fetch what later layers select from this one."""
        for layer, number in self._leading.get(position, ()):
            assert self._states is not None
            owner, ranks, lane = self._model.layers[layer], self._ranks[number], self._fork(_SET_LANE + number)
            gain = owner.mlp_norm if number else owner.attention_norm
            state, staging = self._states[position], self._staging(layer, number)
            if (last := self._added.get((layer - len(self._rings[number]), number))) is not None:
                self._lanes.wait(lane, last)  # its rows are free
            self._lanes.run(lane, lambda _, at=state, by=gain, to=ranks: torch.mul(at, by, out=to))  # type: ignore[misc]
            self._select(lane, layer, number, ranks, staging.selection)
            self._lanes.run(lane, lambda _, to=staging: fetch(to, self._programs))  # type: ignore[misc]
            self._fetched[layer, number] = self._lanes.mark(lane)

    def refine(self, layer: int, number: int, x: Tensor, target: Tensor) -> object:
        """Add a set's refinement for its input ``x`` [inputs] to ``target`` [outputs]; a mark for when it is there."""
        scales = self._model.layers[layer].scales
        assert scales is not None
        fetched, scale = self._fetched.pop((layer, number), None), scales[number]
        if fetched is None:
            lane, selection, plan = self._fork(_SET_LANE + number), self._selections[number], self._plans[number]
            self._select(lane, layer, number, x, selection)
        else:
            lane, selection, plan = self._fork(_ADD_LANE[number]), self._staging(layer, number).fetched, _HERE
            self._lanes.wait(lane, fetched)
        self._lanes.run(lane, lambda _: refine(target, x, selection, scale, plan))
        self._added[layer, number] = self._lanes.mark(lane)
        return self._added[layer, number]

    def join(self) -> None:
        """Let the main lane go on after all that was queued here since the last time."""
        join(self._lanes, self._used)
        self._used.clear()
        self._added.clear()

    def _fork(self, lane: int) -> int:
        self._lanes.wait(lane, self._lanes.mark(MAIN))
        self._used.add(lane)
        return lane

    def _select(self, lane: int, layer: int, number: int, x: Tensor, selection: Selection) -> None:
        records = self._records
        where = records.block, records.thresholds, selection, records.table, records.first(layer, number)
        self._lanes.run(lane, lambda early: select_and_look_up(x, *where, early=early))

    def _staging(self, layer: int, number: int) -> Staging:
        ring = self._rings[number]
        return ring[layer % len(ring)]


def _leads(budget: Budget, number: int) -> int:
    """Positions that a reader's records are fetched ahead by, on a lane."""
    name = SETS[number]
    return budget.behind()[number] if budget.k[name] and not budget.by_errands(name) else 0


def _who_leads(layers: int, budget: Budget) -> Mapping[int, Sequence[tuple[int, int]]]:
    """For each position the (layer, set) whose channels are selected from its state, earlier than they are used."""
    found: dict[int, list[tuple[int, int]]] = {}
    for position in range(1, 2 * layers):
        number = READERS[position % 2]
        if behind := _leads(budget, number):
            found.setdefault(max(0, position - behind), []).append((position // 2, number))
    return found


def _ring(model: DeviceModel, budget: Budget, number: int) -> list[Staging]:
    """As many as are in use at once: fetched before the last of them is added."""
    outputs, inputs = model.config.set_shape(SETS[number])
    behind, size = _leads(budget, number), (budget.k[SETS[number]], inputs, record_bytes(outputs), model.device)
    return [Staging(*size) for _ in range(behind // 2 + 2 if behind else 0)]


def _plan(outputs: int, budget: Budget) -> RefinePlan:
    """How refinement in place is spread over a few programs, which leave room to the product.

    The plans are those that did best at the sizes of Llama-3.1-8B's sets (docs/PERFORMANCE.md): with fewer outputs
    several programs share an output's records, or else too few of them would be in flight.
    """
    wide = outputs >= 16384
    if budget.ordered and not wide:
        return RefinePlan(budget.programs, 64, 32, 1, 8)
    return RefinePlan(budget.programs, 32, 32, 1 if wide else 4, 4)
