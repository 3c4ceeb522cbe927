"""How a metric is declared, and what most of them are read with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from strataflux.daemon.moment import Moment

__all__ = ["Declaration", "Labels", "Read", "Sample", "kinds", "one", "split"]

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
Read = Callable[[Moment], Iterable[Sample]]


@dataclass(frozen=True)
class Declaration:
    """One metric. ``read`` gives a sample for each combination of label values that exists."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: Labels
    read: Read


def one(read: Callable[[Moment], float]) -> Read:
    """A number without labels."""
    return lambda moment: [((), read(moment))]


def kinds(field: str) -> Read:
    """A number of each kind of record."""
    return lambda m: [((kind.kind,), getattr(kind, field)) for kind in m.stats.kinds]


def split(**fields: str) -> Read:
    """Numbers of each kind, by the value of a second label."""
    return lambda m: [
        ((kind.kind, value), getattr(kind, field)) for kind in m.stats.kinds for value, field in fields.items()
    ]
