"""The reader thread: builds the tier, runs the compiled loop, does what other threads ask between two runs of it."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from strataflux.daemon import engines, grants, heat, integrity, reader
from strataflux.daemon.config import TenantConfig
from strataflux.daemon.engines.board import Board
from strataflux.daemon.engines.uring import UringEngine
from strataflux.daemon.errors import ReaderFailed, Refusal, start_error
from strataflux.daemon.folding import CounterFold, read_stats
from strataflux.daemon.generation import compile_changes, remove_store, replace_generation
from strataflux.daemon.holdings import OpenSession
from strataflux.daemon.interface import AddedSegment, HotRecords, SessionRequest
from strataflux.daemon.parole import Parole
from strataflux.daemon.reader_settings import EngineFactory, ReaderSettings, make_engine
from strataflux.daemon.segments import SegmentPool
from strataflux.daemon.state import Core
from strataflux.daemon.stats import Stats
from strataflux.daemon.store import Store
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from strataflux.proto.errors import SegmentError

__all__ = ["ReaderThread"]

T = TypeVar("T")

_DRAIN_WAIT_US = 10_000  # for one completion; the loop goes on until there are none to come


class ReaderThread:
    """Owns the cache, the directories and the sessions of one daemon.

    Pairs: ``start`` / ``stop``; ``open_session`` / ``close_session``. Every method may be called from any thread.
    """

    def __init__(
        self, settings: ReaderSettings, stores: Sequence[Store], engine_factory: EngineFactory = make_engine
    ) -> None:
        # fixed after construction
        self.settings = settings
        self.stores = list(stores)
        self._engine_factory = engine_factory
        self._thread = threading.Thread(target=self._main, name="strataflux-reader", daemon=True)
        self._started: Future[None] = Future()
        # fixed after start
        self._tier: Tier
        self._pool: SegmentPool
        self._parole: Parole
        self._engine: UringEngine | Board
        # guarded by _door_lock: whoever puts a command in may ring, for the doorbell is there until _closed
        self._door_lock = threading.Lock()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        # guarded by _fold_lock
        self._fold_lock = threading.Lock()
        self._fold = CounterFold()
        # reader thread only
        self._stopping = False

    def start(self) -> None:
        """Allocate the cache, start the thread; returns when its loop runs.

        Raises:
            SegmentError: no memory for the budgets. EngineUnavailable: no such engine here. ReaderFailed: else.
        """
        settings = self.settings
        depth, grace = settings.queue_depth, settings.grace_seconds
        self._tier = Tier(self.stores, settings.weight_bytes, depth, grace, settings.kv, settings.policy)
        self._pool = SegmentPool(self._tier)
        compile_changes(self._tier.core)
        heat.compile_heat(self._tier.core)
        self._parole = Parole(self._tier, settings.quarantine_seconds, time.monotonic)
        self._tier.core.rd[0]["idle_timeout_us"] = int(settings.idle_seconds * 1e6)
        self._tier.tenants.apply(settings.tenants)
        self._thread.start()
        self._started.result()

    @property
    def core(self) -> Core:
        """The reader's state, for actions that :meth:`execute` runs."""
        return self._tier.core

    @property
    def generation(self) -> int:
        """Random number of this run of the daemon."""
        return self._tier.generation

    @property
    def engine(self) -> str:
        """The engine that runs."""
        return "uring" if isinstance(self._engine, UringEngine) else self._engine.name

    @property
    def policy(self) -> str:
        """The cache's replacement policy."""
        return self.settings.policy

    @property
    def direct_io(self) -> str:
        """How the files of stores and sessions are read in fact."""
        tables = self._tier.core.tables
        modes = {bool(row["direct"]) for row in tables[tables["active"] == 1]}
        return "mixed" if len(modes) == 2 else "direct" if modes == {True} else "buffered"

    @property
    def registered_buffers(self) -> bool:
        """Reads land in a registered bounce pool (memlock was large enough)."""
        return isinstance(self._engine, UringEngine) and self._engine.registered

    @property
    def setup_flags(self) -> tuple[str, ...]:
        """Optional io_uring set-up flags that this kernel took."""
        return tuple(self._engine.flags) if isinstance(self._engine, UringEngine) else ()

    def open_session(self, request: SessionRequest) -> OpenSession:
        """Enter a session; it is in the reader's table before this returns.

        Raises:
            Refusal: the table is full, or there is no memory for it.
        """

        def enter() -> OpenSession:
            if not (self._tier.core.sessions["active"] == 0).any():
                most, remedy = layout.MAX_SESSIONS, "close a client that is done"
                raise Refusal("limit", "sessions", f"{most} attached", f"fewer than {most}", remedy)
            try:
                return self._tier.open_session(request)
            except SegmentError as error:
                raise Refusal("limit", error.subject, error.found, error.expected, error.remedy) from error

        return self.execute(enter)

    def close_session(self, index: int) -> None:
        """Take a session out and fold its last counters in. Unknown indices are ignored (it may be closed already)."""

        def leave() -> None:
            # As one for whoever takes statistics: a session counted after its last count would be counted twice.
            with self._fold_lock:
                if index in self._tier.rows:
                    self._fold.close(self._tier, index)
                    self._tier.close_session(index)

        self.execute(leave)

    def grant_blocks(self, index: int, count: int) -> list[list[int]]:
        """KV block ids for a session, as [first, count] ranges.

        Raises:
            Refusal: it has no KV, or not as many ids, as much disk or as much of its tenant's quota is left.
        """
        return grants.grant(self.execute, self._tier, index, count)

    def release_blocks(self, index: int, ranges: list[list[int]]) -> Callable[[], bool]:
        """Begin to take KV blocks back. The answer says whether no step, read or write holds them any more; it is to be
        asked, from any thread, until it says so.

        Raises:
            Refusal: it has no KV, or the ranges are not granted blocks. The answer: the session has ended.
        """
        return grants.release(self.execute, self._tier, index, ranges)

    def set_tenants(self, tenants: Sequence[TenantConfig]) -> None:
        """These are the tenants from now on; sessions of others belong to everybody else."""
        self.execute(lambda: self._tier.tenants.apply(tenants))

    def snapshot(self) -> Stats:
        """All numbers now; the loop is not stopped for it."""
        with self._fold_lock:
            self._fold.fold(self._tier)
            return read_stats(self._tier, self._fold)

    def begin_release(self) -> int | None:
        """Start to give one cache segment back: its first slot, None where no more can go."""
        return self.execute(self._pool.begin)

    def release_settled(self, first_slot: int) -> bool:
        """No slot of it is in use or within its grace."""
        return self.execute(lambda: self._pool.settled(first_slot))

    def finish_release(self, first_slot: int) -> int:
        """Drop its memory, which nobody maps any more; its bytes."""
        return self.execute(lambda: self._pool.finish(first_slot))

    def grow(self) -> AddedSegment | None:
        """Take the segment that was released last again.

        Raises:
            SegmentError: no memory for it.
        """
        return self.execute(self._pool.grow)

    def missing_bytes(self) -> int:
        """How far the cache is below its budget."""
        return self.execute(self._pool.missing_bytes)

    def review_quarantine(self) -> int:
        """Let records go that were quarantined for long enough; how many."""
        return self.execute(self._parole.review)

    def add_store(self, fresh: Store) -> int:
        """Serve one more store, which is taken over; its index.

        Raises:
            Refusal: it does not fit what was set up at the start. SegmentError: no memory. It is closed then.
        """
        return self.execute(lambda: self._tier.add_store(fresh))

    def remove_store(self, index: int) -> None:
        """Serve a store no more; its sessions must have ended.

        Raises:
            Refusal: a session uses it; nothing was changed.
        """

        def remove() -> None:
            remove_store(self._tier, index, self._settle)
            self._parole.forget(index)

        self.execute(remove)

    def replace_store(self, index: int, fresh: Store) -> None:
        """Serve another generation of a store, which is taken over; its sessions have to attach again.

        Raises:
            Refusal: it is another store, or does not fit; nothing was changed.
        """

        def replace() -> None:
            replace_generation(self._tier, index, fresh, self._settle)
            self._parole.forget(index)

        self.execute(replace)

    def hot_records(self) -> list[HotRecords]:
        """What is resident of each store, the most recently used first, and what :meth:`warm` has not read yet."""
        return heat.collect(self._tier, self.execute)

    def warm(self, hot: Sequence[HotRecords]) -> int:
        """Read records of the served stores when nothing else is to be done; how many."""
        return self.execute(lambda: heat.keep_warm(self._tier, list(hot)))

    def _settle(self) -> None:
        """Turn the loop, taking no requests, until no read is in flight. Reader thread."""
        core, state = self._tier.core, self._engine.state
        intake, core.rd[0]["intake"] = int(core.rd[0]["intake"]), 0
        while core.rd[0]["in_flight"]:
            engines.wait(state, _DRAIN_WAIT_US, core.scratch.ctypes.data)
            reader.sweep(core, state)
        core.rd[0]["intake"] = intake

    def echo(self) -> None:
        """Return once the loop took note of this call.

        Raises:
            ReaderFailed: the thread is not running.
        """
        self.execute(lambda: None)

    def progress(self) -> tuple[int, bool]:
        """(completions while reads are in flight, else loop turns; whether reads are in flight)."""
        rd = self._tier.core.rd[0]
        in_flight = bool(rd["in_flight"])
        return int(rd["completions"] if in_flight else rd["turns"]), in_flight

    def begin_drain(self) -> None:
        """Take no more requests; what is in flight ends."""
        self._tier.core.rd[0]["intake"] = 0

    def check_integrity(self) -> None:
        """Assert every invariant of the cache; walks all of it, so for idle times and tests.

        Raises:
            ReaderFailed: one is broken; the code is :func:`strataflux.daemon.integrity.check_integrity`'s.
        """
        code = self.execute(lambda: integrity.check_integrity(self._tier.core))
        if code:
            raise ReaderFailed("cache integrity", f"code {code}", "0", "report this: it is a bug in strataflux")

    def stop(self) -> None:
        """Stop intake, reap everything in flight, join, unmap. Idempotent."""
        if not self._thread.is_alive():
            return
        self.begin_drain()
        self.execute(self._leave)
        self._thread.join()

    def _leave(self) -> None:
        self._stopping = True

    def execute(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the reader thread between two turns of the loop and return what it returns.

        Raises:
            ReaderFailed: the thread is not running. Whatever ``action`` raises.
        """
        if not self._thread.is_alive():
            raise ReaderFailed("reader thread", "not running", "running", "restart the daemon")
        future: Future[T] = Future()
        with self._door_lock:
            self._commands.append((action, future))
            if not self._closed:
                self._tier.core.rd[0]["commands"] = 1
                os.eventfd_write(self._tier.doorbell, 1)
        if self._closed:  # nobody else will answer
            self._fail_commands()
        return future.result()

    def _main(self) -> None:
        try:
            self._engine = self._engine_factory(self._tier, self.settings)
        except Exception as error:
            self._closed = True
            self._tier.close()
            self._started.set_exception(start_error(error))
            return
        try:
            self._live()
            self._close_door()
            self._engine.close()
            with self._fold_lock:
                self._tier.close()
        except Exception as error:
            if self._started.done():
                raise
            self._engine.close()
            self._tier.close()
            self._started.set_exception(start_error(error))
        finally:
            self._close_door()
            self._fail_commands()

    def _close_door(self) -> None:
        with self._door_lock:
            self._closed = True

    def _live(self) -> None:
        core, state = self._tier.core, self._engine.state
        # A first run that returns at once: machine code is made or loaded before anybody is told "started".
        core.rd[0]["commands"] = 1
        reader.run(core, state)
        self._started.set_result(None)
        self._run_commands()
        while not self._stopping:
            if self._tier.closing:  # a few turns until nothing holds what a session left
                engines.wait(state, _DRAIN_WAIT_US, core.scratch.ctypes.data)
                reader.sweep(core, state)
                self._tier.settle()
            else:
                reader.run(core, state)
            self._run_commands()
        while core.rd[0]["in_flight"] or core.rd[0]["in_flight_writes"]:
            engines.wait(state, _DRAIN_WAIT_US, core.scratch.ctypes.data)
            reader.sweep(core, state)

    def _run_commands(self) -> None:
        # Cleared first: a command that comes now sets it again and is seen in the next turn at the latest.
        self._tier.core.rd[0]["commands"] = 0
        while self._commands:
            action, future = self._commands.popleft()
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    def _fail_commands(self) -> None:
        while self._commands:
            _, future = self._commands.popleft()
            future.set_exception(ReaderFailed("reader thread", "stopping", "running", "attach to the next daemon"))
