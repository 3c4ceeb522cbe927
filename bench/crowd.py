"""Sixty-four sessions at once against one: do as many records arrive in all, and does each session get its share?

    python bench/crowd.py [--sessions 64] [--rounds 12] [--seconds 1.5] [--out FILE]

A real daemon reads a real file directly; every look-up misses, for each session goes through records of its own in an
order of its own, and the cache holds an eighth of them. One process drives all sessions in turn and keeps the same
number of requests unanswered in all, however many sessions they belong to. Rounds of three kinds alternate:

* one: a single session has all of them
* crowd: each session has as many as the others
* greedy: as crowd, but one of them asks for three times as much as all others together

Fairness is the smallest number of fills of a session divided by the largest; the ratio of fills is the median of those
of neighbouring rounds. Exit code 1 if an aim is missed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from service_report import machine, write_report

from strataflux.client.bench.fill import FillSetup, bench_store, default_folder
from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.control_pb2 import Stats
from strataflux.proto.store_format import StoreManifest

RECORD_BYTES = 4096
CACHE_SHARE = 8
OUTSTANDING = 4096
"""Requests unanswered in all: enough for each of many sessions to have some waiting at any time."""
GREED = 3
"""So many times what all others ask for together, the greedy session does: three quarters of the reader's queue."""
NAP_SECONDS = 0.003
WARM_SECONDS = 0.5
AIMS = {"aggregate_to_one": 0.9, "fairness": 0.8, "fairness_beside_a_greedy_one": 0.8}


class Asker:
    """One session, which goes through records of its own, ``oids``, and keeps so many of them asked for."""

    def __init__(
        self, daemon: PrivateDaemon, manifest: StoreManifest, oids: NDArray[np.int64], unanswered: int
    ) -> None:
        self.session = Session.attach([manifest], selections_per_step=unanswered, runtime_dir=daemon.runtime_dir)
        self._oids = np.random.default_rng(int(oids[0])).permutation(oids)
        self._unanswered = unanswered
        self._scores = np.full(unanswered, 128, np.uint8)
        self._addresses = np.zeros(unanswered, np.uint64)
        self._first = self._next = 0  # what lies between was asked for, and is not yet known to have come

    def ask(self) -> None:
        """Ask for as many records as have come since the last call, if they are worth a step."""
        if self._next + self._unanswered > self._oids.size:
            self._first = self._next = 0
        count = self._unanswered - self.session.absent(0, self._oids[self._first : self._next])
        if count * 8 < self._unanswered:
            return
        batch = self._oids[self._next : self._next + count]
        with self.session.step():
            self.session.lookup(0, batch, self._scores[:count], self._addresses[:count])
        self._next += count
        # Requests are answered nearly in their order: what is older than two lots came, or was dropped and counted.
        self._first = max(self._first, self._next - 2 * self._unanswered)


@dataclass(frozen=True)
class Round:
    """What one round of one kind gave."""

    fills_per_second: float
    fairness: float
    cpu_microseconds_per_fill: float
    driver_cpu_share: float
    hit_share: float
    dropped: int


def play(daemon: PrivateDaemon, manifest: StoreManifest, unanswered: list[int], seconds: float) -> Round:
    """Attach a session for each entry, drive all for a while, and close them."""
    shares = np.split(np.arange(manifest.record_count), cuts(manifest.record_count, unanswered))
    with ExitStack() as stack, Control(daemon.runtime_dir) as control:
        askers = [Asker(daemon, manifest, *each) for each in zip(shares, unanswered, strict=True)]
        for asker in askers:
            stack.callback(asker.session.close)
        drive(askers, WARM_SECONDS)
        before, cpu = control.stats(), cpu_seconds(daemon.pid)
        driver, began = time.process_time(), time.perf_counter()
        drive(askers, seconds)
        driver, took = time.process_time() - driver, time.perf_counter() - began
        after = control.stats()
        used = cpu_seconds(daemon.pid) - cpu
    return round_of(before, after, took, used, driver)


