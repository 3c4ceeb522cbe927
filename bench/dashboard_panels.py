"""A Grafana dashboard's panels with a Prometheus' answers to their queries, drawn by matplotlib in the dashboard's
grid. Lines that are zero from end to end are left out.
"""

import io
import json
import math
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

COLUMNS = 24
INCHES = (13.0, 0.27)
"""Of the whole width, and of one row of the grid."""
DOTS = 82
POINTS = 160
COLOURS = 48
INK, PAPER, LINES = "#24292e", "#ffffff", ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#8f8f8f", "#19a7a8")


def ask(address: str, query: str, begun: float, ended: float) -> list[dict[str, Any]]:
    """Series of one query over the time of the picture."""
    words = {"query": query, "start": begun, "end": ended, "step": max((ended - begun) / POINTS, 1.0)}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(words)}") as answer:
        body = json.load(answer)
    found: list[dict[str, Any]] = body["data"]["result"]
    return found


def shown(value: float, unit: str) -> str:
    """A number in a unit of Grafana's, short."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        steps = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
        scale, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
        return f"{value / scale:.3g} {name}" if value else "0"
    if unit in ("bytes", "Bps"):
        for scale, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}" + ("/s" if unit == "Bps" else "")
        return f"{value:.0f} B"
    for scale, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value:.3g}"


def legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), form).strip()


def draw(dashboard: Path, address: str, begun: float, ended: float, out: io.BytesIO) -> None:
    """Every panel of the dashboard, as a PNG."""
    panels = json.loads(dashboard.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(INCHES[0], rows * INCHES[1]), facecolor=PAPER)
    for panel in panels:
        at = panel["gridPos"]
        x, width = at["x"] / COLUMNS, at["w"] / COLUMNS
        bottom, height = 1 - (at["y"] + at["h"]) / rows, at["h"] / rows
        if panel["type"] == "row":
            figure.text(x + 0.005, bottom + height / 3, panel["title"], fontsize=11, weight="bold", color=INK)
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        series = []
        for target in panel["targets"]:
            query = target["expr"].replace("$instance", ".*")
            for found in ask(address, query, begun, ended):
                series.append((legend(target["legendFormat"], found["metric"]), found["values"]))
        if panel["type"] == "stat":
            axes = figure.add_axes((x + 0.01, bottom, width - 0.02, height * 0.9))
            draw_number(axes, panel["title"], series, unit)
        else:
            inset = (x + 0.042, bottom + height * 0.3, width - 0.055, height * 0.54)
            draw_lines(figure.add_axes(inset), panel["title"], series, unit, begun)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DOTS)
    Image.open(picture).convert("RGB").quantize(COLOURS).save(out, "PNG", optimize=True)


def draw_number(axes: Axes, title: str, series: list[tuple[str, list[Any]]], unit: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.85, title, ha="center", va="top", fontsize=8, color=INK)
    last = [shown(float(values[-1][1]), unit) for _, values in series]
    axes.text(0.5, 0.3, ", ".join(last) or "no data", ha="center", va="center", fontsize=18 if last else 9, color=INK)


def draw_lines(axes: Axes, title: str, series: list[tuple[str, list[Any]]], unit: str, begun: float) -> None:
    axes.set_title(title, fontsize=8, loc="left", color=INK, pad=3)
    moving = [(name, values) for name, values in series if any(float(value) > 0 for _, value in values)]
    highest = 0.0
    for number, (name, values) in enumerate(moving):
        points = [(float(at) - begun, float(value)) for at, value in values if value != "NaN"]
        if points:
            axes.plot(*zip(*points, strict=True), lw=1.1, color=LINES[number % len(LINES)], label=name)
            highest = max(highest, *(value for _, value in points))
    axes.set_ylim(bottom=0)
    if unit in ("bytes", "Bps") and highest > 0:
        axes.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(highest / 4))))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(labelsize=6, colors=INK, length=2)
    axes.grid(lw=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if moving:
        axes.legend(
            fontsize=5.5, ncols=4, loc="upper left", bbox_to_anchor=(-0.12, -0.16), frameon=False, handlelength=1
        )
    else:
        words = f"{len(series)} lines, all zero" if series else "no data"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", fontsize=8, color="#8f8f8f")
