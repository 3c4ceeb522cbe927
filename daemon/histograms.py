"""Metrics that are more than a number: distributions and facts. Declared once, as those of :mod:`metrics`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strataflux.daemon.metrics import Moment
from strataflux.daemon.rpc_counter import RPC_BOUNDS_SECONDS

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


def _micro(
    bounds: Sequence[int], counts: Sequence[int], total: int
) -> tuple[_Labels, list[float], Sequence[int], float]:
    """A histogram kept in microseconds, in seconds."""
    return (), [bound / 1e6 for bound in bounds], counts, total / 1e6


HISTOGRAMS: Final[tuple[Histogram, ...]] = (
    Histogram(
        "strataflux_fill_seconds",
        "From request taken to record readable.",
        (),
        lambda m: [
            _micro(m.stats.fills.latency_bounds_us, m.stats.fills.latency_counts, m.stats.fills.latency_us),
        ],
    ),
    Histogram(
        "strataflux_ssd_read_seconds",
        "From a read's submission to its completion.",
        (),
        lambda m: [
            _micro(m.stats.reads.latency_bounds_us, m.stats.reads.latency_counts, m.stats.reads.microseconds),
        ],
    ),
    Histogram(
        "strataflux_io_depth",
        "Reads in flight when one is submitted, itself included.",
        (),
        lambda m: [((), m.stats.reads.depth_bounds, m.stats.reads.depth_counts, m.stats.reads.depth_sum)],
    ),
    Histogram(
        "strataflux_fill_age_ticks",
        "Ticks of the reader's clock, of 1 ms or more while it works, from a fill to its first use.",
        (),
        lambda m: [((), m.stats.fills.age_bounds_ticks, m.stats.fills.age_counts, None)],
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
    Info("strataflux_build", "This program.", (), lambda m: [((), {"version": m.version})]),
    Info(
        "strataflux_shard",
        "The stores that are served.",
        ("model",),
        lambda m: [((served.digest,), {"epoch": str(served.generation)}) for served in m.stores],
    ),
)
