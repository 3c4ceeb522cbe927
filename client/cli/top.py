"""``strataflux top``: what a daemon does now, renewed until told to end."""

import os
import select
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strataflux.client.cli.bars import Bars
from strataflux.client.cli.options import JsonOption, RuntimeDirOption
from strataflux.client.cli.output import Output
from strataflux.client.errors import FailureError
from strataflux.proto.runtime import runtime_folder

if TYPE_CHECKING:
    from strataflux.client.control import Control
    from strataflux.client.watch import Moment, Rates
    from strataflux.proto import control_pb2

__all__ = ["Picture", "register", "top"]

_NAMES: Final = {"weight": "weights", "kv": "KV"}
_BAR: Final = 36
_HISTORY: Final = 40
_SESSIONS: Final = 10

_IntervalOption = Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")]


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, over one interval, then end.")] = False,
    interval: _IntervalOption = 1.0,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hit rates, fills, sessions, cache and disk of a daemon, live; q or Ctrl-C ends it.

    With --json, and where stdout is no terminal, there is one look.
    """
    from strataflux.client.control import Control
    from strataflux.client.watch import look, rates

    output, console = Output(as_json), Console()
    with Control(runtime_folder(runtime_dir, os.environ)) as control:
        before = look(control)
        picture = Picture(Bars(console))
        if once or as_json or not console.is_terminal:
            with _keys() as wait:
                wait(interval)
            now = look(control)
            found = rates(now, before)
            output.print(picture.draw(now, found))
            output.result({"state": now.info.state, "version": now.info.version, **found.to_json()})
            return
        _watch(console, picture, control, before, interval)


def _watch(console: Console, picture: "Picture", control: "Control", now: "Moment", interval: float) -> None:
    from rich.live import Live

    from strataflux.client.watch import look, rates

    shown = picture.draw(now, rates(now))
    with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(shown, refresh=True)
            if wait(interval):
                return
            try:
                last, now = now, look(control)
                shown = picture.draw(now, rates(now, last))
            except FailureError as error:  # it may come back
                shown = Text(f"{error.subject}: {error.found}; {error.remedy}", "red")


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds and says whether q was pressed; only a terminal has keys."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: bool(select.select([descriptor], [], [], seconds)[0]) and os.read(descriptor, 1) == b"q"
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Picture:
    """A page of text, 80 columns wide at most, for one interval after another."""

    def __init__(self, bars: Bars) -> None:
        # fixed after construction
        self._bars = bars
        # changed by draw
        self._history: dict[str, deque[float | None]] = {kind: deque(maxlen=_HISTORY) for kind in ("weight", "kv")}

    def draw(self, moment: "Moment", now: "Rates") -> RenderableType:
        """What to show of ``moment``, with the rates of the interval before it."""
        parts: list[RenderableType] = [_headline(moment), self._lookups(now), _work(now), self._cache(moment.stats)]
        parts += [self._stores(moment), _sessions(now)]
        return Group(*parts)

    def _lookups(self, now: "Rates") -> Table:
        table = _table("", "hit rate", "", "look-ups/s", "lately")
        for kind, found in now.lookups.items():
            self._history[kind].append(found.hit_rate)
            if kind == "weight" or found.per_second or any(v is not None for v in self._history[kind]):
                bar, line = self._bars.share(found.hit_rate, 16), self._bars.line(self._history[kind], 24)
                table.add_row(_NAMES[kind], _percent(found.hit_rate), bar, _count(found.per_second), line)
        return table

    def _cache(self, stats: "control_pb2.Stats") -> Table:
        """A bar for each budget, then one for each size of slot in it: valid, filling, retired, free."""
        table = _table("cache", "", "in use", "")
        for cache in stats.caches:
            bar = self._slots(cache.valid_bytes, cache.filling_bytes, cache.retired_bytes, cache.free_bytes)
            used, whole = cache.valid_bytes / 2**20, cache.capacity_bytes / 2**20
            table.add_row(_NAMES.get(cache.kind, cache.kind), bar, f"{used:,.1f}", f"of {whole:,.1f} MiB")
            for row in stats.classes:
                if row.kind == cache.kind and row.slots:
                    valid = row.slots - row.free - row.filling - row.retired
                    bar = self._slots(valid, row.filling, row.retired, row.free)
                    table.add_row(f"  {row.slot_bytes:,} B", bar, f"{valid:,}", f"of {row.slots:,} slots")
        return table

    def _slots(self, valid: int, filling: int, retired: int, free: int) -> Text:
        parts = ((valid, "v", "green"), (filling, "f", "yellow"), (retired, "r", "magenta"), (free, ".", "dim"))
        return self._bars.stack(parts, _BAR)

    def _stores(self, moment: "Moment") -> Table:
        table = _table("store", "resident", "records", "MB", "quarantined", "disk free")
        for store in moment.stores:
            share = store.stats.resident_records / store.records if store.records else None
            bad = f"{store.stats.quarantined:,}"
            row = (f"{store.records:,}", f"{store.bytes / 1e6:,.1f}", bad, _free(store.path))
            table.add_row(store.digest[:12], _percent(share), *row)
        return table


def _headline(moment: "Moment") -> Text:
    info = moment.info
    style = "bold green" if info.state == "ready" and not info.degraded else "bold yellow"
    text = Text.assemble(("stratafluxd ", "bold"), f"{info.version} ", (info.state, style))
    minutes, seconds = divmod(int(info.uptime_seconds), 60)
    text.append(f"  up {minutes // 60}:{minutes % 60:02}:{seconds:02}  {info.engine} {info.direct_io}  pid {info.pid}")
    for name, reason in sorted(info.degraded.items()):
        text.append(f"\n  {name}: {reason}", "yellow")
    return text


def _work(now: "Rates") -> Table:
    table = _table("", "", "", "", "")
    table.show_header = False
    fills, reads = _microseconds(now.fill_seconds), _microseconds(now.read_seconds)
    table.add_row("steps", f"{_count(now.steps_per_second)}/s", "in all sessions", "", "")
    dropped = f"dropped {_count(now.dropped_per_second)}/s"
    table.add_row(
        "fills", f"{_count(now.fills_per_second)}/s", fills, f"evicted {_count(now.evictions_per_second)}/s", dropped
    )
    if now.prefetches_asked_per_second:
        useful = f"{_percent(now.prefetches_useful)} used" if now.prefetches_useful is not None else ""
        asked = f"asked {_count(now.prefetches_asked_per_second)}/s"
        unread = f"dropped {_count(now.prefetches_dropped_per_second)}/s"
        table.add_row("ahead", f"{_count(now.prefetched_per_second)}/s", useful, asked, unread)
    if now.rejected_per_second:
        table.add_row("policy", f"{_count(now.rejected_per_second)}/s", "", "not admitted", "")
    flow = f"{_count(now.read_bytes_per_second / 1e6)} MB/s"
    queue = f"{now.in_flight:,} in flight, {now.queued:,} queued"
    table.add_row("disk", f"{_count(now.reads_per_second)} reads/s", reads, flow, queue)
    if now.read_errors:
        table.add_row("", Text(f"{now.read_errors:,} failed", "red"), "", "", "")
    return table


def _sessions(now: "Rates") -> Table:
    table = _table("session", "pid", "steps/s", "look-ups/s", "hit rate", "dropped/s", "")
    busiest = sorted(now.sessions, key=lambda row: -row.lookups.per_second)
    for row in busiest[:_SESSIONS]:
        name = row.client if len(row.client) <= 16 else f"{row.client[:14]}.."
        rate = (_count(row.steps_per_second), _count(row.lookups.per_second), _percent(row.lookups.hit_rate))
        fenced = Text("cut off", "red") if row.fenced else ""
        table.add_row(name, str(row.pid), *rate, _count(row.dropped_per_second), fenced)
    if len(busiest) > _SESSIONS:
        table.add_row(f"and {len(busiest) - _SESSIONS} more")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number and heading else "left", no_wrap=True, overflow="crop")
    return table


def _count(number: float) -> str:
    """In seven characters at most: ``13.2``, ``48,204``, ``1.25 M``."""
    if number < 100:
        return f"{number:.1f}"
    if number < 1e5:
        return f"{number:,.0f}"
    return f"{number / 1e6:.2f} M" if number < 1e8 else f"{number / 1e9:.2f} G"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.0f} us each"


def _free(path: str) -> str:
    """Of the file system of a store; its path is told to administrators only."""
    try:
        system = os.statvfs(path) if path else None
    except OSError:
        return "gone"
    return "-" if system is None else f"{system.f_bavail * system.f_frsize / 1e9:,.1f} GB"


def register(app: typer.Typer) -> None:
    """Add ``top``."""
    app.command()(top)
