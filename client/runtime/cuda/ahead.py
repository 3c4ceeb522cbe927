"""Refinement by errands: a step's routes over its own buffers, one list of errands for each product's launch."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.records import Records
from strataflux.client.runtime.cuda.routes import Route, plan_routes, ring_size
from strataflux.client.runtime.models import SETS
from strataflux.kernels.gpu.errands import Add, Errand, Errands, Fetch, Select
from strataflux.kernels.gpu.fetch import Staging
from strataflux.kernels.refine import record_bytes

__all__ = ["Ahead"]


class Ahead:
    """Routes of one model's step, and the memory they lead through."""

    def __init__(self, model: DeviceModel, records: Records, budget: Budget) -> None:
        """Plan, and allocate staging areas."""
        # fixed after construction
        self._model, self._records = model, records
        self._rings = _rings(model, budget)
        pieces = {number: ring[0].pieces for number, ring in self._rings.items()}
        capacity = [budget.link.beside(linear.bytes) for linear in model.layers[0].linears]
        routes = plan_routes(model.config.layers, budget.behind(), pieces, capacity)
        self._routes = {(one.layer, one.number): one for one in routes}
        self._errands: dict[int, Errands] = {}

    def bind(self, states: Tensor, inputs: Sequence[Tensor], sums: Mapping[int, Tensor], late: Tensor) -> None:
        """Lay the errands out: arguments as of :meth:`Refinement.bind`, ``sums`` of each reader's outputs, and
        ``late`` [sets, states, hidden].
        """
        launches: dict[int, list[Errand]] = {}
        for route in self._routes.values():
            target = sums[route.number] if route.target < 0 else late[route.number, route.target]
            for launch, errand in self._errands_of(route, states, inputs[route.number][route.layer], target):
                launches.setdefault(launch, []).append(errand)
        self._errands = {launch: Errands(items) for launch, items in launches.items()}

    def goes(self, layer: int, number: int) -> bool:
        """Whether a set's refinement has a route."""
        return (layer, number) in self._routes

    def errands(self, layer: int, number: int) -> Errands | None:
        """What the launch of a set's product has to do beside it."""
        return self._errands.get(len(SETS) * layer + number)

    def _errands_of(self, route: Route, states: Tensor, x: Tensor, target: Tensor) -> Iterator[tuple[int, Errand]]:
        owner, ring = self._model.layers[route.layer], self._rings[route.number]
        staging, records = ring[route.layer % len(ring)], self._records
        assert owner.scales is not None
        chosen, gain = x, None
        if route.source >= 0:
            chosen, gain = states[route.source], owner.attention_norm if route.number == 0 else owner.mlp_norm
        first = records.first(route.layer, route.number)
        where = records.block, records.thresholds, staging.selection, records.table, first
        yield route.select, Select(chosen, gain, *where)
        for part in route.parts:
            yield part.launch, Fetch(staging, part.begin, part.end)
        yield route.add, Add(x, staging, owner.scales[route.number], target)


def _rings(model: DeviceModel, budget: Budget) -> dict[int, list[Staging]]:
    """Staging areas of each set that errands refine: as many as are in use at once."""
    rings = {}
    behind, layers = budget.behind(), model.config.layers
    for number, name in enumerate(SETS):
        outputs, inputs = model.config.set_shape(name)
        if budget.by_errands(name):
            routes = plan_routes(layers, behind, {number: 1}, [0] * len(SETS))
            size = budget.k[name], inputs, record_bytes(outputs), model.device
            rings[number] = [Staging(*size) for _ in range(ring_size(routes))]
    return rings
