"""What a restart costs the cache: the hit rate of the first steps after one, with the hot set and without.

    python bench/warm_start.py [--trace TRACE.npz] [--capacity 10%] [--policy lru] [--step-ms 15] [--out FILE]

A real daemon with a real store, and one session that looks its records up step by step, skips what is missing and rests
between steps as long as a decoder takes. The steps are those of a recorded trace of weights, over and over, or Zipf
draws. First they run until the cache is as warm as it gets (``steady``: its last 64 steps); then the daemon is stopped
and started again, once with its state folder and once without, and the steps go on where they were, at once. Exit code
1 if the first 64 warm steps hit less than 0.9 of steady. Where requests were dropped, the device or the CPU was too
slow for the steps, and the rates say more of that than of the cache: give it more time with --step-ms.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from service_report import machine, write_report

from strataflux.cache_policy.simulate import Trace
from strataflux.client.bench.fill import FillSetup, bench_store, default_folder
from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.client.traces import load_traces
from strataflux.proto.store_format import StoreManifest

FIRST_STEPS = 64
AIM = 0.9
RECORD_BYTES = 1024
SCORE = 128


@dataclass
class Steps:
    """The steps of a trace one after the other, for ever; ``next`` is the number of the one that comes."""

    trace: Trace
    rest_seconds: float
    next: int = 0

    def run(self, session: Session, count: int) -> float:
        """The hit rate of the next ``count`` steps."""
        hits = asked = 0
        for _ in range(count):
            row = self.trace.keys[self.next % len(self.trace.keys)]
            oids = np.ascontiguousarray(row[row >= 0])
            with session.step():
                hits += session.lookup(0, oids, np.full(oids.size, SCORE, np.uint8), np.zeros(oids.size, np.uint64))
            asked += oids.size
            self.next += 1
            time.sleep(self.rest_seconds)
        return hits / asked


def zipf_trace(records: int, requests: int, steps: int) -> Trace:
    """Every step draws so many different records, the n-th with a chance in proportion to 1 / n."""
    random = np.random.default_rng(11)
    chances = 1 / np.arange(1, records + 1)
    name_of = random.permutation(records)
    rows: list[NDArray[np.int64]] = []
    for _ in range(steps):
        ranks = random.choice(records, requests, replace=False, p=chances / chances.sum())
        rows.append(name_of[ranks])
    return Trace("zipf", np.stack(rows), records)


def attach(daemon: PrivateDaemon, manifest: StoreManifest, steps: Steps) -> Session:
    per_step = int((steps.trace.keys >= 0).sum(axis=1).max())
    return Session.attach([manifest], selections_per_step=per_step, runtime_dir=daemon.runtime_dir)


def life(daemon: PrivateDaemon, manifest: StoreManifest, steps: Steps, counts: list[int]) -> tuple[list[float], int]:
    """One daemon from start to stop: the hit rate of each run of so many steps, and how many requests it could not
    serve. It is stopped with the session open.
    """
    with ExitStack() as after, ExitStack() as stack:
        daemon.start()
        stack.callback(daemon.stop)
        session = attach(daemon, manifest, steps)
        after.callback(session.close)
        rates = [steps.run(session, count) for count in counts]
        with Control(daemon.runtime_dir) as control:
            requests = control.stats().requests
        return rates, requests.dropped_queue + requests.dropped_grace + requests.dropped_ring


def measure(trace: Trace, capacity: float, policy: str, rest_seconds: float, warm_steps: int) -> dict[str, Any]:
    """Hit rates before the stop, and after each kind of start."""
    setup = FillSetup(trace.n_keys * RECORD_BYTES, RECORD_BYTES, 1 << 20)
    manifest = bench_store(default_folder(), setup, lambda _: None)
    cache_bytes = int(capacity * trace.n_keys) * RECORD_BYTES
    steps = Steps(trace, rest_seconds)
    found: dict[str, Any] = {"first_steps": FIRST_STEPS, "cache_bytes": cache_bytes, "policy": policy}
    with tempfile.TemporaryDirectory(prefix="strataflux-bench-") as state:
        for kind in ("steady", "warm", "cold"):
            os.environ["STATE_DIRECTORY"] = state
            if kind == "cold":
                del os.environ["STATE_DIRECTORY"]
            daemon = PrivateDaemon([manifest.folder], weight_cache_bytes=cache_bytes, policy=policy)
            if kind == "steady":
                rates, dropped = life(daemon, manifest, steps, [FIRST_STEPS, warm_steps, FIRST_STEPS])
                found[kind], found["dropped"] = rates[-1], dropped
                resume = steps.next
                continue
            steps.next = resume
            (found[kind], found[f"{kind}_later"]), found[f"{kind}_dropped"] = life(
                daemon, manifest, steps, [FIRST_STEPS, FIRST_STEPS]
            )
    found["warm_to_steady"] = found["warm"] / found["steady"]
    found["cold_to_steady"] = found["cold"] / found["steady"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--capacity", default="10%")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--records", type=int, default=60_000, help="of the Zipf store")
    parser.add_argument("--requests", type=int, default=1000, help="of a Zipf step")
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trace = load_traces(options.trace)[0] if options.trace else zipf_trace(options.records, options.requests, 512)
    capacity = float(options.capacity.removesuffix("%")) / 100
    found = measure(trace, capacity, options.policy, options.step_ms / 1000, options.warm_steps)
    write_report({**machine(), "trace": trace.name, "capacity": options.capacity, **found}, options.out)
    return 0 if found["warm_to_steady"] >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
