"""The race's rows as tables, its aims, and where a rival wins."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "aims", "show", "winners", "write_page"]

BEGIN, END = "<!-- race: begin -->", "<!-- race: end -->"
OURS = "strataflux"
_MIDDLE = 0.9
"""The skew that sessions and the large store are measured with."""

Row = Mapping[str, Any]
Found = Mapping[str, Any]


class _Rows:
    """Rows by stage, kind, skew and number of sessions."""

    def __init__(self, found: Found) -> None:
        self._rows: list[Row] = found["rows"]
        self.stages = list(dict.fromkeys(row["stage"] for row in self._rows))
        self.rivals = list(dict.fromkeys(row["rival"] for row in sorted(self._rows, key=_order)))

    def get(self, rival: str, stage: str, kind: str, skew: float | None = None, sessions: int = 1) -> Row | None:
        wanted = (rival, stage, kind, skew, sessions)
        keys = ("rival", "stage", "kind", "skew", "sessions")
        return next((row for row in self._rows if tuple(row[key] for key in keys) == wanted), None)

    def values(self, key: str, *cell: Any) -> dict[str, float]:
        """One figure of all rivals that have it."""
        rows = {rival: self.get(rival, *cell) for rival in self.rivals}
        return {rival: row[key] for rival, row in rows.items() if row is not None and key in row}

    def counts(self) -> list[int]:
        return sorted({row["sessions"] for row in self._rows})

    def skews(self) -> list[float]:
        return sorted({row["skew"] for row in self._rows if row["skew"] is not None})


def _order(row: Row) -> int:
    names = [OURS, f"{OURS}, waiting", "mmap", "lmdb", "rocksdb", "diskcache", "redis"]
    return names.index(row["rival"]) if row["rival"] in names else len(names)


def show(found: Found) -> str:
    """All of it, in Markdown."""
    rows = _Rows(found)
    parts = [f"{found['date']}, {found['machine']}; {found['seconds']:g} s a cell.", _base(rows), _skews(rows)]
    parts += [_sessions(rows), _large(rows), _traces(rows), _verdict(rows)]
    notes = [f"* **{name}**: {text}" for name, text in found["interfaces"].items()]
    notes += [f"* **{name}** left out: {reason}" for name, reason in found["skipped"].items()]
    notes += [f"* Failed: {each['stage']}: {each['said']}" for each in found["failed"]]
    notes.append("* Whoever lives on the page cache has 2 MiB beyond the budget, for stacks and page tables.")
    if any(row["page_cache_bytes"] and not row["limited"] and row["rival"] in _KERNELS for row in found["rows"]):
        notes.append("* The page cache was not limited: no memory cgroup could be made.")
    return "\n\n".join([*(part for part in parts if part), "\n".join(notes)]) + "\n"


_KERNELS = ("mmap", "lmdb", "diskcache")


def _base(rows: _Rows) -> str:
    step = ("steps", _MIDDLE)
    columns: list[tuple[str, tuple[Any, ...], Callable[[Row], str]]] = [
        ("hits/s", ("hits",), lambda r: _rate(r["rate"])),
        ("CPU a hit", ("hits",), lambda r: _microseconds(r["cpu_us"])),
        ("whole records/s", ("hits_whole",), lambda r: _rate(r["rate"])),
        ("one hit, p50 / p99", ("latency",), _both),
        ("cold records/s", ("cold",), lambda r: _rate(r["rate"])),
        ("CPU a cold record", ("cold",), lambda r: _microseconds(r["cpu_us"])),
        ("miss to resident, p50 / p99", ("miss",), _both),
        ("step, p50 / p99", step, _both),
        ("of it served", step, lambda r: f"{r['served']:.0%}"),
        ("CPU a look-up", step, lambda r: _microseconds(r["cpu_us"])),
        ("RAM: own + page cache", step, _ram),
    ]
    lines = []
    for rival in rows.rivals:
        cells = [rows.get(rival, "base", *cell) for _, cell, _ in columns]
        lines.append(
            [rival] + ["–" if row is None else column[2](row) for row, column in zip(cells, columns, strict=True)]
        )
    return _table([""] + [name for name, _, _ in columns], lines)


def _skews(rows: _Rows) -> str:
    if not rows.skews():
        return ""
    head = ["steps: p50 / p99, served"] + [f"Zipf {skew:g}" for skew in rows.skews()]
    return _table(
        head, [[name] + [_step(rows.get(name, "base", "steps", s)) for s in rows.skews()] for name in rows.rivals]
    )


def _sessions(rows: _Rows) -> str:
    if len(rows.counts()) < 2:
        return ""
    head = ["sessions: steps' p50 / p99 of the worst, served; look-ups/s in steps"] + [str(n) for n in rows.counts()]
    lines = []
    for name in rows.rivals:
        cells = [rows.get(name, "base", "steps", _MIDDLE, count) for count in rows.counts()]
        lines.append([name] + ["–" if row is None else f"{_step(row)}; {_rate(row['rate'])}" for row in cells])
    return _table(head, lines)


def _large(rows: _Rows) -> str:
    if "big" not in rows.stages:
        return ""
    head = ["the large store: hits/s", "one hit, p50 / p99", "step, p50 / p99, served"]
    lines = []
    for name in rows.rivals:
        hits, latency = (rows.get(name, "big", kind) for kind in ("hits", "latency"))
        step = rows.get(name, "big", "steps", _MIDDLE)
        if hits or step:
            alone = ["–" if hits is None else _rate(hits["rate"]), "–" if latency is None else _both(latency)]
            lines.append([name, *alone, _step(step)])
    return _table(["", *head], lines)


def _traces(rows: _Rows) -> str:
    traces = [stage for stage in rows.stages if stage not in ("base", "big")]
    if not traces:
        return ""
    lines = [[name] + [_step(rows.get(name, stage, "steps")) for stage in traces] for name in rows.rivals]
    return _table(["recorded steps: p50 / p99, served", *traces], lines)


# --- aims -------------------------------------------------------------------------------------------------------------


def aims(found: Found) -> list[tuple[str, float, bool]]:
    """Each aim in words, what was measured, and whether it was reached."""
    rows = _Rows(found)
    stores = ("lmdb", "rocksdb", "diskcache", "redis")
    hits = rows.values("rate", "base", "hits")
    cold, cpu = rows.values("rate", "base", "cold"), rows.values("cpu_us", "base", "cold")
    step = rows.values("p99_us", "base", "steps", _MIDDLE)
    out = []
    best = max((hits[name] for name in stores if name in hits), default=None)
    if best is not None and OURS in hits:
        out.append(
            ("hits/s, times the best key-value store's: at least 10", hits[OURS] / best, hits[OURS] >= 10 * best)
        )
    if "mmap" in hits and OURS in hits:
        share = hits[OURS] / hits["mmap"]
        out.append(("hits/s, share of a resident mapping's: at least 0.5", share, share >= 0.5))
    others = {name: rate for name, rate in cold.items() if name != OURS}
    if others and OURS in cold:
        name = max(others, key=others.__getitem__)
        share = cold[OURS] / others[name]
        out.append((f"cold records/s, times the best rival's ({name}): at least 1", share, share >= 1))
        ratio = cpu[OURS] / cpu[name]
        out.append((f"CPU a cold record, times that rival's ({name}): at most 1", ratio, ratio <= 1))
    for ours in (OURS, f"{OURS}, waiting"):
        if "mmap" in step and ours in step:
            ratio = step[ours] / step["mmap"]
            out.append((f"p99 of a step, times a mapping's ({ours}): below 1", ratio, ratio < 1))
    return out


def winners(found: Found) -> list[str]:
    """Where a rival is better than either of ours, in words."""
    rows = _Rows(found)
    said = []
    figures: Iterable[tuple[str, str, bool, tuple[Any, ...]]] = [
        ("hits/s", "rate", True, ("hits",)),
        ("whole records/s", "rate", True, ("hits_whole",)),
        ("one hit, p50", "p50_us", False, ("latency",)),
        ("one hit, p99", "p99_us", False, ("latency",)),
        ("CPU a hit", "cpu_us", False, ("hits",)),
        ("cold records/s", "rate", True, ("cold",)),
        ("CPU a cold record", "cpu_us", False, ("cold",)),
        ("miss to resident, p50", "p50_us", False, ("miss",)),
        ("miss to resident, p99", "p99_us", False, ("miss",)),
        *((f"p99 of a step at Zipf {s:g}", "p99_us", False, ("steps", s)) for s in rows.skews()),
        *((f"p99 of {n} sessions' steps", "p99_us", False, ("steps", _MIDDLE, n)) for n in rows.counts() if n > 1),
        ("CPU a look-up of steps", "cpu_us", False, ("steps", _MIDDLE)),
    ]
    for stage in ("base", "big"):
        for text, key, high, cell in figures:
            values = rows.values(key, stage, *cell)
            if OURS not in values or len(values) < 2:
                continue
            best = (max if high else min)(values, key=values.__getitem__)
            if not best.startswith(OURS):
                said.append(f"{stage}: {text}: {best}, {values[best]:,.3g} against {values[OURS]:,.3g}")
    return said


def _verdict(rows: _Rows) -> str:
    found = {"rows": rows._rows}
    lines = [f"| {text} | {value:.2f} | {'reached' if met else '**missed**'} |" for text, value, met in aims(found)]
    table = "\n".join(["| aim | measured | |", "|---|---|---|", *lines])
    lost = winners(found)
    won = "\n".join(["Where a rival wins:", "", *(f"* {line}" for line in lost)]) if lost else "No rival wins a figure."
    return f"{table}\n\n{won}"


# --- words ------------------------------------------------------------------------------------------------------------


def _rate(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value / 1e3:,.1f} k" if value >= 1e3 else f"{value:,.0f}"


def _microseconds(value: float) -> str:
    if value >= 1000:
        return f"{value / 1e3:,.3g} ms"
    return f"{value:,.3g} us" if value >= 0.1 else f"{1e3 * value:,.2g} ns"


def _both(row: Row) -> str:
    return f"{_microseconds(row['p50_us'])} / {_microseconds(row['p99_us'])}"


def _step(row: Row | None) -> str:
    return "–" if row is None else f"{_both(row)}, {row['served']:.0%}"


def _ram(row: Row) -> str:
    return f"{row['own_bytes'] / 2**20:,.0f} + {row['page_cache_bytes'] / 2**20:,.0f} MiB"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|".join(["", "---", *["---:"] * (len(head) - 1), ""])
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def write_page(results: Path, page: Path | None) -> int:
    """Print the tables of a file of results, or put them between the markers of a page."""
    text = show(json.loads(results.read_text()))
    if page is None:
        print(text)
        return 0
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        print(f"{page} has no {BEGIN} … {END}: put both where the tables shall be")
        return 2
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    return 0
