"""Metrics that are more than a number: distributions and facts. Declared once, as those of :mod:`metrics`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strataflux.daemon.moment import Moment
from strataflux.daemon.rpc_counter import RPC_BOUNDS_SECONDS
from strataflux.proto.store_format import FORMAT_VERSION

__all__ = ["HISTOGRAMS", "INFOS", "Histogram", "Info"]

_Labels = tuple[str, ...]


@dataclass(frozen=True)
class Histogram:
    """One histogram. ``read`` gives (label values, upper bounds, counts with one more for the rest, sum or None)."""

    name: str
    help: str
    labels: _Labels
    read: Callable[[Moment], Iterable[tuple[_Labels, Sequence[float], Sequence[int], float | None]]]


@dataclass(frozen=True)
class Info:
    """Facts as labels of a metric that is always 1. ``read`` gives (label values, facts)."""

    name: str
    help: str
    labels: _Labels
    read: Callable[[Moment], Iterable[tuple[_Labels, Mapping[str, str]]]]


_Rows = list[tuple[_Labels, Sequence[float], Sequence[int], float | None]]


def _seconds(bounds_us: Sequence[int]) -> list[float]:
    return [bound / 1e6 for bound in bounds_us]


def _fills(m: Moment) -> _Rows:
    bounds = _seconds(m.stats.fills.latency_bounds_us)
    return [((kind.kind,), bounds, kind.latency_counts, kind.latency_us / 1e6) for kind in m.stats.kinds]


def _gaps(m: Moment, which: str) -> _Rows:
    bounds = _seconds(m.stats.gap_bounds_us)
    return [
        ((kind.kind,), bounds, getattr(kind, f"{which}_counts"), getattr(kind, f"{which}_us") / 1e6)
        for kind in m.stats.kinds
    ]


HISTOGRAMS: Final[tuple[Histogram, ...]] = (
    Histogram("strataflux_fill_seconds", "From request taken to record readable.", ("kind",), _fills),
    Histogram(
        "strataflux_fill_age_steps",
        "Sampled fills: steps that whoever asked began until the first use; the last bucket: later, or never.",
        ("kind",),
        lambda m: [((kind.kind,), m.stats.age_bounds_steps, kind.age_counts, None) for kind in m.stats.kinds],
    ),
    Histogram(
        "strataflux_reuse_gap_seconds",
        "Sampled records: from one use to the next, as seen every few ticks.",
        ("kind",),
        lambda m: _gaps(m, "reuse"),
    ),
    Histogram(
        "strataflux_idle_before_evict_seconds",
        "Sampled records: from the last use (or the fill) to the eviction.",
        ("kind",),
        lambda m: _gaps(m, "idle"),
    ),
    Histogram(
        "strataflux_ssd_read_seconds",
        "From a read's submission to its completion.",
        (),
        lambda m: [
            ((), _seconds(r.latency_bounds_us), r.latency_counts, r.microseconds / 1e6) for r in (m.stats.reads,)
        ],
    ),
    Histogram(
        "strataflux_ssd_write_seconds",
        "From a write's submission to its completion.",
        (),
        lambda m: [
            ((), _seconds(m.stats.reads.latency_bounds_us), w.latency_counts, w.microseconds / 1e6)
            for w in (m.stats.writes,)
        ],
    ),
    Histogram(
        "strataflux_io_depth",
        "Reads in flight when one is submitted, itself included.",
        (),
        lambda m: [((), m.stats.reads.depth_bounds, m.stats.reads.depth_counts, m.stats.reads.depth_sum)],
    ),
    Histogram(
        "strataflux_rpc_seconds",
        "Duration of calls of the control plane, streams aside.",
        ("method",),
        lambda m: [((name,), RPC_BOUNDS_SECONDS, t.counts, t.seconds) for name, t in sorted(m.rpc_times.items())],
    ),
)

INFOS: Final[tuple[Info, ...]] = (
    Info(
        "strataflux_io_backend",
        "How records are read in fact.",
        (),
        lambda m: [
            ((), {"engine": m.engine, "direct": m.direct_io, "registered": str(m.registered_buffers).lower()}),
        ],
    ),
    Info("strataflux_cache", "The cache's replacement policy.", (), lambda m: [((), {"policy": m.policy})]),
    Info("strataflux_build", "This program.", (), lambda m: [((), {"version": m.version})]),
    Info(
        "strataflux_shard",
        "The stores that are served.",
        ("model",),
        lambda m: [
            ((served.digest,), {"epoch": str(served.generation), "format": str(FORMAT_VERSION)})
            for served in m.stores.values()
        ],
    ),
)
