"""A session: steps, look-ups, and what happens when the daemon goes away (it fails open).

States, and what moves a session between them:

    attached       a daemon fills what is missing       → reattaching by hang-up, a fence, or the daemon's wish
    reattaching    what is resident stays usable, nothing is filled; after a fence all misses
                                                        → attached between two steps
    detached       closed, or in a forked child: for good

The connection is watched by a thread of its own (:mod:`strataflux.client.keeper`), so that a step makes no system call
to learn whether the daemon lives. It prepares changes of what is mapped; they happen between two steps, because
addresses found in a step hold to its end. Within a step nothing raises for the daemon's sake.

Threads: steps and look-ups belong to one thread at a time; ``stats`` and ``state`` may be asked from any; ``on_event``
is called from the keeper's thread.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.miss import Budget, MissPolicy, Skip, Wait
from strataflux.client import attach_block, directory, forks
from strataflux.client.attach import Attachment, AttachRequest
from strataflux.client.errors import MisuseError
from strataflux.client.keeper import Event, Keeper, attach_patiently
from strataflux.client.kv_puts import KvPuts
from strataflux.client.prefetches import Prefetches
from strataflux.client.session_stats import SessionStats, counts_of, make_stats
from strataflux.client.step import Step
from strataflux.client.waiting import Allowance, count_wait, sleep_until_filled
from strataflux.client.warm_up import compile_path
from strataflux.proto import layout
from strataflux.proto.messages import KvGeometry, Message, StoreRef
from strataflux.proto.runtime import ATTACH_SOCKET, runtime_folder
from strataflux.proto.store_format import StoreManifest

__all__ = [
    "ATTACHED",
    "DETACHED",
    "REATTACHING",
    "Session",
]

_NAP_NANOSECONDS: Final = 50_000_000
"""A wait looks up at least this often whether anybody is still filling, and asks again for what is missing."""

_Ids = NDArray[np.int64]
_Scores = NDArray[np.uint8]
_Addresses = NDArray[np.uint64]

ATTACHED: Final = "attached"
DETACHED: Final = "detached"
REATTACHING: Final = "reattaching"


class Session:
    """Pairs: :meth:`attach` / :meth:`close`; :meth:`step` / ``Step.end``, or ``with`` for either; :meth:`ask` /
    :meth:`collect`, which :meth:`lookup` does in one.
    """

    def __init__(
        self,
        request: AttachRequest,
        miss: MissPolicy,
        on_event: Callable[[Event], None] | None,
        pause: Callable[[float], object] | None,
    ) -> None:
        """Use :meth:`attach`."""
        compile_path()
        # fixed after construction
        self._deadline_seconds = miss.deadline_seconds if isinstance(miss, Wait) else 0.0
        # guarded by _lock
        self._lock = threading.Lock()
        self._attachment = attach_patiently(request, pause or time.sleep)
        self._queued: list[Callable[[], None]] = []
        self._totals = np.zeros(len(layout.COUNTERS) + 1, np.uint64)
        self._state = ATTACHED
        # the stepping thread; changed under _lock
        self._inside = False
        # the stepping thread
        self._block = self._attachment.block
        self._valid = True
        self._allowance = Allowance(miss.share) if isinstance(miss, Budget) else None
        self._prefetches = Prefetches()
        self.kv = KvPuts.of(request, self._lock, lambda: self._attachment)
        """Block ids and puts; None without KV."""
        self._keeper = Keeper(request, self._attachment, self, on_event, pause)
        self._keeper.start()
        forks.watch(self)

    @classmethod
    def attach(
        cls,
        stores: Sequence[StoreManifest | StoreRef],
        *,
        selections_per_step: int,
        largest_set_bytes: int = 0,
        runtime_dir: Path | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
        on_event: Callable[[Event], None] | None = None,
        pause: Callable[[float], object] | None = None,
        client: str = "strataflux",
        kv: KvGeometry | None = None,
    ) -> "Session":
        """Attach to the daemon.

        Args:
            stores: what to read; the first is table 0.
            selections_per_step: most look-ups of one step; sizes the request ring.
            largest_set_bytes: slot bytes that one look-up selects at most, 0 for sessions that never wait; the daemon
                refuses what its cache cannot hold.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            miss: what :meth:`lookup` does about absent records.
            on_event: told about what happens to the session, from another thread; what it raises is logged.
            pause: waits so many seconds between attempts to attach again (tests).
            client: name in the daemon's listings.
            kv: KV blocks, whose records become the table after the stores; None for none.

        Raises:
            DaemonUnavailableError: nobody answers, or whoever does is not trusted.
            BusyError: others had all its places for KV, and so for 3 s.
            RefusedError: the daemon said no; its numbers are in the message.
            ContractError: it sent what this layout version does not allow.
        """
        path = runtime_folder(runtime_dir, os.environ) / ATTACH_SOCKET
        request = AttachRequest(path, tuple(stores), selections_per_step, largest_set_bytes, client, kv)
        return cls(request, miss, on_event, pause)

    def step(self) -> Step:
        """A step to enter with ``with``.

        Raises:
            MisuseError: on entering: another step is open, or the session is closed or belongs to another process.
        """
        return Step(self._begin, self._end)

    def lookup(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses) -> int:
        """Find records, by the session's miss policy; inside a step only.

        Args:
            table: number of the store in ``stores``.
            oids: int64 [n] record numbers.
            scores: u8 [n], how much each matters (0 = unknown).
            addresses: u64 [n], filled with where each record lies in this process, 0 where it is absent. They hold
                until the step's end; under ``Wait`` only until the next call.

        Returns:
            How many are present.

        Raises:
            MisuseError: outside a step, a table or record that is not there, arrays of different lengths.
        """
        hits = self._look_up(table, oids, scores, addresses, again=False)
        return self._obey(table, oids, scores, addresses, hits)

    def lookup_waiting(
        self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses, deadline_seconds: float
    ) -> int:
        """As :meth:`lookup`, but wait for what is absent until a deadline.

        Waiting closes the step and opens another: addresses of earlier calls are void. A record that was waited for is
        counted as the miss it was. Nobody waits for a daemon that is gone or stopping.
        """
        hits = self._look_up(table, oids, scores, addresses, again=False)
        return self._wait(table, oids, scores, addresses, hits, deadline_seconds)

    def ask(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses) -> int:
        """The first half of a :meth:`lookup`: how many are present now; the others are asked for, and never waited for
        here. The second is :meth:`collect`, in the same step. ``addresses`` is scratch.
        """
        hits = self._look_up(table, oids, scores, addresses, again=False)
        if hits < oids.size:  # within steps the daemon naps for longer than a read may take
            self._attachment.ring_doorbell()
        return hits

    def collect(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses) -> int:
        """The second half: as :meth:`lookup` of what :meth:`ask` was given, with all that came meanwhile. What was not
        there when it was asked for stays counted as a miss; what is absent still is asked for, and counted, again.
        """
        present = self._look_up(table, oids, scores, addresses, again=True)
        return self._obey(table, oids, scores, addresses, present)

    def prefetch(self, table: int, oids: _Ids, scores: _Scores, most: int) -> int:
        """Ask for records that will probably be looked up soon; inside a step only. The daemon serves misses first.

        Args:
            table: number of the store in ``stores``.
            oids: int64 [n] record numbers, those that matter most first.
            scores: u8 [n], how much each is likely to matter (0 = unknown).
            most: how many may be asked for; those that are there already do not count.

        Returns:
            How many were asked for.

        Raises:
            MisuseError: as :meth:`lookup`.
        """
        self._require_step()
        asked = self._prefetches.ask(self._block, table, oids, scores, most)
        if directory.checked(asked, self._block, table, oids):  # as above
            self._attachment.ring_doorbell()
        return asked

    def present(self, table: int, oids: _Ids, addresses: _Addresses) -> int:
        """As :meth:`lookup`, but ask for nothing, and keep nothing any longer for it. These are no look-ups."""
        self._require_step()
        return directory.checked(directory.find_present(self._block, table, oids, addresses), self._block, table, oids)

    def renew(self) -> None:
        """Let go, within a long step, of what was found: addresses are void, slots that were evicted meanwhile are
        free again. To whoever counts steps it stays one; whether all of it was valid, ``Step.end`` says.

        Raises:
            MisuseError: outside a step.
        """
        self._require_step()
        self._pause(lambda: None)

    def absent(self, table: int, oids: NDArray[np.int64]) -> int:
        """How many of ``oids`` (bounded by the caller) are absent but may come; between steps, too. To measure."""
        return directory.absent_count(self._block, table, oids)

    @property
    def state(self) -> str:
        """``attached``, ``reattaching`` or ``detached``."""
        return self._state

    def stats(self) -> SessionStats:
        """Counts and state now."""
        with self._lock:
            counts = self._totals + counts_of(self._attachment.block)
            return make_stats(counts, self._state, self._attachment.welcome, self._prefetches)

    def close(self) -> None:
        """Leave the daemon and drop all maps. Idempotent.

        Raises:
            MisuseError: inside a step.
        """
        if self._inside:
            raise MisuseError("close", "a step that is open", "none", "end the step first")
        self._keeper.stop()
        with self._lock:
            self._run_queued()
            self._state = DETACHED
            self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the stepping thread -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        with self._lock:
            if self._inside or self._state == DETACHED:
                raise self._no_step()
            self._inside = True
        self._valid = True
        self._open_step()
        if self._allowance is not None:
            self._allowance.begin_step()

    def _no_step(self) -> MisuseError:
        if self._inside:
            return MisuseError("step", "one open already", "one at a time", "end it before the next")
        return MisuseError("step", "a session that is closed or of another process", "an open one", "attach anew")

    def _open_step(self) -> None:
        self._block = self._attachment.block
        if attach_block.begin_step(self._block):
            self._attachment.ring_doorbell()

    def _close_step(self) -> None:
        if not attach_block.end_step(self._block):
            self._valid = False
            self._block[attach_block.STEPS_INVALID] += np.uint64(1)
            self._attachment.hang_up()  # the keeper sees it and attaches anew

    def _end(self) -> bool:
        if not self._inside:  # closed in a forked child
            return False
        if self._allowance is not None:
            self._allowance.end_step()
        self._close_step()
        with self._lock:
            self._prefetches.observe(self._block)
            self._inside = False
            self._run_queued()
        return self._valid

    def _look_up(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses, *, again: bool) -> int:
        self._require_step()
        hits = directory.look_up(self._block, table, oids, scores, addresses, again)
        return directory.checked(hits, self._block, table, oids)

    def _require_step(self) -> None:
        if not self._inside:
            raise MisuseError("look-up", "no open step", "one", "look up within `with session.step()`")

    def _obey(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses, hits: int) -> int:
        """Do about what is absent what the miss policy says; how many are present then."""
        if self._allowance is None:
            return self._wait(table, oids, scores, addresses, hits, self._deadline_seconds)
        if hits < oids.size and self._filling():
            doorbell = self._attachment.ring_doorbell
            hits += self._allowance.wait(self._block, doorbell, table, oids, scores, addresses)
        return hits

    def _wait(self, table: int, oids: _Ids, scores: _Scores, addresses: _Addresses, hits: int, seconds: float) -> int:
        started = time.monotonic_ns()
        deadline = started + int(seconds * 1e9)
        waited = late = False
        while seconds and hits < oids.size and not late and self._filling():
            # Asked before the look-up: what comes between the two is found by it, and the rest never comes.
            complete = directory.absent_count(self._block, table, oids) == 0
            if not complete:
                until = min(deadline, time.monotonic_ns() + _NAP_NANOSECONDS)
                ring = self._attachment.ring_doorbell
                self._pause(partial(sleep_until_filled, self._block, ring, table, oids, until, deadline))
                waited, late = True, time.monotonic_ns() >= deadline
            hits = self._look_up(table, oids, scores, addresses, again=True)
            if complete:
                break
        if waited:
            count_wait(self._block, time.monotonic_ns() - started, late=late and hits < oids.size)
        return hits

    def _filling(self) -> bool:
        """Somebody fills what is absent."""
        return self._attachment.filling and bool(self._block[attach_block.ENABLED])

    def _pause(self, meanwhile: Callable[[], None]) -> None:
        """End the step, do something, and begin another."""
        self._close_step()
        meanwhile()
        with self._lock:
            self._run_queued()
        attach_block.announce_renewal(self._attachment.block)
        self._open_step()

    def _run_queued(self) -> None:
        while self._queued:
            self._queued.pop(0)()

    # --- the keeper's thread -----------------------------------------------------------------------------------------

    def lost(self) -> None:
        """Nothing is filled any more (:class:`~strataflux.client.keeper.Keeper` calls this)."""
        with self._lock:
            self._state = REATTACHING
        if self.kv is not None:
            self.kv.lost()

    def answered(self, message: Message) -> bool:
        """Take an answer to a question about KV blocks (the keeper calls this)."""
        return self.kv is not None and self.kv.answered(message)

    def replace(self, attachment: Attachment) -> None:
        """Go on with ``attachment``, from the next step on (the keeper calls this)."""
        self.between_steps(lambda: self._change_over(attachment))

    def between_steps(self, change: Callable[[], None]) -> None:
        """Run ``change``, which may not raise, now if no step is open, else at its end (the keeper calls this)."""
        with self._lock:
            if self._inside:
                self._queued.append(change)
            else:
                change()

    def _change_over(self, attachment: Attachment) -> None:
        old, self._attachment = self._attachment, attachment
        self._totals += counts_of(old.block)
        self._prefetches.change_over()
        self._state = REATTACHING if attachment.ended else ATTACHED  # it may be over before this step was
        old.close()
        if self.kv is not None:
            self.kv.replaced()

    def forget_in_child(self) -> None:
        """The maps do not exist here (MADV_DONTFORK), the connection is the parent's."""
        self._lock = threading.Lock()
        self._state = DETACHED
        self._inside = False
        self._queued.clear()
        self._attachment.close()
        self._keeper.forget_in_child()
