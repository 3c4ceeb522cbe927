"""When errands run: which launch of a step selects, fetches and adds what, so that link and products share the time.

Products are launched in one order and numbered ``4 · layer + set`` (qkv, o, gate_up, down). A set's refinement takes
three errands, each in a later launch than the one before: *select* channels, *fetch* their records, *add* them. With
``behind`` = 2s positions of the residual stream (:mod:`~strataflux.client.runtime.cuda.refinement`):

* a set that reads the stream at position p selects from the state at ``p - behind``, in the launch that follows that
  state (2 · (p - behind)), and is added beside its own product (2 · p);
* a set that writes to it at position w, its product being launch ``2w - 1``, is added before the state at
  ``w + behind``, at the latest beside the product ``2 · (w + behind) - 1`` that is added there, too.

A selection takes as long as the shortest products. A reader's that would ride on such a one waits for the next but one,
which is longer, where few records are left to be fetched in less time. (A writer's did worse there, on an H200.)

Between selecting and adding, records are fetched wherever the link has time; what is due first comes first. What has no
launch between (the first layer's readers, the last layer's ``down``, every set with behind = 0) has no route: it is
refined beside the launches, and its consumer waits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

__all__ = ["Link", "Part", "Route", "plan_routes", "ring_size"]

_SETS: Final = 4
_LEAST: Final = 1024
"""Pieces: less is not worth an errand of its own, unless it is due."""
_SPARE: Final = 3
"""A selection waits where the link could bring so many times its records afterwards: it is not alone."""


class Link(NamedTuple):
    """How much a link brings meanwhile; defaults are an H200's (docs/PERFORMANCE.md)."""

    start_microseconds: float = 4.0
    """Of a product's time, what is lost to a fetch beside it: it begins late, and ends with an answer."""
    weight_bytes: float = 3.5e6
    """That a product reads in a microsecond."""
    pieces: float = 3e3
    """Of 16 bytes, that the link brings in a microsecond."""

    def beside(self, product_bytes: int) -> int:
        """Pieces that can be fetched while a product reads so many bytes of weights."""
        return max(0, int((product_bytes / self.weight_bytes - self.start_microseconds) * self.pieces))


class Part(NamedTuple):
    """Pieces ``begin`` … ``end`` - 1 of a selection's records, fetched beside one launch."""

    launch: int
    begin: int
    end: int


class Route(NamedTuple):
    """The way of one set's refinement in one layer through the launches of a step."""

    layer: int
    number: int
    source: int
    """Position of the state that is selected from; -1: the set's own input."""
    target: int
    """Position of the state that it is added to; -1: the set's own outputs."""
    select: int
    parts: tuple[Part, ...]
    add: int


def plan_routes(layers: int, behind: Sequence[int], pieces: Mapping[int, int], capacity: Sequence[int]) -> list[Route]:
    """Routes of all layers, in the order of their selections.

    Args:
        layers: of the model.
        behind: positions of each set's lead or lag.
        pieces: of one selection's records, for each set that is refined.
        capacity: pieces that can be fetched beside each set's product.
    """
    routes: list[Route] = []
    for number in pieces:
        if behind[number]:
            make = _reader if number % 2 == 0 else _writer
            found = (make(layer, number, behind[number], layers) for layer in range(layers))
            routes += [_waiting(route, pieces[number], capacity) for route in found if route is not None]
    return sorted(_with_parts(routes, pieces, capacity, _SETS * layers), key=lambda one: (one.select, one.number))


def ring_size(routes: Sequence[Route]) -> int:
    """How many selections of one set are under way at once: a place is taken again only after it was added."""
    size = 1
    while any(later.select <= one.add for one, later in zip(routes, routes[size:], strict=False)):
        size += 1
    return size


def _reader(layer: int, number: int, behind: int, layers: int) -> Route | None:  # noqa: ARG001
    position = 2 * layer + number // 2
    source = max(0, position - behind)
    if source == position:
        return None
    return Route(layer, number, source, -1, 2 * source, (), 2 * position)


def _writer(layer: int, number: int, behind: int, layers: int) -> Route | None:
    written = 2 * layer + (number + 1) // 2
    target = min(2 * layers, written + behind)
    own, last = 2 * written - 1, 2 * target - 1
    if last < own + 2:
        return None
    if last == own + 2:
        return Route(layer, number, -1, target, own, (), last)
    # Beside the next product, and beside the last but one, there is more room than beside those of writers.
    return Route(layer, number, -1, target, own + 1, (), last - 1 if last >= own + 6 else last)


def _waiting(route: Route, pieces: int, capacity: Sequence[int]) -> Route:
    """A reader's route with its selection beside a longer product, if enough time is left to fetch."""
    later = route.select + _SETS // 2
    left = sum(capacity[launch % _SETS] for launch in range(later + 1, route.add))
    longer = route.target < 0 and capacity[later % _SETS] > capacity[route.select % _SETS]
    return route._replace(select=later) if longer and left >= _SPARE * pieces else route


def _with_parts(
    routes: list[Route], pieces: Mapping[int, int], capacity: Sequence[int], launches: int
) -> Iterator[Route]:
    """Each route with what is fetched when; beside a launch, what is added first comes first."""
    parts: dict[Route, list[Part]] = {route: [] for route in routes}
    for launch in range(launches):
        free = capacity[launch % _SETS]
        ready = [one for one in routes if one.select < launch < one.add]
        for route in sorted(ready, key=lambda one: (one.add, one.layer)):
            begin = parts[route][-1].end if parts[route] else 0
            left = pieces[route.number] - begin
            take = left if launch + 1 == route.add or left <= free else free if free >= _LEAST else 0
            if take:
                parts[route].append(Part(launch, begin, begin + take))
            free = max(0, free - take)
    for route, found in parts.items():
        yield route._replace(parts=tuple(found))
