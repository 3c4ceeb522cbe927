"""Traces through policies, and through the optimum.

A trace is a matrix of keys: one row a step, its requests in order. A simulated cache holds ``slots`` records of one
class and serves a request from a slot or misses; a miss is filled at once, or after the step (``next_step``), as a
reader does that runs beside the decoder. The clock is the number of the step.

The optimum is Belady's with bypass: on a miss, of the resident keys and the missed one, the one that is used again
furthest ahead does without a slot. It is exact for equal records and immediate fill, and is always computed so.
"""

import heapq
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import lru
from strataflux.cache_policy.base import INTACT, Policy
from strataflux.proto.compiled import borrowing, compiled

__all__ = ["Rates", "Trace", "lru_lazy", "optimum", "quantize_scores", "run"]


@dataclass(frozen=True)
class Trace:
    """Requests of a recorded run.

    Attributes:
        name: how results name it.
        keys: i64[steps, requests], 0 … n_keys - 1, in the order they were asked for; -1 where a step asked for less.
        n_keys: records of the store: what a capacity is a share of.
        scores: f32[steps, requests] selection score of each request, ≥ 0; None if not recorded.
    """

    name: str
    keys: NDArray[np.int64]
    n_keys: int
    scores: NDArray[np.float32] | None = None

    def weights(self) -> NDArray[np.float32]:
        """The scores, or 1 for every request; 0 where there is none."""
        scores = np.ones(self.keys.shape, np.float32) if self.scores is None else self.scores
        return np.where(self.keys < 0, np.float32(0), scores)

    @property
    def requests(self) -> int:
        """Requests of all steps."""
        return int((self.keys >= 0).sum())


@dataclass(frozen=True)
class Rates:
    """What a cache served.

    Attributes:
        hit_rate: share of requests.
        weighted_hit_rate: share of the selection score; the same where no scores were recorded.
    """

    hit_rate: float
    weighted_hit_rate: float


def run(policy: Policy, trace: Trace, slots: int, next_step: bool = False) -> Rates:
    """Replay ``trace`` through a cache of ``slots`` slots.

    Raises:
        RuntimeError: the policy's own check finds a broken invariant afterwards (a bug of the policy).
    """
    state = policy.make_state(slots, 1, trace.n_keys)
    weights = trace.weights()
    directory, held = np.full(trace.n_keys, -1, np.int64), np.full(slots, -1, np.int64)
    calls = (policy.insert, policy.candidate, policy.touch, policy.remove, policy.admit, policy.requested)
    scores = quantize_scores(trace.scores, trace.keys.shape)
    hits, served = _replay(*calls, state, trace.keys, weights, scores, directory, held, next_step)
    code = policy.check_integrity(state)
    if code != INTACT:
        raise RuntimeError(f"{policy} broke its invariant {code} on {trace.name} with {slots} slots")
    return Rates(hits / trace.requests, served / float(weights.sum(dtype=np.float64)))


def lru_lazy(trace: Trace, slots: int, next_step: bool = False) -> Rates:
    """As :func:`run` for LRU whose hits only leave stamps, which :func:`lru.choose_victim` reads."""
    state = lru.make_state(slots, 1, 0)
    weights = trace.weights()
    directory, held = np.full(trace.n_keys, -1, np.int64), np.full(slots, -1, np.int64)
    last_used, stepped = np.zeros(slots, np.uint32), np.zeros(1, np.uint32)
    stamps = np.array([last_used.ctypes.data], np.uint64)
    arrays = (last_used, stamps, stepped)
    hits, served = _replay_lazy(state, trace.keys, weights, directory, held, *arrays, next_step)
    return Rates(hits / trace.requests, served / float(weights.sum(dtype=np.float64)))


def optimum(trace: Trace, slots: int) -> Rates:
    """The most hits any policy can have with immediate fill (it maximises hits, not the score)."""
    weights = trace.weights()
    asked = trace.keys >= 0
    hits, served = _belady(trace.keys[asked], weights[asked], trace.n_keys, slots)
    return Rates(hits / trace.requests, served / float(weights.sum(dtype=np.float64)))


