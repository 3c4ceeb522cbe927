"""KV blocks for a session, and back: from its place, within its tenant's quota.

Each way has three parts. The first and the last are the reader thread's and take no time; the disk space between them
is the caller's work (:mod:`strataflux.daemon.kv_file`). They are about the session that had the index at first: another
one that has it later is left alone.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from strataflux.daemon.errors import Refusal
from strataflux.daemon.kv import KvPlace
from strataflux.daemon.kv_file import KvSpace
from strataflux.daemon.tier import Tier

__all__ = ["Execute", "grant", "place_of", "release"]

_Ranges = list[list[int]]


class Execute(Protocol):
    """Runs a function in the reader thread, and gives its answer or raises its error."""

    def __call__(self, action: Callable[[], Any], /) -> Any:
        """As :meth:`strataflux.daemon.reader_thread.ReaderThread.execute`."""


def place_of(tier: Tier, index: int) -> KvPlace:
    """The KV place of a session. The reader thread only.

    Raises:
        Refusal: it has none.
    """
    row = tier.rows.get(index)
    if row is None or row.place is None:
        found = "a session without KV blocks"
        raise Refusal("unsupported", "kv", found, "one attached with a KV geometry", "say it in hello")
    return row.place


def grant(execute: Execute, tier: Tier, index: int, count: int) -> _Ranges:
    """Block ids as [first, count] ranges, their disk space reserved. From any thread but the reader's.

    Raises:
        Refusal: it has no KV, or its tenant's quota, its own ids or the disk do not allow as many, or it has ended;
            nothing is kept. OSError: no descriptor is left.
    """
    asked: _Grant = execute(lambda: _Grant(tier, index, count))
    try:
        with asked.space as space:
            space.reserve()
    except OSError as error:  # the disk filled up since it was asked, or fails
        execute(asked.cancel)
        raise Refusal(
            "quota",
            str(asked.folder),
            error.strerror or str(error),
            f"room for {count} blocks",
            "free disk space, or set kv.folder to a larger one",
        ) from error
    ranges: _Ranges = execute(asked.finish)
    return ranges


def release(execute: Execute, tier: Tier, index: int, ranges: _Ranges) -> Callable[[], bool]:
    """Begin to take ``ranges`` ([first, count] each) back. From any thread but the reader's.

    Returns:
        A function to ask until it says that no step, read or write holds them any more, and their ids are free.

    Raises:
        Refusal: the session has no KV, or they are not granted blocks; nothing was changed. The answer: the session has
            ended, and its blocks with it.
    """
    going: _Release = execute(lambda: _Release(tier, index, ranges))

    def settled() -> bool:
        if (space := execute(going.settled)) is not None:
            with space:
                space.give_back()
            execute(going.finish)
        return going.done

    return settled


class _OfSession:
    """The session that has an index now."""

    def __init__(self, tier: Tier, index: int) -> None:
        self._tier, self._index = tier, index
        self._place = place_of(tier, index)
        self._row = tier.rows[index]

    def _require(self, what: str) -> None:
        if self._tier.rows.get(self._index) is not self._row:
            raise Refusal("limit", what, "a session that has ended", "one that lives", "attach again")


class _Grant(_OfSession):
    """Blocks on their way to a session. Pairs: construction / :meth:`finish` or :meth:`cancel`."""

    def __init__(self, tier: Tier, index: int, count: int) -> None:
        super().__init__(tier, index)
        size = count * int(self._place.row["block_stride"])
        tier.tenants.check_disk(self._row.tenant, tier.granted_bytes(self._row.tenant), size)
        self.folder = self._place.settings.folder
        self._blocks, self.space = self._place.begin_grant(count, sum(place.promised_bytes for place in tier.places))

    def finish(self) -> _Ranges:
        self._require("kv_reserve")
        return self._place.finish_grant(self._blocks)

    def cancel(self) -> None:
        if self._tier.rows.get(self._index) is self._row:
            self._place.cancel_grant(self._blocks)


class _Release(_OfSession):
    """Blocks on their way back. Pairs: construction / :meth:`finish`, after :meth:`settled` gave their space."""

    def __init__(self, tier: Tier, index: int, ranges: _Ranges) -> None:
        super().__init__(tier, index)
        self._ranges = ranges
        self._unnamed = self._place.give_back(ranges)
        self.done = False

    def settled(self) -> KvSpace | None:
        """Their space, once nothing names or holds them; None: ask again, unless ``done``."""
        self._require("kv_release")
        if not self._unnamed:
            self._unnamed = self._place.give_back(self._ranges)
        elif not self.done and self._place.are_quiet(self._ranges):
            with contextlib.suppress(OSError):  # no descriptor is left now; whoever gave up would lose the ids
                return self._place.space(self._ranges)
        return None

    def finish(self) -> None:
        self._require("kv_release")
        self._place.take_back(self._ranges)
        self.done = True
