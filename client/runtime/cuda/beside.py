"""Refinement on side lanes: selected and added in place while the set's own product runs, joined where it is consumed.

The way of whatever no launch lies between selection and use of (Appendix G with s = 0). Each set has a lane; captured
in a graph it is a branch, forked where the set's input is there.
"""

from typing import Final

from torch import Tensor

from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.lanes import MAIN, Lanes, join
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.records import Records
from strataflux.client.runtime.models import SETS
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, select_and_look_up

__all__ = ["N_LANES", "Beside"]

_SET_LANE: Final = 1
N_LANES: Final = _SET_LANE + len(SETS)
"""Lanes of a step: the main one, and one for each set."""


class Beside:
    """Refines sets of one model, each on its own lane."""

    def __init__(self, model: DeviceModel, records: Records, budget: Budget, lanes: Lanes) -> None:
        """Allocate the selections."""
        # fixed after construction
        self._model, self._records, self._lanes = model, records, lanes
        shapes = [model.config.set_shape(name) for name in SETS]
        self._plans = [_plan(outputs, budget) for outputs, _ in shapes]
        # device memory, reused in each layer
        sets = zip(SETS, shapes, strict=True)
        self._selections = [Selection(budget.k[name], inputs, model.device) for name, (_, inputs) in sets]
        # while a step is queued
        self._used: set[int] = set()

    def refine(self, layer: int, number: int, x: Tensor, target: Tensor) -> object:
        """Add a set's refinement for its input ``x`` [inputs] to ``target`` [outputs]; a mark for when it is there."""
        lane, selection, plan = _SET_LANE + number, self._selections[number], self._plans[number]
        scales = self._model.layers[layer].scales
        assert scales is not None
        records, first, scale = self._records, self._records.first(layer, number), scales[number]

        def select(early: bool) -> None:
            where = records.block, records.thresholds, selection, records.table, first
            select_and_look_up(x, *where, early=early)

        self._lanes.wait(lane, self._lanes.mark(MAIN))
        self._used.add(lane)
        self._lanes.run(lane, select)
        self._lanes.run(lane, lambda _: refine(target, x, selection, scale, plan))
        return self._lanes.mark(lane)

    def join(self) -> None:
        """Let the main lane go on after all that was queued here since the last time."""
        join(self._lanes, self._used)
        self._used.clear()


def _plan(outputs: int, budget: Budget) -> RefinePlan:
    """How refinement in place is spread over a few programs, which leave room to the product.

    The plans are those that did best at the sizes of Llama-3.1-8B's sets (docs/PERFORMANCE.md): with fewer outputs
    several programs share an output's records, or else too few of them would be in flight.
    """
    wide = outputs >= 16384
    if budget.ordered and not wide:
        return RefinePlan(budget.programs, 64, 32, 1, 8)
    return RefinePlan(budget.programs, 32, 32, 1 if wide else 4, 4)
