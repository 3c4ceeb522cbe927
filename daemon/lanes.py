"""Turns: which session's requests are read next, and who may hold how much of the queue. The reader thread only.

Two levels of stride scheduling. A tenant is a group of users whose share of the reads is configured; each request
served adds ``TENANT_TURN / share`` to its turn, and the tenant with the smallest turn is next. Within a tenant the
lanes of its sessions take turns one by one. Nobody saves up: who had nothing to ask for meanwhile joins at the turn
that was served last. Nothing is reserved either: a tenant alone gets everything.

Pairs: :func:`count_in` / :func:`count_out`; :func:`take_turn` / :func:`undo_turn`. Invariant: a tenant's ``queued`` is
the sum of its lanes', and ``rd.queued`` the sum of all. What is called for each request takes rows, and not the core,
whose every array a call would pass.
"""

from typing import Any

from strataflux.cache_policy.base import wide
from strataflux.daemon.rows import NOBODY
from strataflux.daemon.state import NONE, Core
from strataflux.proto import layout
from strataflux.proto.compiled import borrowing

__all__ = ["count_in", "count_out", "fullest", "holds_more", "next_lane", "take_turn", "undo_turn"]


@borrowing
def count_in(lane: Any, tenant: Any, rd: Any) -> None:
    """A request joins a lane; who had none joins at the turn of now."""
    if tenant.queued == 0:
        tenant.turn = max(tenant.turn, rd.turn)
    if lane.queued == 0:
        lane.turn = max(lane.turn, tenant.lane_turn)
    lane.queued += 1
    tenant.queued += 1
    rd.queued += 1


@borrowing
def count_out(lane: Any, tenant: Any, rd: Any) -> None:
    """A request left a lane."""
    lane.queued -= 1
    tenant.queued -= 1
    rd.queued -= 1


@borrowing
def next_lane(c: Core) -> int:
    """The lane whose turn it is, of those with requests; ``NONE`` if there are none."""
    best = NONE
    if c.rd[0].queued == 0:
        return best
    sessions = c.stamp_owner[layout.MAX_SESSIONS]
    for place in range(sessions + 1):
        lane = wide(c.stamp_owner[place]) if place < sessions else NOBODY
        if c.lanes[lane].queued and (best == NONE or _is_before(c, lane, best)):
            best = lane
    return best


@borrowing
def _is_before(c: Core, lane: int, other: int) -> bool:
    mine, theirs = c.tenants[c.lanes[lane].tenant].turn, c.tenants[c.lanes[other].tenant].turn
    if mine != theirs:
        return bool(mine < theirs)
    return bool(c.lanes[lane].turn < c.lanes[other].turn)


@borrowing
def take_turn(lane: Any, tenant: Any, rd: Any) -> None:
    """A request of the lane is served."""
    rd.turn = tenant.turn
    tenant.lane_turn = lane.turn
    tenant.turn += tenant.stride
    lane.turn += 1


@borrowing
def undo_turn(lane: Any, tenant: Any) -> None:
    """It was not, after all."""
    tenant.turn -= tenant.stride
    lane.turn -= 1


@borrowing
def fullest(c: Core) -> int:
    """The lane that holds most of a full queue, as found once a turn of the loop."""
    rd = c.rd[0]
    if rd.fullest_turn != rd.turns:
        rd.fullest_turn = rd.turns
        rd.fullest = NOBODY
        for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
            if holds_more(c, wide(c.stamp_owner[place]), rd.fullest):
                rd.fullest = c.stamp_owner[place]
    return wide(rd.fullest)


@borrowing
def holds_more(c: Core, lane: int, other: int) -> bool:
    """Whether a lane holds more of the queue than another: by their tenants' shares, or one by one within a tenant."""
    mine, theirs = c.lanes[lane], c.lanes[other]
    if mine.tenant == theirs.tenant:
        return bool(mine.queued > theirs.queued)
    here, there = c.tenants[mine.tenant], c.tenants[theirs.tenant]
    return bool(mine.queued > 0 and here.queued * here.stride > there.queued * there.stride)
