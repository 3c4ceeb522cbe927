"""One picture of the race."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["plot"]

_COLORS = {
    "strataflux": "#0b6e4f",
    "strataflux, waiting": "#6bbf59",
    "mmap": "#c1666b",
    "lmdb": "#4281a4",
    "rocksdb": "#e4a03b",
    "diskcache": "#8d6a9f",
    "redis": "#7a7a7a",
}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Hits and cold records a second; the p99 of a step as skew, and as sessions grow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (hits, cold), (skews, sessions) = figure.subplots(2, 2)
    base = [row for row in found["rows"] if row["stage"] == "base"]
    for axes, kind, title in ((hits, "hits", "hits/s, all resident"), (cold, "cold", "cold records/s")):
        rows = sorted((row for row in base if row["kind"] == kind), key=lambda row: row["rate"])
        names = [row["rival"] for row in rows]
        axes.barh(names, [row["rate"] for row in rows], color=[_COLORS.get(name) for name in names])
        axes.set(title=title, xscale="log" if kind == "hits" else "linear")
    steps = [row for row in base if row["kind"] == "steps"]
    for name in dict.fromkeys(row["rival"] for row in steps):
        mine = [row for row in steps if row["rival"] == name]
        alone = sorted((row["skew"], row["p99_us"]) for row in mine if row["sessions"] == 1)
        middle = sorted((row["sessions"], row["p99_us"]) for row in mine if row["skew"] == 0.9)
        for axes, points in ((skews, alone), (sessions, middle)):
            axes.plot(*zip(*points, strict=True), "o-", label=name, color=_COLORS.get(name))
    skews.set(title="p99 of a step as skew grows", xlabel="Zipf exponent", ylabel="us", yscale="log")
    sessions.set(title="p99 of a step as sessions grow", xlabel="sessions", ylabel="us", yscale="log", xscale="log")
    sessions.set_xticks(
        sorted({row["sessions"] for row in steps}), [str(n) for n in sorted({r["sessions"] for r in steps})]
    )
    skews.legend(fontsize="small")
    figure.savefig(path, dpi=80)
