"""Waiting for records that are absent: until all are there, or only for what matters most within a budget of time.

``wait:MS`` closes the step while it sleeps (:meth:`strataflux.client.session.Session.lookup`), because it may be long.
A budget is a few percent of a step: it is spent inside the step, so that what was found before stays valid, and the
daemon's grace is not concerned.

What a budget is spent on is found by its *price*, a score: misses below it are skipped. A step that could not wait for
everything at its price raises it for the next one, a step that had a quarter of its time left lowers it. So the whole
budget goes to the highest scores of all look-ups of a step, though each look-up decides alone. Ours.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block, directory, futex

__all__ = ["Allowance", "count_wait", "sleep_until_filled"]

_FIRST_PRICE: Final = 129
"""A sixteenth: of a token's attention, or of the largest activation."""
_RAISE, _LOWER = 8, 4
"""A half and a quarter of a factor of two."""
_RECENT: Final = 1 / 16
"""Weight of the newest step in the mean time of a step."""
_PATIENCE: Final = 4
"""A wait is given up after so many times what waits take: what was asked for may never come."""


def sleep_until_filled(
    block: attach_block.Block,
    ring_doorbell: Callable[[], object],
    table: int,
    oids: NDArray[np.int64],
    until: int,
    deadline: int,
    *,
    hurry: bool = False,
) -> None:
    """Sleep until nothing of ``oids`` (bounded by the caller) is absent, or until ``until``.

    Args:
        block: of the attachment.
        ring_doorbell: wakes a daemon that sleeps.
        table: table number.
        oids: int64 [n].
        until: when to return at the latest, in nanoseconds of ``time.monotonic_ns``.
        deadline: until when the daemon keeps what it fills for this wait.
        hurry: wake a daemon that naps, too, as it does within steps.
    """
    ticks = max((deadline - time.monotonic_ns()) // 1_000_000, 0) + 1
    if attach_block.announce_wait(block, ticks) or hurry:
        ring_doorbell()
    while True:
        count = attach_block.fills_count(block)
        left = until - time.monotonic_ns()
        if left <= 0 or directory.absent_count(block, table, oids) == 0:
            break
        with contextlib.suppress(OSError):  # a machine without futex(2): the wait ends with look-ups
            futex.wait(attach_block.fills_address(block), count, left)
    attach_block.end_wait(block)


def count_wait(block: attach_block.Block, nanoseconds: int, *, late: bool) -> None:
    """Count a wait, and whether its deadline passed with something absent."""
    block[attach_block.WAITS] += np.uint64(1)
    block[attach_block.WAIT_NANOSECONDS] += np.uint64(nanoseconds)
    block[attach_block.DEADLINES_EXCEEDED] += np.uint64(late)


class Allowance:
    """What a session with the policy ``budget`` may still wait. The stepping thread's.

    Pairs: :meth:`begin_step` / :meth:`end_step`; :meth:`wait` between them.
    """

    def __init__(self, share: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Nothing may be waited for in the first step, since nobody knows how long one takes.

        Args:
            share: of a step's time.
            clock: in nanoseconds (tests).
        """
        # fixed after construction
        self._share = share
        self._clock = clock
        # changed by steps
        self._step_nanoseconds = 0.0
        """Mean time of a step without its waits."""
        self._usual_nanoseconds = 0.0
        """Mean time of waits that were not in vain."""
        self._began = self._spent = 0
        self._refused = False
        self.price = _FIRST_PRICE
        """The lowest score that is waited for, 1…255."""

    @property
    def left(self) -> int:
        """Nanoseconds that this step may still wait."""
        return max(0, int(self._share * self._step_nanoseconds) - self._spent)

    def begin_step(self) -> None:
        """A step begins, with all of its allowance."""
        self._began, self._spent, self._refused = self._clock(), 0, False

    def end_step(self) -> None:
        """A step ends: learn how long it took, and set the price for the next one."""
        took = self._clock() - self._began - self._spent
        if self._step_nanoseconds:
            if self._refused:
                self.price = min(self.price + _RAISE, 255)
                if not self._spent:  # nobody would learn that waits became shorter: one is tried again by and by
                    self._usual_nanoseconds *= 1 - _RECENT
            elif 4 * self.left > self._share * self._step_nanoseconds:
                self.price = max(self.price - _LOWER, 1)
        self._step_nanoseconds = _mean(self._step_nanoseconds, took)

    def wait(
        self,
        block: attach_block.Block,
        ring_doorbell: Callable[[], object],
        table: int,
        oids: NDArray[np.int64],
        scores: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
    ) -> int:
        """Wait for what a look-up missed at or above the price, if that can be afforded; how many came.

        ``addresses`` gets theirs; the others hold on. What did not come in time is asked for, and counted, again.
        """
        chosen = np.flatnonzero((addresses == 0) & (scores >= self.price))
        wanted = oids[chosen]
        if not chosen.size or directory.absent_count(block, table, wanted) == 0:
            return 0
        if self.left == 0 or self.left < self._usual_nanoseconds:
            self._refused = True
            return 0
        started = self._clock()
        most = self.left if not self._usual_nanoseconds else min(self.left, int(_PATIENCE * self._usual_nanoseconds))
        sleep_until_filled(block, ring_doorbell, table, wanted, started + most, started + most, hurry=True)
        found = np.zeros(chosen.size, np.uint64)
        late = directory.absent_count(block, table, wanted) > 0
        present = directory.look_up(block, table, wanted, scores[chosen], found, True)
        addresses[chosen] = found
        self._count(block, self._clock() - started, late=late)
        return present

    def _count(self, block: attach_block.Block, took: int, *, late: bool) -> None:
        self._spent += took
        if not late:
            self._usual_nanoseconds = _mean(self._usual_nanoseconds, took)
        count_wait(block, took, late=late)


def _mean(mean: float, newest: float) -> float:
    return mean + _RECENT * (newest - mean) if mean else newest
