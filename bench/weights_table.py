"""Turn the rows of ``weights_sweep.py`` into the tables of docs/RESULTS.md.

python bench/weights_table.py rows.jsonl
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def name_of(row: Row) -> str:
    """A base with its settings, as a person says it."""
    detail = f"g{row['group']}" if row["group"] else f"{row['guides']} groups" if row["guides"] else "a row"
    return f"{row['base']} {row['bits']}-bit, {detail}"


def matches(row: Row, **wanted: object) -> bool:
    """Whether ``row`` is the default in all but ``wanted``."""
    plain: dict[str, object] = {"fit": False, "choice": "largest", "mlp": "channels", "shift": 0.0}
    return all(row[key] == value for key, value in (plain | wanted).items())


def cell(rows: Iterable[Row], **wanted: object) -> str:
    """The KL of the one row that matches, or a dash."""
    found = [row["kl"] for row in rows if matches(row, **wanted)]
    return f"{found[0]:.3f}" if found else "-"


def table(headings: list[str], by_name: dict[str, list[Row]], line: Callable[[list[Row]], list[str]]) -> str:
    """One Markdown table, one line a base."""
    lines = [f"| {' | '.join(['base', *headings])} |", f"|---|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join([name, *line(rows)])} |" for name, rows in by_name.items()]
    return "\n".join(lines)


def budgets(by_name: dict[str, list[Row]]) -> str:
    """Base and refined KL, plain / fitted, and how much more choosing by magnitude removes than chance does."""

    def line(rows: list[Row]) -> list[str]:
        fitted = [f"{cell(rows, k=k)} / {cell(rows, k=k, fit=True)}" for k in (16, 32, 64)]
        kl = {row["choice"]: row["kl"] for row in rows if row["k"] == 32 and matches(row, choice=row["choice"])}
        base = next(row["kl"] for row in rows if row["k"] == 0)
        by_chance = base - kl["random"]
        ratio = "chance removes nothing" if by_chance <= 0 else f"{(base - kl['largest']) / by_chance:.1f}"
        return [f"{rows[0]['bits_per_weight']:.2f}", f"{base:.3f}", *fitted, cell(rows, k=1024), ratio]

    headings = ["bits a weight", "base KL", "k = 16", "k = 32", "k = 64", "all", "magnitude : random"]
    return table(headings, by_name, line)


def bundles(by_name: dict[str, list[Row]]) -> str:
    """Channels against bundles of as many bytes, plain and fitted."""

    def line(rows: list[Row]) -> list[str]:
        return [
            f"{cell(rows, k=k, fit=fit)} / {cell(rows, k=k, fit=fit, mlp='bundles')}"
            for fit in (False, True)
            for k in (16, 32, 64)
        ]

    fitted = [f"k = {k}, fitted" for k in (16, 32, 64)]
    return table(["k = 16", "k = 32", "k = 64", *fitted], by_name, line)


def shifts(by_name: dict[str, list[Row]]) -> str:
    """Shifts of all sets alike."""

    def line(rows: list[Row]) -> list[str]:
        return [cell(rows, k=32, shift=blocks) for blocks in (0.0, 0.5, 1.0, 2.0)]

    return table(["s = 0", "s = 0.5", "s = 1", "s = 2"], by_name, line)


def main() -> None:
    rows: list[Row] = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(name_of(row), []).append(row)
    first = rows[0]
    print(f"{first['tokens']} scored tokens, reference perplexity {first['reference_ppl']:.2f}; calibrated on")
    print(f"{first['calibration_tokens']} tokens of {first['calibration']}. Plain / fitted:\n")
    print(budgets(by_name))
    print("\nChannels / bundles at equal bytes:\n")
    print(bundles(by_name))
    if any(row["shift"] for row in rows):
        print("\nAll four sets shifted by s blocks at k = 32, plain:\n")
        print(shifts(by_name))


if __name__ == "__main__":
    main()
