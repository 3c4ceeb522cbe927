"""Race StrataFlux against what one would use in its place: the same records, RAM and file system, in one run.

    python bench/serve [--seconds 2] [--trace T.npz 10%] [--out FILE] [--plot FILE]
    python bench/serve report FILE [--page docs/CACHING.md]

Stages: base, records of 512 bytes with everything measured; big, many small records; one for each recorded trace, with
as many records of 2 KiB as it has and RAM for a share of them. Needs the extra `race`; a rival that is
not there is left out, with the reason. Records are written under --folder and removed. Exit code 1 if a cell failed.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from service_report import machine, write_report

from serve.cells import WIDEST
from serve.host import Host, build
from serve.loops import compile_loops
from serve.plan import Records, Stage, base_stage, big_stage, trace_stage
from serve.report import show, write_page
from serve.rival import Rival
from serve.rivals import RIVALS, SKIPPED
from strataflux.client.bench.fill import FillSetup, bench_store, default_folder
from strataflux.client.traces import load_traces
from strataflux.client.warm_up import compile_path

_TRACE_RECORD_BYTES = 2048
"""Of a channel of a small projection; KV groups are smaller, but a cache of a few megabytes measures nothing."""


def main() -> int:
    if sys.argv[1:2] == ["report"]:
        return report(sys.argv[2:])
    options = arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started ends with it
    compile_loops()
    compile_path()
    rivals = [rival for rival in RIVALS if not options.only or rival.name in options.only.split("; ")]
    skipped = {rival.name: reason for rival in rivals if (reason := rival.missing())} | SKIPPED
    found: dict[str, Any] = {"rows": [], "failed": [], "skipped": skipped, "seconds": options.seconds, **machine()}
    found["interfaces"] = {rival.name: rival.interface for rival in rivals if rival.name not in skipped}
    for stage in stages(options):
        began = time.perf_counter()
        race(stage, [rival for rival in rivals if rival.name not in skipped], options, found)
        print(f"{stage.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        write_report(found, options.out)
    print(show(found), file=sys.stdout if options.out else sys.stderr)
    if options.plot is not None:
        from serve.plots import plot

        plot(found, options.plot)
    return 1 if found["failed"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each cell")
    parser.add_argument("--records", type=int, default=1 << 20)
    parser.add_argument("--record-bytes", type=int, default=512)
    parser.add_argument("--budget-mib", type=int, default=128, help="RAM; the daemon's default")
    parser.add_argument("--big-records", type=int, default=20_000_000, help="of 64 bytes; 0 leaves the stage out")
    parser.add_argument("--sessions", default="1,4,16")
    parser.add_argument("--step", type=int, default=2048, help="look-ups of a step")
    parser.add_argument("--trace", nargs=2, metavar=("FILE", "SHARE"), action="append", default=[])
    parser.add_argument("--only", help="names, separated by '; '")
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def stages(options: argparse.Namespace) -> list[Stage]:
    budget, step = options.budget_mib << 20, options.step
    sessions = tuple(int(count) for count in options.sessions.split(","))
    found = [base_stage(options.records, options.record_bytes, budget, sessions, step)]
    for path, share in options.trace:
        part = float(share.rstrip("%")) / 100
        for trace in load_traces(Path(path)):
            name = f"{trace.name} at {share}"
            found.append(trace_stage(name, trace.keys, trace.n_keys, _TRACE_RECORD_BYTES, part))
    if options.big_records:
        found.append(big_stage(options.big_records, 64, budget, step))
    return found


def race(
    stage: Stage, kinds: Sequence[type[Rival]], options: argparse.Namespace, found: Mapping[str, list[dict[str, Any]]]
) -> None:
    """Each cell by all rivals in turn, the first of one the last of the next; ``found`` gets rows, and what failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="race-", dir=options.folder) as text, ExitStack() as stack:
        folder = Path(text)
        setup = FillSetup(stage.records * stage.record_bytes, stage.record_bytes)
        records = Records.of(bench_store(folder, setup, lambda _: None))
        width = max(WIDEST, stage.lookups_per_step)
        rivals = [kind(records, folder, stage.budget_bytes, stage.hot, width) for kind in kinds]
        wanted = {cell.kind for cell in stage.cells}
        whole = [rival for rival in rivals if stage.name == "base" or rival.count == records.count]
        rivals = [rival for rival in whole if wanted & set(rival.kinds)]
        hosts = {}
        for rival in rivals:
            rival.folder = folder / rival.name.replace(", ", "-")
            rival.folder.mkdir()
        build(rivals)
        for rival in rivals:
            hosts[rival.name] = stack.enter_context(Host.open(rival, stage, options.seconds))
        for cell in stage.cells:
            for rival in rivals:
                if cell.kind in rival.kinds:
                    print(f"{stage.name}: {cell.label}: {rival.name}", file=sys.stderr)
                    try:
                        found["rows"].append({"stage": stage.name} | hosts[rival.name].run(cell))
                    except RuntimeError as error:  # the other cells are worth having all the same
                        print(f"failed: {error}", file=sys.stderr)
                        found["failed"].append({"stage": stage.name, "said": str(error)})
            rivals.reverse()


def report(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python bench/serve report")
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="put the tables between its two markers")
    options = parser.parse_args(words)
    return write_page(options.results, options.page)


if __name__ == "__main__":
    sys.exit(main())