def round_of(before: Stats, after: Stats, took: float, used: float, driver: float) -> Round:
    """What was counted between two moments; ``used`` and ``driver`` are CPU seconds of the daemon and of this side."""
    fills = after.fills.fills - before.fills.fills
    earlier = {row.index: row.fills for row in before.sessions}
    each = [row.fills - earlier[row.index] for row in after.sessions]
    looked = after.lookups.weight_lookups - before.lookups.weight_lookups
    hit = after.lookups.weight_hits - before.lookups.weight_hits
    dropped = [s.requests.dropped_queue + s.requests.dropped_grace + s.requests.dropped_ring for s in (before, after)]
    if fills == 0:
        raise RuntimeError(f"nothing was read within {took:.1f} s: is the disk busy? longer rounds: --seconds")
    return Round(
        fills_per_second=fills / took,
        fairness=min(each) / max(each),
        cpu_microseconds_per_fill=used / fills * 1e6,
        driver_cpu_share=driver / took,
        hit_share=hit / max(looked, 1),
        dropped=dropped[1] - dropped[0],
    )


def cuts(records: int, unanswered: list[int]) -> NDArray[np.int64]:
    """Where each session's records end: the more it asks for, the more it needs."""
    ends = np.cumsum(unanswered)[:-1] * records // sum(unanswered)
    return ends.astype(np.int64)


def drive(askers: list[Asker], seconds: float) -> None:
    """All in turn, again and again."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for asker in askers:
            asker.ask()
        time.sleep(NAP_SECONDS)


def cpu_seconds(pid: int) -> float:
    """User and system time of the daemon so far, to the nanosecond."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(sessions: int, rounds: int, seconds: float, store_bytes: int) -> dict[str, Any]:
    """Medians over the rounds of each kind, and the three figures that have an aim."""
    setup = FillSetup(store_bytes, RECORD_BYTES, store_bytes // CACHE_SHARE)
    manifest = bench_store(default_folder(), setup, lambda _: None)
    share = max(OUTSTANDING // sessions, 1)
    kinds = {
        "one": [OUTSTANDING],
        "crowd": [share] * sessions,
        "greedy": [GREED * OUTSTANDING] + [share] * (sessions - 1),
    }
    played: dict[str, list[Round]] = {kind: [] for kind in kinds}
    order = list(kinds)
    with tempfile.TemporaryDirectory(prefix="strataflux-crowd-") as folder:
        config = Path(folder, "config.toml")
        config.write_text(f"[attach]\nmax_sessions_per_uid = {sessions}\n")
        options = (f"--config={config}",)
        with PrivateDaemon([manifest.folder], weight_cache_bytes=setup.cache_bytes, options=options) as daemon:
            for _ in range(rounds):
                for kind in order:
                    played[kind].append(play(daemon, manifest, kinds[kind], seconds))
                order.reverse()
    found: dict[str, Any] = {kind: medians(each) for kind, each in played.items()}
    pairs = zip(played["crowd"], played["one"], strict=True)
    found["aggregate_to_one"] = statistics.median(many.fills_per_second / one.fills_per_second for many, one in pairs)
    found["fairness"] = found["crowd"]["fairness"]
    found["fairness_beside_a_greedy_one"] = found["greedy"]["fairness"]
    return found


def medians(rounds: list[Round]) -> dict[str, float]:
    return {
        name: round(float(statistics.median(getattr(each, name) for each in rounds)), 3)
        for name in Round.__dataclass_fields__
    }


def show(found: Mapping[str, Any]) -> None:
    """The table, then each aim."""
    print(f"{'':<8}{'fills/s':>12}{'fairness':>12}{'CPU us/fill':>14}{'driver CPU':>12}{'dropped':>12}")
    for kind in ("one", "crowd", "greedy"):
        row = found[kind]
        print(
            f"{kind:<8}{row['fills_per_second']:>12,.0f}{row['fairness']:>12.3f}"
            f"{row['cpu_microseconds_per_fill']:>14.2f}{row['driver_cpu_share']:>12.0%}{row['dropped']:>12,.0f}"
        )
    for name, aim in AIMS.items():
        print(f"{name:<32}{found[name]:.3f}, aim {aim}{'' if found[name] >= aim else '   MISSED'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--store-mib", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.sessions, options.rounds, options.seconds, options.store_mib << 20)
    show(found)
    write_report(found | {"sessions": options.sessions, "rounds": options.rounds} | machine(), options.out)
    return 0 if all(found[name] >= aim for name, aim in AIMS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