def quantize_scores(scores: NDArray[np.float32] | None, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Scores as requests carry them: ``1 + clip(floor(16 * (log2(v) + 12)), 0, 254)``, 0 = unknown."""
    if scores is None:
        return np.zeros(shape, np.uint8)
    with np.errstate(divide="ignore"):
        steps = np.floor(16 * (np.log2(scores) + 12))
    return np.asarray(1 + np.clip(steps, 0, 254), np.uint8)


def _replay_requests(
    insert: Any,
    candidate: Any,
    touch: Any,
    remove: Any,
    admit: Any,
    requested: Any,
    s: Any,
    keys: NDArray[Any],
    weights: NDArray[Any],
    scores: NDArray[Any],
    directory: NDArray[Any],
    held: NDArray[Any],
    next_step: bool,
) -> tuple[int, float]:
    hits, served, filled = 0, 0.0, 0
    for step in range(keys.shape[0]):
        clock = step + 1
        # With immediate fill a step has as many fills of one request as requests, else one fill of all at its end.
        width = keys.shape[1] if next_step else 1
        for first in range(0, keys.shape[1], width):
            for at in range(first, first + width):
                key = keys[step, at]
                if key < 0:
                    continue
                slot = directory[key]
                if slot >= 0:
                    touch(s, slot, clock, scores[step, at])
                    hits += 1
                    served += weights[step, at]
                else:
                    requested(s, key, scores[step, at], clock)
            for at in range(first, first + width):
                key = keys[step, at]
                if key < 0 or directory[key] >= 0:
                    continue
                slot = filled
                if filled < len(held):
                    filled += 1
                else:
                    slot = candidate(s, 0)
                    if not admit(s, key, 0, scores[step, at], clock):
                        continue
                    directory[held[slot]] = -1
                    remove(s, slot, True)
                insert(s, slot, 0, key, clock, scores[step, at])
                directory[key], held[slot] = slot, key
    return hits, served


# Compiled anew for each policy it is given: functions as arguments are types of their own, which a cache on disk never
# finds again, so this one writes none.
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False}
_replay: Final[Any] = numba.njit(**_OPTIONS)(_replay_requests)


@borrowing
def _replay_lazy(
    s: Any,
    keys: NDArray[Any],
    weights: NDArray[Any],
    directory: NDArray[Any],
    held: NDArray[Any],
    last_used: NDArray[Any],
    stamps: NDArray[Any],
    stepped: NDArray[Any],
    next_step: bool,
) -> tuple[int, float]:
    hits, served, filled = 0, 0.0, 0
    for step in range(keys.shape[0]):
        clock = step + 1
        stepped[0] = clock
        width = keys.shape[1] if next_step else 1
        for first in range(0, keys.shape[1], width):
            for at in range(first, first + width):
                key = keys[step, at]
                if key < 0:
                    continue
                slot = directory[key]
                if slot >= 0:
                    last_used[slot] = clock
                    hits += 1
                    served += weights[step, at]
            for at in range(first, first + width):
                key = keys[step, at]
                if key < 0 or directory[key] >= 0:
                    continue
                slot = filled
                if filled < len(held):
                    filled += 1
                else:
                    slot = lru.choose_victim(s, 0, clock, stamps, stepped, 1)
                    directory[held[slot]] = -1
                    lru.remove(s, slot, True)
                lru.insert(s, slot, 0, key, clock, 0)
                directory[key], held[slot] = slot, key
    return hits, served


@compiled
def _belady(keys: NDArray[Any], weights: NDArray[Any], n_keys: int, slots: int) -> tuple[int, float]:
    never = len(keys)
    following = np.empty(never, np.int64)
    upcoming = np.full(n_keys, never)
    for at in range(never - 1, -1, -1):
        following[at] = upcoming[keys[at]]
        upcoming[keys[at]] = at
    hits, served, resident = 0, 0.0, 0
    due = np.full(n_keys, -1)  # when a resident key is used next; -1 = not resident
    furthest = [0]  # heap of -due, with entries left behind by uses; the 0 below all others keeps its type
    for at in range(never):
        key = keys[at]
        if due[key] == at:
            hits += 1
            served += weights[at]
            resident -= 1
            due[key] = -1
        # A key without a further use needs no slot at all.
        if following[at] == never:
            continue
        while resident == slots and due[keys[-furthest[0]]] != -furthest[0]:
            heapq.heappop(furthest)
        if resident == slots:
            if -furthest[0] < following[at]:
                continue
            due[keys[-heapq.heappop(furthest)]] = -1
            resident -= 1
        due[key] = following[at]
        resident += 1
        heapq.heappush(furthest, -following[at])
    return hits, served
