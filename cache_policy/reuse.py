"""A model of reuse, learnt while it is used: how likely a key is asked for in the next step, from its own past.

What is known of a key (``past``, part of a slot's node or of a ghost) is the tick of its last use and four counts of
uses that decay with half-lives of 4, 16, 64 and 256 ticks, kept as log2. A tick is the time in which a key is used at
most once: a decode step, one value of the tier's clock. Where many keys repeat within one, ticks are cut short. The
estimate, a log-odds, is a sum of five table entries::

    v = Σ_h T_h[rate of half-life h, age] + T_4[count of half-life 256, ticks since the start]

where *age* is the number of ticks since the last use, in octaves, and *rate* the decayed count divided by what a key
used at every tick would have, in half-octaves. The first four say how frequency and recency combine at four spans of
memory; the last says what a count is worth while little has been seen. No weight between frequency and recency is
given: the entries are fitted online by the gradient of the logarithmic loss with a step per entry (AdaGrad; Duchi,
Hazan and Singer, JMLR 2011), from uses (1) and from sampled keys that were not used when their turn came (0, weighted
by how many keys a sample stands for). Until something is learnt, ``v`` falls with age and rises with the longest count.

All functions take ``past``: a structured record with ``key`` (u8), ``last`` (u4) and ``counts`` (f4[4]).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import later_by, wide
from strataflux.proto.compiled import borrowing

__all__ = [
    "FIELDS",
    "Model",
    "advance",
    "begin",
    "copy_past",
    "estimate",
    "learn_absence",
    "make_model",
    "pace",
    "used",
]

FIELDS: list[tuple[str, str, int] | tuple[str, str]] = [("key", "u8"), ("counts", "f4", 4), ("last", "u4")]
"""What a past is made of; a policy's own fields follow."""

_SPANS = 4
_RATES, _AGES = 24, 16  # half-octaves down from 1; octaves of ticks
_TABLE = _RATES * _AGES
_ENTRIES = (_SPANS + 1) * _TABLE
_STEP = 0.1  # AdaGrad's one rate; three times more or less moves hit rates by at most 0.2 point
_TABLES = 256  # tables of stores that a session can number
_SOFT_FIRST, _SOFT_SCALE, _SOFT_SIZE = -16, 32, 1024  # log2(1 + 2**x) for x in [-16, 16)

# Parts of Model.values. Few arrays, because compiled calls that are not inlined pass each of them in seven words.
_SQUARES = _ENTRIES  # sum of squared gradients of each entry
_DECAY = 2 * _ENTRIES  # octaves a count loses in a tick, one a span
_FULL = _DECAY + _SPANS  # log2 of the decayed count of a key used at every tick so far, one a span
_PACE = _FULL + _SPANS  # requests a tick
_SOFT = _PACE + 1

# Parts of Model.now.
_TICK, _CLOCK, _REQUESTS, _OCTAVE = 0, 1, 2, 3  # tick; its clock; requests in it; octave of ticks since the start
_REPEATS, _LONGEST = 4, 5  # second uses of a key in this tick; requests after which a tick ends in any case
_DESCENTS, _IN_ORDER = 6, 7  # requests below the one before in the same table; whether the tick before went in order
_SHORTEST = 8  # requests a tick that is cut short has at least
_CURSORS = 9  # the key asked for last in each table

_NO_LIMIT = 1 << 40


class Model(NamedTuple):
    """The tables and the present moment; the parts of both arrays are named above."""

    values: NDArray[np.float32]
    now: NDArray[np.int64]


def make_model(shortest_tick: int) -> Model:
    """A model that has seen nothing and ranks by age and frequency alike.

    ``shortest_tick``: requests; recency that is finer than that is of no use to the caller.
    """
    rate, age = np.arange(_RATES)[:, None], np.arange(_AGES)[None, :]
    weights = np.zeros((_SPANS + 1, _RATES, _AGES))
    # Half the log-odds of the rate itself, half of one use in the present age: neither is trusted alone.
    weights[_SPANS - 1] = -np.log(2) * (rate / 2 + age) / 2
    grid = _SOFT_FIRST + np.arange(_SOFT_SIZE) / _SOFT_SCALE
    decay = 1 / 4.0 ** np.arange(1, _SPANS + 1)
    parts = (weights.ravel(), np.ones(_ENTRIES), decay, np.zeros(_SPANS), np.ones(1), np.log2(1 + 2.0**grid))
    now = np.full(_CURSORS + _TABLES, -1, np.int64)
    now[:_CURSORS] = 1, 0, 0, 0, 0, _NO_LIMIT, 0, 0, shortest_tick
    return Model(np.concatenate(parts).astype(np.float32), now)


@borrowing
def advance(m: Model, key: int, clock: int) -> None:
    """``key`` is asked for at ``clock``: a later clock than any before starts a tick."""
    if later_by(clock, m.now[_CLOCK]) > 0:
        m.now[_CLOCK] = clock
        _start_tick(m)
    elif m.now[_REQUESTS] >= m.now[_LONGEST]:
        _start_tick(m)
    cursor = _CURSORS + ((key >> 40) & (_TABLES - 1))
    m.now[_REQUESTS] += 1
    m.now[_DESCENTS] += key < m.now[cursor]
    m.now[cursor] = key


