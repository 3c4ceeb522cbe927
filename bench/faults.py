"""Give the reader a million faults and see that none is served and each is counted under its reason.

    python bench/faults.py [--faults 1000000] [--seed 1] [--out FILE]

The reader's own loop runs over a disk that fails at random: nine tenths of the faults are of reads, one tenth of writes
of KV blocks, torn ones among them. A ledger says what each must have moved; a table shows fault against counter, and
below it the sum that was expected and what the reader counted. Exit code 1 if any number differs or any byte was wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # last: the folders share names with other packages
from service_report import machine, write_report

from tests.fakes.ledger import Check, Ledger
from tests.fakes.read_chaos import ReadChaos
from tests.fakes.write_chaos import WriteChaos

WRITE_SHARE = 10
"""One fault in so many is of a write."""


def show(title: str, ledger: Ledger, checks: Sequence[Check]) -> None:
    """The table of faults against counters, then every check."""
    columns = ledger.columns()
    counted = {check.name: check for check in checks}
    rows = [
        (kind, count, [ledger.cells[kind, name] for name in columns]) for kind, count in sorted(ledger.given.items())
    ]
    rows.append(("expected in all", sum(ledger.given.values()), [counted[name].expected for name in columns]))
    rows.append(("counted", sum(ledger.given.values()), [counted[name].counted for name in columns]))
    print(f"\n{title:<20}{'given':>10}" + "".join(f"{name:>13}" for name in columns))
    for kind, count, cells in rows:
        print(f"{kind:<20}{count:>10,}" + "".join(f"{cell:>13,}" if cell else f"{'':>13}" for cell in cells))
    for check in checks:
        if check.name not in columns:
            mark = "" if check.right else "   DIFFERS"
            print(f"  {check.name:<28}{check.expected:>14,} expected {check.counted:>14,} counted{mark}")
    print(f"  {'records compared':<28}{ledger.compared:>14,}")


def summary(chaos: ReadChaos | WriteChaos, seconds: float) -> dict[str, Any]:
    """One part of the report."""
    return {
        "faults": chaos.given,
        "given": dict(sorted(chaos.ledger.given.items())),
        "counted": {check.name: check.counted for check in chaos.checks()},
        "differ_from_expected": {check.name: check.expected for check in chaos.checks() if not check.right},
        "records_compared": chaos.ledger.compared,
        "wrong_records_served": chaos.ledger.wrong,
        "cpu_seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.faults:,} faults")
    writes = options.faults // WRITE_SHARE
    right, parts = True, {}
    with tempfile.TemporaryDirectory(prefix="strataflux-faults-") as folder:
        for title, count, make in (
            ("reads", options.faults - writes, lambda: ReadChaos(Path(folder, "store"), options.seed)),
            ("writes of KV", writes, lambda: WriteChaos(Path(folder, "kv"), options.seed)),
        ):
            began, chaos = time.process_time(), make()
            chaos.run(count)
            show(title, chaos.ledger, chaos.checks())
            right &= all(check.right for check in chaos.checks())
            parts[title] = summary(chaos, time.process_time() - began)
            chaos.close()
    write_report({"seed": options.seed, **parts, "all_counted_none_served": right} | machine(), options.out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
