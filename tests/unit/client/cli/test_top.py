"""What top shows fits 80 columns, in colour or without, and names what is there."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strataflux.client.cli.bars import Bars
from strataflux.client.cli.top import Picture
from strataflux.client.watch import Moment, rates
from strataflux.proto import control_pb2
from tests.unit.client.test_watch import moment


def console(encoding: str = "utf-8", width: int = 80) -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=width, force_terminal=True)


def crowded() -> Moment:
    """Many sessions with long names, full caches of two kinds, and a reason to be worried."""
    now = moment(12.0, 1_000_000)
    stats, info = now.stats, now.info
    for kind in ("weight", "kv"):
        stats.caches.append(
            control_pb2.CacheStats(
                kind=kind, capacity_bytes=64 << 30, valid_bytes=60 << 30, filling_bytes=1, retired_bytes=1 << 30
            )
        )
        stats.classes.append(control_pb2.ClassStats(kind=kind, slot_bytes=14336, slots=4_000_000, free=1_000_000))
    stats.lookups.kv_lookups = stats.lookups.kv_hits = 10**9
    info.state, info.version, info.engine, info.direct_io, info.pid = "ready", "0.1.0", "uring", "direct", 4_194_304
    info.degraded["buffered"] = "one store is read through the page cache"
    session = now.sessions[0]
    session.client, session.stats.fenced = "a client with a very long name", True
    return Moment(info, stats, [*now.stores], [session] * 14)


def draw(target: Console) -> str:
    picture = Picture(Bars(target))
    picture.draw(crowded(), rates(crowded()))
    target.print(picture.draw(crowded(), rates(crowded(), moment(10.0, 1))))
    target.file.flush()
    assert isinstance(target.file, io.TextIOWrapper)
    assert isinstance(target.file.buffer, io.BytesIO)
    return target.file.buffer.getvalue().decode()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_eighty_columns(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub("\x1b\\[[0-9;]*m", "", draw(console(encoding)))
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in (
        "stratafluxd 0.1.0 ready",
        "weights",
        "KV",
        "75.0%",
        "14,336 B",
        "61,440.0",
        "and 4 more",
        "cut off",
        "queued",
        "asked",
        "not admitted",
    ):
        assert part in text
    assert "one store is read through the page cache" in text


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in draw(console())
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[3" in draw(Console(file=console().file, width=80, force_terminal=True, color_system="standard"))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=5), st.integers(5, 60))
def test_bars_are_as_wide_as_asked_and_show_what_is_there(amounts: list[int], width: int) -> None:
    bars = Bars(console())
    bar = bars.stack([(amount, "v", str(number)) for number, amount in enumerate(amounts)], width)
    assert len(bar.plain) == width
    if width >= len(amounts):
        shown = {span.style for span in bar.spans if span.end > span.start} - {"dim"}
        assert shown == {str(number) for number, amount in enumerate(amounts) if amount}


def test_lines_show_the_newest_and_leave_gaps() -> None:
    assert Bars(console()).line([0.0, None, 1.0], 5).plain == "    █"
    assert Bars(console("ascii")).line([0.0, None, 1.0, 0.5], 3).plain == " @+"
