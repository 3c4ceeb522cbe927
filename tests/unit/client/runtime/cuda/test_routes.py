"""Routes of errands through a step's launches: in order, whole, never two writers at once, and no link overfull."""

from collections import defaultdict

import pytest

from strataflux.client.runtime.cuda.routes import Link, Route, plan_routes, ring_size

PIECES = {0: 6144, 1: 4096, 2: 28672, 3: 14336}
CAPACITY = (5000, 1600, 48000, 20000)
BEHIND = [(b, b, b, b) for b in range(5)] + [(2, 1, 4, 3), (0, 3, 0, 4), (1, 4, 2, 0)]


@pytest.mark.parametrize("layers", [1, 2, 3, 9])
@pytest.mark.parametrize("behind", BEHIND)
def test_each_errand_finds_what_the_one_before_left(layers: int, behind: tuple[int, ...]) -> None:
    for route in plan_routes(layers, behind, PIECES, CAPACITY):
        launches = [route.select, *(part.launch for part in route.parts), route.add]
        assert launches == sorted(set(launches))
        assert 0 <= route.select < route.add < 4 * layers
        assert [part.begin for part in route.parts] == [0, *(part.end for part in route.parts[:-1])]
        assert route.parts[-1].end == PIECES[route.number]
        assert all(part.begin < part.end for part in route.parts)


@pytest.mark.parametrize("layers", [1, 2, 9])
@pytest.mark.parametrize("behind", BEHIND)
def test_they_lead_and_lag_by_so_many_positions(layers: int, behind: tuple[int, ...]) -> None:
    routes = plan_routes(layers, behind, PIECES, CAPACITY)
    for route in routes:
        if route.number in (0, 2):
            position = 2 * route.layer + route.number // 2
            assert route.source == max(0, position - behind[route.number]) < position
            assert route.select in (2 * route.source, 2 * route.source + 2)  # the state is there
            assert route.add == 2 * position  # its own product
        else:
            own = 4 * route.layer + route.number
            written = (own + 1) // 2
            assert route.target == min(2 * layers, written + behind[route.number])
            assert own <= route.select
            assert route.add <= 2 * route.target - 1  # before the norm that reads the state
    # All that has a launch between is here.
    missing = {(layer, number) for layer in range(layers) for number in range(4) if behind[number]}
    missing -= {(route.layer, route.number) for route in routes}
    assert missing <= {(0, 0), (layers - 1, 3)}


@pytest.mark.parametrize("behind", BEHIND)
def test_nothing_is_written_twice_at_once_or_too_early(behind: tuple[int, ...]) -> None:
    routes = plan_routes(9, behind, PIECES, CAPACITY)
    added = [(route.number, route.target, route.add) for route in routes if route.target >= 0]
    assert len(set(added)) == len(added)
    for number in PIECES:
        own = [route for route in routes if route.number == number]
        size = ring_size(own)
        for earlier, later in zip(own, own[size:], strict=False):
            assert later.select > earlier.add
        if size > 1:  # a smaller ring would not do
            assert any(later.select <= earlier.add for earlier, later in zip(own, own[size - 1 :], strict=False))


def fetched(routes: list[Route]) -> dict[int, int]:
    beside: dict[int, int] = defaultdict(int)
    for route in routes:
        for part in route.parts:
            beside[part.launch] += part.end - part.begin
    return beside


def test_no_more_is_fetched_beside_a_product_than_the_link_brings() -> None:
    behind = (3, 3, 3, 3)
    beside = fetched(plan_routes(9, behind, PIECES, CAPACITY))
    assert all(pieces <= CAPACITY[launch % 4] for launch, pieces in beside.items() if 4 <= launch < 30)
    # What does not fit is due all the same.
    twice = {number: 2 * pieces for number, pieces in PIECES.items()}
    assert sum(fetched(plan_routes(9, behind, twice, CAPACITY)).values()) == 2 * sum(beside.values())


def test_few_records_are_selected_beside_a_long_product() -> None:
    few = {0: 700, 1: 500, 2: 3000, 3: 1800}
    routes = plan_routes(9, (3, 3, 3, 3), few, CAPACITY)
    readers = [route for route in routes if 1 < route.layer < 7 and route.target < 0]
    assert {route.select % 4 for route in readers} == {2}
    assert all(route.select % 4 == 0 for route in plan_routes(9, (0, 0, 3, 0), PIECES, CAPACITY))


def test_a_longer_product_leaves_more_time_to_the_link() -> None:
    link = Link(start_microseconds=2.0, weight_bytes=3e6, pieces=3000.0)
    assert link.beside(0) == link.beside(6_000_000) == 0
    assert link.beside(60_000_000) == 54_000
