"""What a decision of each replacement policy costs, against exact LRU's in the same run.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/policies.py [--policy lru,blend] [--slots 1048576] [--json]

A cache of --slots slots is filled from a stream of keys, then rounds of all policies are interleaved over the same
further requests; the fastest round of each counts. A request is a directory look-up and what the policy is asked:
``touch`` for a hit; ``requested``, ``candidate``, ``admit``, ``remove`` and ``insert`` for a miss. Uniform: twice as
many keys as slots; Zipf: exponent 1 over four times as many, ranks shuffled.
"""

import argparse
import json
import time
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.policies import POLICIES, find_policies

STEP = 16384  # requests with one clock value
CHURN = 4


def requests(insert, candidate, touch, remove, admit, requested, s, keys, clock, directory, held, filled):  # type: ignore[no-untyped-def]
    hits = 0
    for at in range(len(keys)):
        key, now = keys[at], clock + at // STEP
        slot = directory[key]
        if slot >= 0:
            touch(s, slot, now, 0)
            hits += 1
            continue
        requested(s, key, 0, now)
        if filled < len(held):
            slot = filled
            filled += 1
        else:
            slot = candidate(s, 0)
            if not admit(s, key, 0, 0, now):
                continue
            directory[held[slot]] = -1
            remove(s, slot, True)
        insert(s, slot, 0, key, now, 0)
        directory[key], held[slot] = slot, key
    return hits


def streams(rng: np.random.Generator, slots: int, count: int) -> dict[str, NDArray[np.int64]]:
    n_keys = 4 * slots
    keys = rng.permutation(n_keys)
    ranks = np.minimum((4.0 * slots) ** rng.random(count), n_keys - 1).astype(np.int64)
    # Each rank goes to another key once in CHURN turn-overs, ranks at times of their own.
    renewals = (np.arange(count) + rng.integers(0, CHURN * slots, n_keys)[ranks]) // (CHURN * slots)
    return {
        "uniform": rng.integers(0, 2 * slots, count),
        "zipf": keys[ranks],
        "churn": keys[(ranks + renewals * 7919) % n_keys],
    }


def fill(name: str, replay: Any, first: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The policy's state when it has been asked for the keys ``first``, as many as slots, each once; its directory, and
    what each slot holds.
    """
    slots = len(first)
    state = POLICIES[name].make_state(slots, 1, 4 * slots)
    directory, held = np.full(4 * slots, -1, np.int64), np.full(slots, -1, np.int64)
    replay(*calls(name), state, first, 1, directory, held, 0)
    return state, directory, held


def calls(name: str) -> tuple[Any, ...]:
    p = POLICIES[name]
    return p.insert, p.candidate, p.touch, p.remove, p.admit, p.requested


def distinct(stream: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
    """The first ``slots`` keys of a stream, and others if it has not as many."""
    _, first = np.unique(stream, return_index=True)
    asked = stream[np.sort(first)][:slots]
    return np.concatenate([asked, np.setdiff1d(np.arange(4 * slots), asked)[: slots - len(asked)]])


def measure(names: list[str], slots: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
    replay: Any = numba.njit(**options)(requests)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, stream in streams(np.random.default_rng(0), slots, (rounds + 3) * slots).items():
        best: dict[str, float] = {}
        hits: dict[str, int] = {}
        first = distinct(stream, slots)
        caches = {name: fill(name, replay, first) for name in names}
        for part in range(rounds + 3):
            keys = stream[part * slots : (part + 1) * slots]
            for name, (state, directory, held) in caches.items():
                clock = slots // STEP + 2 + part * (slots // STEP + 1)
                start = time.thread_time_ns()
                hits[name] = replay(*calls(name), state, keys, clock, directory, held, slots)
                took = (time.thread_time_ns() - start) / len(keys)
                if part >= 3:  # two parts to wear the cache in, one that compiles
                    best[name] = min(best.get(name, took), took)
        results[kind] = {
            name: {"nanoseconds": best[name], "ratio_to_lru": best[name] / best["lru"], "hit_rate": hits[name] / slots}
            for name in names
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", default="all", help="all, or names separated by commas; lru is added")
    options = parser.parse_args()
    results = measure([*{"lru": 0} | find_policies(options.policy)], options.slots, options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    for kind, rows in results.items():
        for name, row in rows.items():
            values = f"{row['nanoseconds']:6.0f} ns {row['ratio_to_lru']:5.2f} x lru, hit rate {row['hit_rate']:.3f}"
            print(f"{kind:8} {name:8} {values}")


if __name__ == "__main__":
    main()
