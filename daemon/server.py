"""The service's life: ``startup``, ``serve`` with its ``on_tick``, ``drain``, ``close``, in this order.

The first signal (or a Drain call) ends ``serve`` and drains; the second ends the drain. SIGHUP reloads: see
:meth:`Server.reload`. Whatever was started is closed in the opposite order, also when the start failed half-way. Only
``__main__`` exits.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from strataflux import __version__
from strataflux.daemon.admission import Admission
from strataflux.daemon.attach import AttachServer
from strataflux.daemon.catalog import Catalog
from strataflux.daemon.config import Config
from strataflux.daemon.errors import DaemonError
from strataflux.daemon.health import Health, ProgressWatch
from strataflux.daemon.interface import Reader, ServedStore
from strataflux.daemon.logs import configure_logging
from strataflux.daemon.memory import available_memory, require_memory
from strataflux.daemon.memory_keeper import MemoryKeeper
from strataflux.daemon.notify import Notifier, activated_sockets, watchdog_seconds
from strataflux.daemon.pressure import MemoryState, Watermarks, memory_state
from strataflux.daemon.probe import Prober
from strataflux.daemon.quotas import Quotas
from strataflux.daemon.reload import Reloads, merge, require_something
from strataflux.daemon.runtime_dir import RuntimeFolder
from strataflux.daemon.scrub import Scrubber
from strataflux.daemon.served import accesses_of
from strataflux.daemon.store_folder import StoreFolder
from strataflux.daemon.warm_keeper import WarmKeeper, hot_set_path
from strataflux.proto.errors import ContractError
from strataflux.proto.runtime import ATTACH_SOCKET, CONTROL_SOCKET, runtime_folder

if TYPE_CHECKING:
    from strataflux.daemon.control import ControlPlane
    from strataflux.daemon.front import ControlFront
    from strataflux.daemon.moment import Moment

__all__ = ["Server"]

_LOG: Final = logging.getLogger(__name__)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_TICK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01
_STALLED_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 1.0


S = TypeVar("S", bound=ServedStore)


class Server(Generic[S]):
    """One daemon. ``run`` is its whole life; nothing of it is used twice."""

    def __init__(
        self,
        config: Config,
        environment: MutableMapping[str, str],
        open_stores: Callable[[Config], Sequence[S]],
        make_reader: Callable[[Config, Sequence[S], float], Reader],
        look_at_memory: Callable[[], MemoryState] = memory_state,
        read_config: Callable[[], Config] | None = None,
    ) -> None:
        # fixed after construction
        self._environment = environment
        self._catalog = Catalog(open_stores, _imports(config, environment))
        self._make_reader = make_reader
        self._look_at_memory = look_at_memory
        self._read_config = read_config or (lambda: config)
        self._notifier = Notifier(environment)
        self._watchdog = watchdog_seconds(environment, os.getpid())
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._watch = ProgressWatch(time.monotonic)
        self._stack = AsyncExitStack()
        # fixed after startup
        self._reader: Reader
        self._prober: Prober
        self._attach: AttachServer
        self._memory: MemoryKeeper
        self._warm: WarmKeeper
        self._scrubber: Scrubber
        self._front: ControlFront
        self.metrics_port: int | None = None
        # event loop only
        self.config = config
        self._reloads = Reloads()
        self._reloading: asyncio.Task[None] | None = None
        self._reviewing: asyncio.Task[None] | None = None
        self._control: ControlPlane | None = None
        self.health = Health(self._on_health)
        self._health_shown: asyncio.Task[None] | None = None
        self._status = ""

    async def run(self) -> None:
        """Start, serve until told to stop, drain, close.

        Raises:
            DaemonError, ContractError: at the start, by cause; everything that was started is closed by then.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.begin_drain, number.name)
        loop.add_signal_handler(signal.SIGHUP, self.begin_reload)
        try:
            await self.startup()
            await self.serve()
            await self.drain()
        finally:
            await self.close()
            for number in (*_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def begin_drain(self, reason: str = "a call to Drain") -> bool:
        """End ``serve``; called again, end ``drain``. Whether this call was the first."""
        first = not self._stop.is_set()
        _LOG.info("stopping: %s" if first else "stopping at once: %s", reason)
        (self._stop if first else self._force).set()
        return first

    def begin_reload(self) -> None:
        """Reload, unless that is going on or the service is stopping."""
        idle = self._reloading is None or self._reloading.done()
        if idle and self.health.phase == "ready" and not self._stop.is_set():
            self._reloading = asyncio.get_running_loop().create_task(self.reload())

    async def reload(self) -> None:
        """Read the configuration again, and follow it: settings, stores that come and go, newer generations of those
        that stay. A bad file, or one that names a store that cannot be served, leaves what is in force as it is.
        """
        self._notifier.send(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
        try:
            wanted = await asyncio.to_thread(self._read_config)
            require_something(wanted, self._catalog.folder)
            await self._catalog.add_all(wanted.stores)
            self.config, later = merge(self.config, wanted)
            await self._apply()
            later += await self._catalog.follow(wanted.stores)
        except (DaemonError, ContractError, OSError) as error:
            self._reloads.failed()
            _LOG.error("reload: %s", error)
            self.health.set_reason("config", f"the last reload failed: {error}")
        else:
            self._reloads.succeeded()
            self.health.set_reason("config", None)
            _LOG.info("reloaded%s", f"; after a restart only: {', '.join(later)}" if later else "")
        self._notifier.send(READY="1", STATUS=self._describe())

    async def _apply(self) -> None:
        configure_logging(self.config.log)
        await asyncio.to_thread(self._reader.set_tenants, self.config.tenants)
        self._admit()
        self._memory.watermarks = Watermarks(self.config.memory, time.monotonic)
        self._prober.limit_seconds = self.config.health.limit_seconds
        self._prober.interval_seconds = self.config.health.interval_seconds
        self._scrubber.bytes_per_day = self.config.scrub.bytes_per_day

    def _admit(self) -> None:
        self._attach.admission = self._admission()

    def _admission(self) -> Admission:
        config, served = self.config, self._catalog.served
        stores = {index: entry.store for index, entry in served.items()}
        quotas = Quotas(config.tenants)
        return Admission(stores, accesses_of(served), config.attach, config.cache.weight_bytes, quotas)

    async def startup(self) -> None:
        """From nothing to READY: preflight, lock, stores, reader, attach, control, metrics."""
        config = self.config
        require_something(config, self._catalog.folder)
        require_memory(config.cache.weight_bytes, config.cache.kv_bytes, available_memory())
        activated = activated_sockets(self._environment, os.getpid())
        for listener in activated.values():
            self._stack.callback(listener.close)
        folder = RuntimeFolder.open(runtime_folder(config.runtime_dir, self._environment))
        self._stack.callback(folder.close)
        await self._start_reader()
        attach_listener = activated.get(ATTACH_SOCKET) or folder.bind(ATTACH_SOCKET, socket.SOCK_SEQPACKET)
        self._attach = AttachServer(attach_listener, self._reader, self._admission())
        self._stack.push_async_callback(self._attach.close)
        self._catalog.begin(self._reader, self._attach, lambda: self.config, self._admit)
        self._attach.start()
        watermarks = Watermarks(config.memory, time.monotonic)
        self._memory = MemoryKeeper(self._reader, self._attach.notices, watermarks, self._look_at_memory)
        self._stack.push_async_callback(self._memory.close)
        await self._start_control(
            folder, activated.get(CONTROL_SOCKET) or folder.bind(CONTROL_SOCKET, socket.SOCK_STREAM)
        )
        self._start_metrics()
        await self._start_probing()
        self._scrubber = Scrubber(lambda: [s.manifest.folder for s in self._open()], config.scrub.bytes_per_day)
        self._stack.push_async_callback(asyncio.to_thread, self._scrubber.stop)
        self._scrubber.start()
        self.health.move_to("ready")
        self._notifier.send(READY="1", STATUS=self._describe())
        _LOG.info("ready in %s: %s", folder.path, self._describe())

    async def serve(self) -> None:
        """Tick until told to stop. Everything else happens in callbacks, and in the reader's thread."""
        seconds = min(_TICK_SECONDS, self._watchdog / 4 if self._watchdog else _TICK_SECONDS)
        while not self._stop.is_set():
            self.on_tick()
            try:
                await asyncio.wait_for(self._stop.wait(), seconds)
            except TimeoutError:
                continue

    def on_tick(self) -> None:
        """Tell the service manager that the data path moves, if it does, and look whether the service is degraded."""
        count, _ = self._reader.progress()
        if self._watch.moved(count) and self._watchdog is not None:
            self._notifier.send(WATCHDOG="1")
        stalled = self._watch.age_seconds > max(_STALLED_SECONDS, 2 * (self._watchdog or 0))
        self.health.set_reason("stalled", "the data path does not move" if stalled else None)
        wanted_direct = self.config.reader.direct_io != "off" and bool(self._catalog.served)
        buffered = wanted_direct and self._reader.direct_io != "direct"
        self.health.set_reason("buffered", "a store's file system refuses direct reads" if buffered else None)
        self.health.set_obstacle("probe", self._prober.obstacle())
        self._memory.on_tick()
        self._warm.on_tick()
        damaged = self._damaged()
        self.health.set_reason("scrub", f"{damaged} damaged records were found on disk" if damaged else None)
        absent = ", ".join(sorted(self._catalog.absent))
        self.health.set_reason("stores", f"added, and cannot be served: {absent}" if absent else None)
        self._review_quarantine()
        missing = self._memory.missing_bytes
        self.health.set_reason("memory", f"{missing >> 20} MiB of cache are given back" if missing else None)
        if (status := self._describe()) != self._status:
            self._status = status
            self._notifier.send(STATUS=status)

    def _review_quarantine(self) -> None:
        if self._reviewing is None or self._reviewing.done():
            self._reviewing = asyncio.get_running_loop().create_task(self._review())

    async def _review(self) -> None:
        if any(row.quarantined for row in self._reader.snapshot().stores):
            with contextlib.suppress(DaemonError):
                await asyncio.to_thread(self._reader.review_quarantine)

    async def drain(self) -> None:
        """Take nothing new and let what is in flight end, for a bounded time."""
        self.health.move_to("draining")
        self._notifier.send(STOPPING="1", STATUS="draining")
        self._attach.stop_intake()
        self._reader.begin_drain()
        await self._warm.finish()  # while sessions are there, whose stamps say what was used last
        until = time.monotonic() + self.config.life.drain_seconds
        while self._reader.progress()[1] and time.monotonic() < until and not self._force.is_set():
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """End what was started, last first. Idempotent."""
        for task in (self._reloading, self._reviewing):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)
        await self._stack.aclose()
        if self._health_shown is not None:
            await self._health_shown

    async def _start_reader(self) -> None:
        # In a worker thread, all of it: it reads files and may compile, and signals are heard meanwhile.
        stores = await asyncio.to_thread(self._catalog.open_all, self.config)
        if not stores:
            _LOG.warning("no store is served so far: sessions can keep KV, and nothing else")
        idle_seconds = self._watchdog / 4 if self._watchdog else _IDLE_SECONDS
        self._reader = self._make_reader(self.config, stores, idle_seconds)
        self._stack.push_async_callback(asyncio.to_thread, self._reader.stop)
        _LOG.info("starting the reader; its first start with a version compiles, which takes a minute or more")
        await asyncio.to_thread(self._reader.start)
        self._warm = WarmKeeper(self._reader, hot_set_path(self.config, self._environment))
        self._stack.push_async_callback(self._warm.close)
        await self._warm.load()

    async def _start_control(self, folder: RuntimeFolder, listener: socket.socket) -> None:
        # Imported here: gRPC takes a quarter of a second, which a start that is refused need not pay.
        from strataflux.daemon.control import ControlPlane, Service
        from strataflux.daemon.front import ControlFront

        service = Service(
            version=__version__,
            config=lambda: self.config,
            reader=self._reader,
            catalog=self._catalog,
            attach=self._attach,
            health=self.health,
            begin_drain=self.begin_drain,
        )
        control = ControlPlane(service, folder.private_folder())
        self._front = ControlFront(listener, control.addresses)
        self._stack.push_async_callback(self._front.close)
        self._stack.push_async_callback(control.close)
        await control.start()
        self._control = control
        await self._front.start()

    async def _start_probing(self) -> None:
        settings = self.config.health
        self._prober = Prober(self._reader.echo, self._open, settings.limit_seconds, settings.interval_seconds)
        self._stack.callback(self._prober.stop)
        self._prober.start()
        while not self._prober.count and self._prober.obstacle() is None:
            await asyncio.sleep(_POLL_SECONDS)
        self.health.set_obstacle("probe", self._prober.obstacle())

    def _start_metrics(self) -> None:
        if self.config.metrics.listen is None:
            return
        from strataflux.daemon.exporter import Exporter

        exporter = Exporter(self.config.metrics.listen, self.look, self.is_live, self.is_ready)
        self._stack.push_async_callback(asyncio.to_thread, exporter.close)
        self.metrics_port = exporter.port
        _LOG.info("metrics on %s, port %d", self.config.metrics.listen.host, exporter.port)

    def look(self) -> "Moment":
        """What one scrape sees; called on the thread of the scrape."""
        from strataflux.daemon.moment import Moment, files_of

        rpcs = self._control.rpcs if self._control is not None else None
        return Moment(
            stats=self._reader.snapshot(),
            attach=self._attach.counters,
            control_connections=dict(self._front.connections),
            rpcs=dict(rpcs.calls) if rpcs is not None else {},
            rpc_times=dict(rpcs.times) if rpcs is not None else {},
            sessions=self._attach.session_count,
            stores={index: files_of(entry.store) for index, entry in self._catalog.served.items()},
            tenants=self.config.tenants,
            tenant_sessions=self._attach.tenant_sessions,
            reloads=dict(self._reloads.results),
            last_reload=self._reloads.last_success,
            scrubbed_bytes=self._scrubber.bytes,
            scrub_passes=self._scrubber.passes,
            scrub_damaged=self._damaged(),
            memory=self._memory.state,
            releases=self._memory.releases,
            released_bytes=self._memory.released_bytes,
            ready=self.health.ready,
            degraded={**self.health.reasons, **self.health.obstacles},
            progress_age_seconds=self._watch.age_seconds,
            engine=self._reader.engine,
            direct_io=self._reader.direct_io,
            registered_buffers=self._reader.registered_buffers,
            policy=self._reader.policy,
            hot_set=dict(self._warm.counts),
            version=__version__,
        )

    def is_live(self) -> tuple[bool, dict[str, Any]]:
        """Whether the data path moves; any thread."""
        return "stalled" not in self.health.reasons, {"progress_age_seconds": round(self._watch.age_seconds, 3)}

    def is_ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are taken and can be answered; any thread."""
        known = {"state": self.health.state, "obstacles": dict(self.health.obstacles)}
        return self.health.ready, {**known, "degraded": dict(self.health.reasons)}

    def _open(self) -> list[S]:
        """The served stores now; any thread."""
        return [entry.store for entry in self._catalog.served.values()]

    def _damaged(self) -> int:
        """Records of the served stores that were found damaged on disk; any thread."""
        bad = dict(self._scrubber.bad)
        return sum(bad.get(store.manifest.folder, 0) for store in self._open())

    def _describe(self) -> str:
        text = f"{len(self._catalog.served)} stores, {self._attach.session_count} sessions, {self._reader.engine}, "
        text += self._reader.direct_io
        text += "".join(f"; not ready: {obstacle}" for obstacle in self.health.obstacles.values())
        return text + "".join(f"; degraded: {reason}" for reason in self.health.reasons.values())

    def _on_health(self, health: Health) -> None:
        for obstacle in health.obstacles.values():
            _LOG.warning("not ready: %s", obstacle)
        for reason in health.reasons.values():
            _LOG.warning("degraded: %s", reason)
        if self._control is not None:
            self._health_shown = asyncio.get_running_loop().create_task(self._control.show_health())


def _imports(config: Config, environment: Mapping[str, str]) -> StoreFolder | None:
    """The folder of imports: the configured one, else ``stores`` in the service's state folder, else none."""
    state = environment.get("STATE_DIRECTORY", "").split(":")[0]
    folder = config.imports.folder or (Path(state, "stores") if state else None)
    return None if folder is None else StoreFolder(folder, config.imports.free_bytes)
