"""The reader's loop: the whole read path on one screen.

One thread, compiled, without the GIL. It returns to Python only when ``commands`` is set (open, attach, drop, stop) or
a quarter of the watchdog's time has passed idle. Everything it calls stands in a few modules: ``requests`` (rings →
queue), ``fills`` (queue → reads → slots), ``ahead`` (what nobody missed), ``cache`` and ``evict`` (slots) and ``grace``
(when a slot may be written again).
"""

from typing import Any

import numpy as np

from strataflux.cache_policy.base import wide
from strataflux.daemon import engines
from strataflux.daemon.ahead import read_ahead
from strataflux.daemon.counting import look
from strataflux.daemon.evict import evict_ahead, shrink_room
from strataflux.daemon.fills import finish_reads, start_fills
from strataflux.daemon.grace import close_batch, fence_stuck, observe_steps, recycle
from strataflux.daemon.prefetch import drop_stale
from strataflux.daemon.puts import puts_waiting, take_puts
from strataflux.daemon.requests import take_requests
from strataflux.daemon.state import Core
from strataflux.daemon.system import futex_wake, monotonic_us
from strataflux.daemon.uses import turn_hand
from strataflux.daemon.words import READER
from strataflux.proto import layout
from strataflux.proto.atomics import (
    fence,
    load_acquire_u64,
    load_u32,
    pause,
    store_release_u32,
    store_u32,
)
from strataflux.proto.compiled import borrowing

__all__ = ["run", "sweep"]

_CLOCK = layout.offset_of(layout.DAEMON_PAGE, "clock")
_SLEEPING = layout.offset_of(layout.DAEMON_PAGE, "sleeping")
_FILLS = layout.offset_of(layout.SESSION_VIEW, "fills")
_AWAITING = layout.offset_of(layout.SESSION_PAGE, "awaiting")
_BEGUN = layout.offset_of(layout.SESSION_PAGE, "step_begun")
_ENDED = layout.offset_of(layout.SESSION_PAGE, "step_ended")
_TAIL = layout.offset_of(layout.SESSION_PAGE, "ring_tail")
_COMMANDS = layout.offset_of(READER, "commands")
_TICK_US = 1000
_SHRINK_TICKS = 16
_SPIN_US = 50
_NAP_US = 200


@borrowing
def run(c: Core, e: Any) -> None:
    """Sweep until Python has something to say (``commands``) or the loop idled once."""
    while load_acquire_u64(c.rd.ctypes.data + _COMMANDS) == 0:
        busy, inside = sweep(c, e)
        if busy:
            c.rd[0].last_work_us = c.rd[0].now_us
        elif inside and c.rd[0].now_us - c.rd[0].last_work_us < _SPIN_US:
            engines.flush(e)
            pause()
        elif _sleep(c, e, inside):
            return


@borrowing
def sweep(c: Core, e: Any) -> tuple[bool, bool]:
    """One turn: (something was done, some session is inside a step)."""
    ticked = _advance_clock(c)
    inside = observe_steps(c)
    if ticked:
        _look_round(c)
    work = finish_reads(c, e)
    work += recycle(c)
    if c.rd[0].intake:
        work += take_requests(c)
        evict_ahead(c)
        work += start_fills(c, e)
        work += read_ahead(c, e)
        work += take_puts(c, e)
    close_batch(c)
    fence_stuck(c)
    if e[0].unflushed:
        engines.flush(e)
    if c.rd[0].filled_now:
        _announce(c)
    return work > 0, inside


@borrowing
def _look_round(c: Core) -> None:
    """What is done once a tick."""
    look(c)
    turn_hand(c)
    if c.rd[0].prefetches:
        drop_stale(c)
    if c.rd[0].clock % _SHRINK_TICKS == 0:
        shrink_room(c)


@borrowing
def _advance_clock(c: Core) -> bool:
    """The clock moves once a sweep and at most once a millisecond; clients stamp with it. Whether it did."""
    rd = c.rd[0]
    rd.turns += 1
    rd.now_us = monotonic_us(c.scratch.ctypes.data)
    if rd.now_us - rd.tick_us < _TICK_US:
        return False
    rd.tick_us = rd.now_us
    rd.clock = (rd.clock + 1) & 0xFFFFFFFF
    if rd.clock == 0:  # 0 means "never" in stamps and pins
        rd.clock = 1
    # SYNC: clock (publish). Relaxed: a stamp that is a tick old is as good.
    store_u32(rd.page + _CLOCK, rd.clock)
    return True


@borrowing
def _announce(c: Core) -> None:
    """Tell sessions that something was filled; wake those that wait for it."""
    c.rd[0].filled_now = 0
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        session = c.sessions[c.stamp_owner[place]]
        # SYNC: fills (publish). Release: the directory entries are visible before the count that says so.
        store_release_u32(session.view_page + _FILLS, load_u32(session.view_page + _FILLS) + np.uint32(1))
    # SYNC: awaiting (read). Full fence: a client that went to sleep on the old count is seen waiting here.
    fence()
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        session = c.sessions[c.stamp_owner[place]]
        if load_u32(session.page + _AWAITING) != 0:
            futex_wake(session.view_page + _FILLS)


@borrowing
def _sleep(c: Core, e: Any, inside: bool) -> bool:
    """Wait for a doorbell, a completion or the time-out; True if the loop was idle through a whole long wait.

    Inside steps and with slots in grace the wait is 200 us. Otherwise ``sleeping`` says that a doorbell is needed;
    whoever published before it could see that is found by the last look.
    """
    rd = c.rd[0]
    waiting_grace = rd.batch_first != rd.batch_last or rd.queued > 0 or rd.prefetches > 0
    if inside or waiting_grace:
        engines.wait(e, _NAP_US, c.scratch.ctypes.data)
        return False
    store_u32(rd.page + _SLEEPING, 1)
    # SYNC: sleeping (publish). Full fence: a client that missed the word has its step or entry seen below.
    fence()
    result = 0
    if not _anything_new(c) and load_acquire_u64(c.rd.ctypes.data + _COMMANDS) == 0:
        rd.sleeps += 1
        result = engines.wait(e, rd.idle_timeout_us, c.scratch.ctypes.data)
    store_u32(rd.page + _SLEEPING, 0)
    return result < 0 and rd.in_flight == 0 and rd.in_flight_writes == 0


@borrowing
def _anything_new(c: Core) -> bool:
    """Some session is inside a step, or published requests or puts that were not taken."""
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        session = c.sessions[c.stamp_owner[place]]
        if session.fenced:
            continue
        # SYNC: step-begun (read).
        if load_u32(session.page + _BEGUN) != load_u32(session.page + _ENDED):
            return True
        tail = wide(load_acquire_u64(session.page + _TAIL))
        if session.head < tail <= session.head + (1 << session.ring_log2):
            return True
    return puts_waiting(c)
