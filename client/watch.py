"""What a daemon does now: the difference of its counters between two moments, by session where it tells.

Counters only grow while one daemon lives. After another one took its place (its ``generation`` differs) they start
anew, so a rate is then over what the new one counted since it started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from strataflux.proto import control_pb2

__all__ = ["Asked", "Lookups", "Moment", "Rates", "SessionRates", "SetMisses", "look", "rates"]


class Asked(Protocol):
    """What is asked: a :class:`strataflux.client.control.Control`, or a stand-in."""

    def info(self) -> control_pb2.GetInfoResponse:
        """Who answers."""

    def stats(self) -> control_pb2.Stats:
        """All counters now."""

    def stores(self) -> list[control_pb2.Store]:
        """What is served."""

    def sessions(self) -> list[control_pb2.Session]:
        """To whom."""


@dataclass(frozen=True)
class Moment:
    """All that a daemon says at one moment."""

    info: control_pb2.GetInfoResponse
    stats: control_pb2.Stats
    stores: Sequence[control_pb2.Store]
    sessions: Sequence[control_pb2.Session]


@dataclass(frozen=True)
class Lookups:
    """Look-ups of one kind in an interval."""

    per_second: float
    hit_rate: float | None
    """None without look-ups."""


@dataclass(frozen=True)
class SessionRates:
    """One session in an interval."""

    session: str
    """Its number in hexadecimal, as in other listings."""
    client: str
    pid: int
    uid: int
    steps_per_second: float
    lookups: Lookups
    dropped_per_second: float
    fenced: bool


@dataclass(frozen=True)
class SetMisses:
    """Misses of one projection set in one layer, of one store: they began to be filled in the interval."""

    store: str
    layer: int
    set: str
    records: int
    per_second: float


@dataclass(frozen=True)
class Rates:
    """An interval. Seconds are seconds, bytes are bytes; a mean of nothing is None."""

    seconds: float
    lookups: Mapping[str, Lookups]
    """By kind of record: ``weight`` and ``kv``."""
    steps_per_second: float
    """Over all sessions that live: of decoders, tokens a second."""
    fills_per_second: float
    fill_seconds: float | None
    evictions_per_second: float
    dropped_per_second: float
    reads_per_second: float
    read_bytes_per_second: float
    read_seconds: float | None
    prefetched_per_second: float
    """Records read because clients expected to look them up."""
    prefetches_asked_per_second: float
    prefetches_dropped_per_second: float
    """Asked for and not read, for want of time or room."""
    prefetches_useful: float | None
    """Of those whose fate was settled in the interval, the part that was looked up."""
    rejected_per_second: float
    """Missed records that the policy left on the disk."""
    in_flight: int
    queued: int
    read_errors: int
    """Since the daemon started."""
    sessions: Sequence[SessionRates] = field(default=())
    misses: Sequence[SetMisses] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def look(daemon: Asked) -> Moment:
    """Ask for everything.

    Raises:
        DaemonUnavailableError: nobody answers. RefusedError: it cannot say, such as while it stops.
    """
    return Moment(daemon.info(), daemon.stats(), daemon.stores(), daemon.sessions())


def rates(now: Moment, before: Moment | None = None) -> Rates:
    """What happened between two moments, or since the daemon started if there is only one."""
    if before is None or before.info.generation != now.info.generation:
        return _between(now, control_pb2.Stats(), {}, {}, now.info.uptime_seconds)
    sessions = {session.session: session.stats for session in before.sessions}
    misses = {store.digest: list(store.stats.section_misses) for store in before.stores}
    return _between(now, before.stats, sessions, misses, now.stats.at_seconds - before.stats.at_seconds)


def _between(
    now: Moment,
    old: control_pb2.Stats,
    sessions: Mapping[int, control_pb2.SessionStats],
    misses: Mapping[str, Sequence[int]],
    seconds: float,
) -> Rates:
    new, seconds = now.stats, max(seconds, 1e-9)
    by_session = [_session(row, sessions.get(row.session), seconds) for row in now.sessions]

    def rate(after: int, before: int) -> float:
        return max(0, after - before) / seconds

    fills, reads = new.fills.fills - old.fills.fills, new.reads.reads - old.reads.reads
    used, unused = _both_kinds(new, old, "prefetch_used"), _both_kinds(new, old, "prefetch_unused")
    return Rates(
        seconds=seconds,
        lookups={
            "weight": _lookups(
                new.lookups.weight_lookups - old.lookups.weight_lookups,
                new.lookups.weight_hits - old.lookups.weight_hits,
                seconds,
            ),
            "kv": _lookups(
                new.lookups.kv_lookups - old.lookups.kv_lookups, new.lookups.kv_hits - old.lookups.kv_hits, seconds
            ),
        },
        steps_per_second=sum(row.steps_per_second for row in by_session),
        fills_per_second=rate(new.fills.fills, old.fills.fills),
        fill_seconds=_mean(new.fills.latency_us - old.fills.latency_us, fills),
        evictions_per_second=rate(new.fills.evictions, old.fills.evictions),
        dropped_per_second=rate(_dropped(new), _dropped(old)),
        reads_per_second=rate(new.reads.reads, old.reads.reads),
        read_bytes_per_second=rate(new.reads.bytes, old.reads.bytes),
        read_seconds=_mean(new.reads.microseconds - old.reads.microseconds, reads),
        prefetched_per_second=rate(new.fills.prefetched, old.fills.prefetched),
        prefetches_asked_per_second=_both_kinds(new, old, "prefetches") / seconds,
        prefetches_dropped_per_second=_both_kinds(new, old, "prefetch_dropped") / seconds,
        prefetches_useful=used / (used + unused) if used + unused > 0 else None,
        rejected_per_second=rate(new.requests.rejected, old.requests.rejected),
        in_flight=new.reads.in_flight,
        queued=new.reads.queued,
        read_errors=new.reads.errors,
        sessions=by_session,
        misses=[row for store in now.stores for row in _misses(store, misses.get(store.digest, ()), seconds)],
    )


def _session(row: control_pb2.Session, old: control_pb2.SessionStats | None, seconds: float) -> SessionRates:
    new, old = row.stats, old or control_pb2.SessionStats()
    return SessionRates(
        session=f"{row.session:x}",
        client=row.client,
        pid=row.pid,
        uid=row.uid,
        steps_per_second=max(0, new.steps - old.steps) / seconds,
        lookups=_lookups(new.lookups - old.lookups, new.hits - old.hits, seconds),
        dropped_per_second=max(0, new.dropped - old.dropped) / seconds,
        fenced=new.fenced,
    )


def _misses(store: control_pb2.Store, old: Sequence[int], seconds: float) -> list[SetMisses]:
    new = store.stats.section_misses
    before = old if len(old) == len(new) else [0] * len(new)
    return [
        SetMisses(store.digest, part.layer, part.set, part.records, max(0, after - earlier) / seconds)
        for part, after, earlier in zip(store.sections, new, before, strict=True)
    ]


def _lookups(asked: int, hits: int, seconds: float) -> Lookups:
    """Clients count these in memory of theirs; one that writes nonsense may not spoil a display."""
    asked = max(0, asked)
    return Lookups(asked / seconds, min(max(0, hits), asked) / asked if asked else None)


def _dropped(stats: control_pb2.Stats) -> int:
    requests = stats.requests
    return int(requests.dropped_ring + requests.dropped_queue + requests.dropped_grace)


def _both_kinds(new: control_pb2.Stats, old: control_pb2.Stats, name: str) -> int:
    """What a counter of weights and KV grew by."""
    after, before = (int(sum(getattr(kind, name) for kind in stats.kinds)) for stats in (new, old))
    return max(0, after - before)


def _mean(microseconds: int, count: int) -> float | None:
    return microseconds / count / 1e6 if count > 0 else None
