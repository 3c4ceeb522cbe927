"""Rubbish for a daemon, by the million, while a well-behaved session measures how long its misses take.

    python bench/fuzz.py [--entries 10000000] [--messages 100000] [--rounds 5] [--seed 1] [--out FILE]

A process of its own sprays one session's request ring with entries and the attach and control sockets with messages
that no right client would send. What that costs others is their 99th percentile from miss to resident, in rounds that
alternate: *idle*; *elsewhere*, where the same rubbish goes to a second daemon, so that the machine is as busy; and
*here*. Exit code 1 if the daemon died, a byte was wrong, a record never came, an entry was not counted, a descriptor
was left, or the percentile here is beyond that elsewhere by more than rounds of the latter differ among themselves.
"""

import argparse
import ctypes
import select
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from service_report import machine, write_report

from strataflux.client.bench.fill import FillSetup, bench_store
from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.store_format import StoreManifest, open_store

SETUP = FillSetup(store_bytes=64 << 20, record_bytes=4096, cache_bytes=8 << 20)
BATCH = 8
PAUSE_SECONDS = 0.0005
LOST_SECONDS = 5.0
COMPARED = 16
"""Of so many batches one is read and compared."""
WARM = 300
LEAST_NOISE = 1.1
"""Rounds of a few seconds differ by as much on any machine."""
KINDS = ("idle", "elsewhere", "here")


@dataclass
class Probe:
    """A well-behaved session that looks records up which are absent, and waits for each."""

    session: Session
    manifest: StoreManifest
    records: NDArray[np.uint8]  # u8 [records, record_bytes], what each must be
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(4))
    batches: int = 0
    lost: int = 0
    compared: int = 0
    wrong: int = 0

    def batch(self) -> list[float]:
        """Seconds from look-up to resident, of those that were absent."""
        oids = np.sort(self.random.choice(self.manifest.record_count, BATCH, replace=False)).astype(np.int64)
        addresses, came = np.zeros(BATCH, np.uint64), []
        began = time.perf_counter()
        with self.session.step():
            self.session.lookup(0, oids, np.full(BATCH, 200, np.uint8), addresses)
        left = int(np.count_nonzero(addresses == 0))
        while left and time.perf_counter() - began < LOST_SECONDS:
            absent = self.session.absent(0, oids)
            came += [time.perf_counter() - began] * max(left - absent, 0)
            left = min(left, absent)
        self.lost += left
        self.batches += 1
        if self.batches % COMPARED == 0:
            self._compare(oids)
        time.sleep(PAUSE_SECONDS)
        return came

    def _compare(self, oids: NDArray[np.int64]) -> None:
        addresses = np.zeros(BATCH, np.uint64)
        with self.session.step() as step:
            self.session.lookup(0, oids, np.full(BATCH, 200, np.uint8), addresses)
            found = {int(oid): bytes_at(int(at)) for oid, at in zip(oids, addresses, strict=True) if at}
            valid = step.end()
        if valid:
            self.compared += len(found)
            self.wrong += sum(data != self.records[oid].tobytes() for oid, data in found.items())


def bytes_at(address: int) -> bytes:
    return ctypes.string_at(address, SETUP.record_bytes)