@borrowing
def _start_tick(m: Model) -> None:
    requests, repeats = m.now[_REQUESTS], m.now[_REPEATS]
    if requests:
        m.values[_PACE] += (requests - m.values[_PACE]) / min(m.now[_TICK] - 1, 16)
        # Where keys repeat within a tick the clock is too coarse to tell recent from old.
        m.now[_IN_ORDER] = m.now[_DESCENTS] * 4 < requests
        if repeats * 8 > requests and requests > m.now[_SHORTEST]:
            m.now[_LONGEST] = max(requests // 2, m.now[_SHORTEST])
        elif repeats * 64 < requests:
            m.now[_LONGEST] = min(m.now[_LONGEST] * 2, _NO_LIMIT)
    m.now[_TICK] += 1
    m.now[_REQUESTS] = 0
    m.now[_REPEATS] = 0
    m.now[_DESCENTS] = 0
    m.now[_OCTAVE] = min(_octave(m.now[_TICK]), _AGES - 1)
    for span in range(_SPANS):
        m.values[_FULL + span] = _soft_plus(m, m.values[_FULL + span] - m.values[_DECAY + span])


@borrowing
def pace(m: Model) -> float:
    """Requests a tick, over about the last sixteen ticks."""
    return m.values[_PACE]  # type: ignore[no-any-return]


@borrowing
def begin(m: Model, past: Any, key: int) -> None:
    """``past`` becomes that of a key first seen now."""
    past.key = key
    past.last = m.now[_TICK]
    for span in range(_SPANS):
        past.counts[span] = 0


@borrowing
def copy_past(into: Any, past: Any) -> None:
    """Copy what is known of a key from one record to another."""
    into.key = past.key
    into.last = past.last
    for span in range(_SPANS):
        into.counts[span] = past.counts[span]


@borrowing
def used(m: Model, past: Any, learn: bool) -> None:
    """The key was used in this tick; ``learn``: also from it. A second use within a tick changes nothing."""
    age = _since(m, past)
    if age == 0:
        m.now[_REPEATS] += 1
        return
    if learn:
        _learn(m, past, age, 1.0, 1.0)
    for span in range(_SPANS):
        past.counts[span] = _soft_plus(m, past.counts[span] - age * m.values[_DECAY + span])
    past.last = m.now[_TICK]


@borrowing
def learn_absence(m: Model, past: Any, weight: float) -> None:
    """Learn from the latest turn of a sampled key, if it was not used then; the sample stands for ``weight`` keys."""
    age = _since(m, past) - 1 + _had_turn(m, past)
    if age >= 1:
        _learn(m, past, age, 0.0, weight)


@borrowing
def estimate(m: Model, past: Any) -> float:
    """Log-odds that the key is used when its turn next comes."""
    return _sum(m, past, max(_since(m, past) + _had_turn(m, past), 1))


@borrowing
def _had_turn(m: Model, past: Any) -> int:
    """1 if the key's turn in this tick is over: steps go through its table in order and are past it; else 0."""
    passed = wide(past.key) <= m.now[_CURSORS + ((wide(past.key) >> 40) & (_TABLES - 1))]
    return 1 if passed and m.now[_IN_ORDER] else 0


@borrowing
def _since(m: Model, past: Any) -> int:
    return (wide(m.now[_TICK]) - wide(past.last)) & 0xFFFFFFFF


@borrowing
def _octave(value: int) -> int:
    # The exponent of the float; floats are exact up to 2**53.
    return wide(np.float64(value).view(np.int64) >> 52) - 1023


@borrowing
def _soft_plus(m: Model, x: float) -> float:
    at = int((x - _SOFT_FIRST) * _SOFT_SCALE + 0.5)
    return m.values[_SOFT + min(max(at, 0), _SOFT_SIZE - 1)]  # type: ignore[no-any-return]


@borrowing
def _cell(m: Model, past: Any, age: int, octave: int, table: int) -> int:
    """Index of the entry of ``table`` that counts for ``past`` at ``age`` (``octave`` = that of the age)."""
    if table == _SPANS:
        half_octaves = int(2 * (past.counts[_SPANS - 1] - age * m.values[_DECAY + _SPANS - 1])) + 8
        octave = m.now[_OCTAVE]
    else:
        half_octaves = int(2 * (m.values[_FULL + table] - past.counts[table] + age * m.values[_DECAY + table]))
    return table * _TABLE + min(max(half_octaves, 0), _RATES - 1) * _AGES + octave


@borrowing
def _sum(m: Model, past: Any, age: int) -> float:
    octave = min(_octave(age), _AGES - 1)
    total = 0.0
    for table in range(_SPANS + 1):
        total += m.values[_cell(m, past, age, octave, table)]
    return total


@borrowing
def _learn(m: Model, past: Any, age: int, outcome: float, weight: float) -> None:
    gradient = (1 / (1 + np.exp(-_sum(m, past, age))) - outcome) * weight
    octave = min(_octave(age), _AGES - 1)
    for table in range(_SPANS + 1):
        cell = _cell(m, past, age, octave, table)
        m.values[_SQUARES + cell] += gradient * gradient
        m.values[cell] -= _STEP * gradient / np.sqrt(m.values[_SQUARES + cell])