class Fuzzer:
    """The process that sends rubbish. Pairs: construction / ``close``."""

    def __init__(self, here: PrivateDaemon, elsewhere: PrivateDaemon, store: Path, seed: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fuzzer.py")), str(store), str(seed)]
        self._process = subprocess.Popen(
            [*command, str(here.runtime_dir), str(elsewhere.runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.await_word("ready")

    def begin(self, target: str, entries: int, messages: int) -> None:
        """Send so much to ``here`` or ``elsewhere``; :meth:`done` tells when it is over."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{target} {entries} {messages}\n")
        self._process.stdin.flush()

    def done(self) -> bool:
        """The last work is over. Does not wait."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 0)[0]:
            return False
        self.await_word("done")
        return True

    def await_word(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"the fuzzer said {said!r} instead of {word!r}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise RuntimeError(f"the fuzzer ended with {self._process.returncode}")


def run_round(probe: Probe, fuzzer: Fuzzer, kind: str, entries: int, messages: int, idle_seconds: float) -> list[float]:
    """Latencies of one round; an idle one lasts as long as it is told to, another until the rubbish is sent."""
    found: list[float] = []
    end = time.perf_counter() + idle_seconds
    if kind != "idle":
        fuzzer.begin(kind, entries, messages)
    while time.perf_counter() < end if kind == "idle" else not fuzzer.done():
        found += probe.batch()
    return found


def measure(store: StoreManifest, entries: int, messages: int, rounds: int, seed: int) -> dict[str, Any]:
    rows: dict[str, list[float]] = {kind: [] for kind in KINDS}
    last = 2.0
    with ExitStack() as stack:
        here, elsewhere = (
            stack.enter_context(PrivateDaemon([store.folder], weight_cache_bytes=SETUP.cache_bytes)) for _ in range(2)
        )
        control = stack.enter_context(Control(here.runtime_dir))
        session = stack.enter_context(Session.attach([store], selections_per_step=64, runtime_dir=here.runtime_dir))
        probe = Probe(session, store, records_of(store))
        fuzzer = Fuzzer(here, elsewhere, store.folder, seed)
        for kind in KINDS:  # what a daemon opens once, and keeps, is no leak
            run_round(probe, fuzzer, kind, WARM, WARM, 1.0)
        taken, descriptors = account(control)["entries_taken"], open_descriptors(here.pid)
        for _ in range(rounds):
            for kind in KINDS:
                began = time.perf_counter()
                seconds = run_round(probe, fuzzer, kind, entries // rounds, messages // rounds, last)
                last = time.perf_counter() - began if kind == "here" else last
                rows[kind].append(float(np.percentile(seconds, 99)))
        accounts = account(control)
        accounts["entries_taken"] -= taken
        left = await_descriptors(here.pid, descriptors, probe)
        fuzzer.close()
        return (
            verdict(rows)
            | accounts
            | {
                "records_compared": probe.compared,
                "wrong_records": probe.wrong,
                "records_that_never_came": probe.lost,
                "descriptors_left": left,
                "state": control.info().state,
                "sessions_left": sessions_left(control, probe),
            }
        )


def run_idle(probe: Probe, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        probe.batch()


def account(control: Control) -> dict[str, int]:
    """What became of the ring entries of the fuzzer's session: each is counted once."""
    stats = control.stats()
    rows = {row.session: row.stats for row in control.sessions()}
    names = {row.session: row.client for row in control.sessions()}
    (bad,) = (row for session, row in rows.items() if names[session] == "fuzzer")
    right = sum(row.requests for session, row in rows.items() if names[session] != "fuzzer")
    return {
        "entries_taken": bad.requests + sum(kind.prefetches for kind in stats.kinds),
        "entries_invalid": bad.invalid,
        "entries_that_name_a_record": bad.requests - bad.invalid,
        "entries_not_counted": bad.requests - bad.invalid + right - stats.requests.taken,
        "invalid_of_others": sum(row.invalid for session, row in rows.items() if names[session] != "fuzzer"),
    }


def verdict(rows: dict[str, list[float]]) -> dict[str, Any]:
    p99 = {kind: statistics.median(found) for kind, found in rows.items()}
    noise = max(max(rows["elsewhere"]) / p99["elsewhere"], LEAST_NOISE)
    return {
        "p99_microseconds": {kind: [round(value * 1e6, 1) for value in found] for kind, found in rows.items()},
        "p99_here_to_elsewhere": round(p99["here"] / p99["elsewhere"], 3),
        "p99_here_to_idle": round(p99["here"] / p99["idle"], 3),
        "noise_of_elsewhere": round(noise, 3),
    }


def sessions_left(control: Control, probe: Probe) -> int:
    """Sessions beside the well-behaved one, once the fuzzer's end was noticed."""
    end = time.perf_counter() + LOST_SECONDS
    while len(control.sessions()) > 1 and time.perf_counter() < end:
        run_idle(probe, 0.1)
    return len(control.sessions()) - 1


def records_of(store: StoreManifest) -> NDArray[np.uint8]:
    section = store.sections[0]
    raw = np.memmap(store.records_path, np.uint8, "r", section.offset, (section.count * section.stride,))
    return raw.reshape(section.count, section.stride)[:, : section.record_bytes]


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def await_descriptors(pid: int, before: int, probe: Probe) -> int:
    """How many descriptors more than before stay open once connections that were cut are noticed."""
    end = time.perf_counter() + 10
    while open_descriptors(pid) > before and time.perf_counter() < end:
        run_idle(probe, 0.1)
    return max(open_descriptors(pid) - before, 0)


ZEROS = (
    "wrong_records",
    "records_that_never_came",
    "descriptors_left",
    "sessions_left",
    "entries_not_counted",
    "invalid_of_others",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strataflux-fuzz-") as folder:
        store = bench_store(Path(folder), SETUP, lambda _: None)
        found = measure(open_store(store.folder), options.entries, options.messages, options.rounds, options.seed)
    found |= {"messages": options.messages // options.rounds * options.rounds, "seed": options.seed} | machine()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}", file=sys.stderr)
    write_report(found, options.out)
    unmoved = found["p99_here_to_elsewhere"] <= found["noise_of_elsewhere"]
    enough = found["entries_taken"] >= options.entries // options.rounds * options.rounds
    return 0 if unmoved and enough and not any(found[name] for name in ZEROS) else 1


if __name__ == "__main__":
    sys.exit(main())
