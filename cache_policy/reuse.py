"""A model of reuse, learnt while it is used: how likely a key is asked for when its turn next comes, from its own past.

Time is cut in *ticks*: about as long as it takes until keys repeat. A tick is one value of the tier's clock, a decode
step; less where many keys repeat within one, and several where the clock is finer than that. Within a tick, time
advances by requests, in 1/256. A key's *turns* are the times one, two, … ticks after its last use: steps that ask for
their keys in the same order, layer after layer, come by a key's place once a tick.

What is known of a key (:data:`PAST`, 16 bytes) is the time of its last use, in which of the 32 turns up to it the key
was used (one bit each), and the count of its uses, halved every 256 ticks, as log2. The estimate, in log-odds, is a
sum of four table entries::

    v = A[last 8 turns, bit by bit] + B[number used in the 24 before] + C[rate, age] + D[count, ticks since the start]

where *age* is the number of turns since the last use, in octaves, and *rate* the count divided by what a key used at
every turn would have, in half-octaves; D says what a count is worth while little has been seen. No weight between
frequency and recency is given: entries are fitted online by the gradient of the logarithmic loss with a step per entry
(AdaGrad; Duchi, Hazan and Singer, JMLR 2011), from uses (1) and from sampled keys that were not used at their turn
(0, weighted by how many keys a sample stands for). Until something is learnt, ``v`` falls with age and rises with
the rate. The form is ours.

All functions take the state ``m`` of a policy: any tuple with ``numbers`` (i8) that begin as :func:`make_numbers` made
them. One array of integers, because compiled calls that are not inlined pass each array in seven words, and because a
cache asks for estimates far more often than it learns: log-odds are kept in 2**-32.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import wide
from strataflux.cache_policy.bits import count_ones, octave
from strataflux.proto.compiled import borrowing

__all__ = [
    "NUMBERS",
    "PAST",
    "advance",
    "attend",
    "begin",
    "begin_or_use",
    "copy_past",
    "delay",
    "estimate",
    "filled",
    "last_clock",
    "learn_absence",
    "learn_use",
    "make_numbers",
    "now",
    "pace",
    "repeats",
    "since",
    "ticks",
    "used",
]

PAST = np.dtype([("last", "u4"), ("uses", "u4"), ("rate", "u2"), ("cls", "i1"), ("named", "i1"), ("tag", "u4")])
"""What is known of a key: ``last`` time of use, 0 = nothing is known; ``uses`` bit i = used i turns before that;
``rate`` log2 of the count at that time; ``tag``, ``cls`` and ``named`` belong to the policy. Four to a cache line.
"""
assert PAST.itemsize == 16

_TURN = 256  # units of time in a tick
_OCTAVE = 2048  # units of log2 in ``rate`` and in everything compared with it
_DECAY = 8  # units lost in a tick: half a count in 256 ticks
_ONE = 16 * _OCTAVE  # ``rate`` of a count of 1
_RATE_MAX = 65535

_RATES, _AGES = 24, 16  # half-octaves, octaves
_HALF_OCTAVE = _OCTAVE // 2
_SEEN_LEAST = 4 * _OCTAVE  # counts of 1/16 and below share the first row of D
_STEP = 0.1  # AdaGrad's one rate
_UNIT = 1 << 32  # of log-odds, and of shares: the small steps of late learning must not round to nothing
_SQUARE_UNIT = 1 << 20
_ESTIMATE_BITS = 16  # fewer in an estimate
_REPEATED = 8  # uses to a repeat: with fewer a tick is too long, with more than eight times as many too short
_LEAST_UNIT = 1 << 20
_LEAST_STEP = 32  # what one use weighs, in parts
_DELAY_BITS = 8  # the delay is averaged over 2**8 fills
_MEMORY = 16  # ticks over which the pace is averaged
_SHARE = 0.001  # what one use weighs in the share of regular ones

# Parts of numbers.
_TIME, _TICK, _CLOCK, _REQUESTS = 0, 1, 2, 3  # now; its tick; the tier's clock; requests in this tick
_REPEATS, _LONGEST, _SHORTEST = (
    4,
    5,
    6,
)  # repeats among those watched; requests that end a tick in any case, and the fewest
_FULL, _SINCE, _AHEAD = 7, 8, 9  # rate of a key used at every turn; octave of ticks since the start; see estimate
_START, _SPEED, _SPEED_BITS = 10, 11, 24  # time at which the tick began; units of time a request, in 2**-24
_DUE, _LEARN_AT, _LEARN_EVERY = 12, 13, 14  # requests in the tick from which on something is due; those learnt from
_DELAY = 17  # from a request to its fill, in 1/256 of a unit of time
_LEAST = 18  # requests that a tick has at least, in 1/_LEAST_UNIT
_WATCHED, _WATCH = 19, 256  # requests since the length of ticks was looked at, and of how many that takes
_PACE, _REGULAR = 15, 16  # requests a tick; share of uses that come within 1/16 tick of their turn; in _UNIT
_LATEST = 20  # where A, B, C and D begin
_EARLIER, _RATE = _LATEST + 256, _LATEST + 256 + 32
_SEEN = _RATE + _RATES * _AGES
_ENTRIES = _SEEN + _RATES * _AGES - _LATEST
_SQUARES = _LATEST + _ENTRIES  # sum of squared gradients of each entry
_GAIN = _SQUARES + _ENTRIES  # what one more use adds to a rate, by rate in steps of 1/32 octave
_GAIN_STEP, _GAINS = 64, 1024
_CLOCKS, _HISTORY = _GAIN + _GAINS, 1024  # the tier's clock at each of the latest ticks
NUMBERS = _CLOCKS + _HISTORY
"""How many numbers are the model's; a policy's own follow."""

_NO_LIMIT = 1 << 40
_LATE_AT_MOST = 1 << 24  # ticks of the tier's clock by which a use is told too late


def make_numbers(shortest_tick: int, learn_every: int, own: int) -> NDArray[np.int64]:
    """The numbers of a model that has seen nothing (it ranks by age and frequency alike), and zeros behind them.

    Args:
        shortest_tick: requests; recency that is finer than that is of no use to the caller.
        learn_every: one request in so many is learnt from.
        own: how many zeros.
    """
    n = np.zeros(NUMBERS + own, np.int64)
    n[_TIME], n[_START], n[_SPEED], n[_TICK] = _TURN, _TURN, _TURN << _SPEED_BITS, 1
    n[_LONGEST], n[_SHORTEST], n[_LEARN_EVERY], n[_PACE] = _NO_LIMIT, shortest_tick, learn_every, _UNIT
    rate, age = np.arange(_RATES)[:, None], np.arange(_AGES)[None, :]
    # Half the log-odds of the rate itself, half of one use in the present age: neither is trusted alone.
    n[_RATE:_SEEN] = (-_UNIT * np.log(2) * (rate / 2 + age) / 2).ravel()
    n[_SQUARES:_GAIN] = _SQUARE_UNIT
    rates = ((np.arange(_GAINS) + 0.5) * _GAIN_STEP - _ONE) / _OCTAVE
    n[_GAIN:_CLOCKS] = np.round(_OCTAVE * np.log2(1 + 2.0**-rates))
    return n


@borrowing
def advance(m: Any, clock: int) -> bool:
    """A key is asked for at ``clock``; whether :func:`attend` must follow at once, because something else is due."""
    n = m.numbers
    requests = n[_REQUESTS]
    n[_REQUESTS] = requests + 1
    n[_TIME] = n[_START] + min((requests * n[_SPEED]) >> _SPEED_BITS, _TURN - 1)
    return wide(clock) != n[_CLOCK] or requests >= n[_DUE]  # type: ignore[no-any-return]


@borrowing
def attend(m: Any, clock: int) -> bool:
    """What is due is done: a tick ends at a later clock than any before, or after as many requests as it may have.
    Whether this request is one to learn from.
    """
    n = m.numbers
    # As a signed difference, a clock that nobody told of for half its range would seem earlier for the other half.
    behind = (n[_CLOCK] - wide(clock)) & 0xFFFFFFFF
    later = behind > _LATE_AT_MOST
    if later:
        n[_CLOCK] = clock
    # A clock may be finer than the time in which keys repeat, and then some of its values make a tick.
    if (later and n[_REQUESTS] > n[_LEAST] // _LEAST_UNIT) or n[_REQUESTS] > n[_LONGEST]:
        _start_tick(m)
    learn = n[_REQUESTS] > n[_LEARN_AT]
    if learn:
        n[_LEARN_AT] = n[_REQUESTS] - 1 + n[_LEARN_EVERY]
    n[_DUE] = min(n[_LONGEST], n[_LEARN_AT])
    return learn  # type: ignore[no-any-return]


@borrowing
def _start_tick(m: Any) -> None:
    """The request just counted is the first of a new tick."""
    n, requests = m.numbers, m.numbers[_REQUESTS] - 1
    if requests:
        n[_PACE] += (requests * _UNIT - n[_PACE]) // min(max(n[_TICK] - 1, 1), _MEMORY)
        n[_SPEED] = wide((_TURN << _SPEED_BITS) / max(pace(m), 1.0))
        n[_WATCHED] += requests
        if n[_WATCHED] >= _WATCH:
            _fit_tick(n, min(n[_LONGEST], wide(pace(m))))
        n[_FULL] = _once_more(m, n[_FULL] + _ONE - _DECAY) - _ONE if n[_TICK] > 1 else 0
    n[_TICK] += 1
    n[_REQUESTS], n[_LEARN_AT] = 1, 0
    n[_START] = n[_TIME] = n[_TICK] * _TURN
    n[_SINCE] = min(octave(n[_TICK]), _AGES - 1)
    n[_CLOCKS + n[_TICK] % _HISTORY] = n[_CLOCK]
    # Of uses at any time 1/8 would fall so near a turn by chance; in ticks of a few requests, more.
    regular = max(8 * n[_REGULAR] - _UNIT, 0) // 7 * wide(n[_PACE] >= 64 * _UNIT)
    n[_AHEAD] = regular // _TURN * max(_TURN - 2 * (n[_DELAY] >> _DELAY_BITS), 0) // _TURN


@borrowing
def _fit_tick(n: Any, present: int) -> None:
    """Where keys repeat within a tick it is too long to tell recent from old; where hardly any do, too short."""
    if n[_REPEATS] * _REPEATED > n[_WATCHED] and present > n[_SHORTEST]:
        n[_LONGEST] = max(present // 2, n[_SHORTEST])
    elif n[_REPEATS] * 8 * _REPEATED < n[_WATCHED]:
        n[_LONGEST] = min(n[_LONGEST] * 2, _NO_LIMIT)
    n[_REPEATS] = n[_WATCHED] = 0


@borrowing
def pace(m: Any) -> float:
    """Requests a tick, over about the last sixteen ticks."""
    return m.numbers[_PACE] / _UNIT  # type: ignore[no-any-return]


@borrowing
def filled(m: Any, past: Any) -> None:
    """The key asked for at the last use known comes into a slot."""
    delay = since(m, past)
    if delay < _TURN:
        m.numbers[_DELAY] += delay - (m.numbers[_DELAY] >> _DELAY_BITS)


@borrowing
def ticks(m: Any) -> int:
    """Ticks so far."""
    return m.numbers[_TICK]  # type: ignore[no-any-return]


@borrowing
def delay(m: Any) -> int:
    """From a request to its fill, in 1/256 tick; the mean of late ones."""
    return m.numbers[_DELAY] >> _DELAY_BITS  # type: ignore[no-any-return]


@borrowing
def repeats(age: int) -> bool:
    """Whether a use so long after the last one counts with it as one."""
    return age < _TURN // 2


@borrowing
def since(m: Any, past: Any) -> int:
    """Time since the last use, in 1/256 tick, modulo 2**32."""
    return (m.numbers[_TIME] - wide(past.last)) & 0xFFFFFFFF  # type: ignore[no-any-return]


@borrowing
def last_clock(m: Any, past: Any) -> int:
    """The tier's clock at the last use; of uses more than 1,023 ticks ago, that of the oldest tick known."""
    n = m.numbers
    back = min((n[_TIME] // _TURN - wide(past.last) // _TURN) & 0xFFFFFF, _HISTORY - 1, n[_TICK] - 1)
    return n[_CLOCKS + (n[_TICK] - back) % _HISTORY]  # type: ignore[no-any-return]


@borrowing
def begin(m: Any, past: Any, tag: int) -> None:
    """``past`` becomes that of a key first seen now."""
    past.tag = tag
    past.last = m.numbers[_TIME]
    past.uses = 1
    past.rate = _ONE


@borrowing
def begin_or_use(m: Any, past: Any, tag: int, known: bool, time: int) -> None:
    """As :func:`used` at ``time`` if ``known``, else as :func:`begin`; no branch, either."""
    first = 1 - wide(known)
    past.tag = tag
    past.last = _either(first, time, wide(past.last))
    past.uses = _either(first, 1, wide(past.uses))
    past.rate = _either(first, _ONE, wide(past.rate))
    m.numbers[_REPEATS] -= first
    used(m, past, time)


@borrowing
def copy_past(into: Any, past: Any) -> None:
    """Copy what is known of a key from one record to another; ``cls`` stays."""
    into.tag = past.tag
    into.last = past.last
    into.uses = past.uses
    into.rate = past.rate


@borrowing
def now(m: Any) -> int:
    """The time, in 1/256 tick."""
    return m.numbers[_TIME]  # type: ignore[no-any-return]


@borrowing
def used(m: Any, past: Any, time: int) -> None:
    """The key is used at ``time``. Uses within half a tick count once.

    Without branches on what ``past`` holds: a CPU that has to guess them cannot go on to the next request while this
    one waits for memory.
    """
    age = ((time - wide(past.last) & 0xFFFFFFFF) + _TURN // 2) // _TURN
    repeat = wide(age == 0)
    m.numbers[_REPEATS] += repeat
    past.uses = (wide(past.uses) << min(age, 32)) & 0xFFFFFFFF | 1
    past.rate = _either(repeat, wide(past.rate), _once_more(m, wide(past.rate) - _DECAY * age))
    past.last = _either(repeat, wide(past.last), time)


@borrowing
def learn_use(m: Any, past: Any) -> None:
    """Learn from a use that :func:`used` is about to be told of."""
    time = since(m, past) + _TURN // 2
    _measure(m, time - _TURN // 2)
    if time >= _TURN:
        near = abs(time % _TURN - _TURN // 2) <= _TURN // 16
        m.numbers[_REGULAR] += wide(_SHARE * (near * _UNIT - m.numbers[_REGULAR]))
        _learn(m, past, time // _TURN, 1.0, 1.0)


@borrowing
def _measure(m: Any, time: int) -> None:
    """A tick is as long as all but 1 in 32 uses take to come again, less 1 in 32: the quantile is followed by steps
    of either sign that cancel where it is right.
    """
    n = m.numbers
    step = n[_LEAST] // _LEAST_STEP
    n[_LEAST] += step // 32 + 1 if time / _TURN * pace(m) * (_LEAST_UNIT * 0.96875) >= n[_LEAST] else -step


@borrowing
def _either(first: int, one: int, other: int) -> int:
    """``one`` if ``first`` is 1, ``other`` if it is 0."""
    return other ^ (one ^ other) & -first


@borrowing
def _once_more(m: Any, rate: int) -> int:
    """The rate of one use more."""
    known = max(rate, 0)
    return min(known + wide(m.numbers[_GAIN + known // _GAIN_STEP]), _RATE_MAX)


@borrowing
def learn_absence(m: Any, past: Any, weight: float) -> None:
    """Learn from the latest turn of a sampled key, if it was not used then; the sample stands for ``weight`` keys."""
    age = since(m, past) // _TURN
    if age >= 1:
        _learn(m, past, age, 0.0, weight)


@borrowing
def estimate(m: Any, past: Any) -> int:
    """Log-odds that the key is used when its turn next comes, in 1/65536, less the part of a tick until then.

    Of two keys as likely to be used, the one whose turn comes first earns its slot sooner: near the margin, where the
    odds of what is kept and of what is not differ little, a full tick of waiting weighs as much as one unit of
    log-odds. It counts in so far as keys keep their turns and fills come at once: what arrives half a tick late has
    missed as many turns as it can still be early for.
    """
    n, time = m.numbers, since(m, past)
    latest, earlier, rate, seen = _cells(m, past, time // _TURN + 1)
    return (n[latest] + n[earlier] + n[rate] + n[seen] - (_TURN - time % _TURN) * n[_AHEAD]) >> _ESTIMATE_BITS  # type: ignore[no-any-return]


@borrowing
def _cells(m: Any, past: Any, age: int) -> tuple[int, int, int, int]:
    """The entries that count for ``past`` at ``age`` ≥ 1."""
    turns = (wide(past.uses) << min(age - 1, 32)) & 0xFFFFFFFF
    count = wide(past.rate) - _ONE - _DECAY * age
    below = min(max(m.numbers[_FULL] - count, 0) // _HALF_OCTAVE, _RATES - 1)
    above = min(max(count + _SEEN_LEAST, 0) // _HALF_OCTAVE, _RATES - 1)
    return (
        _index(_LATEST + (turns & 255)),
        _index(_EARLIER + count_ones(turns >> 8)),
        _index(_RATE + below * _AGES + min(octave(age), _AGES - 1)),
        _index(_SEEN + above * _AGES + m.numbers[_SINCE]),
    )


@borrowing
def _index(value: int) -> int:
    """An index that is known not to count from the end, which compiled code would otherwise look at."""
    return np.uint64(value)  # type: ignore[return-value]  # the u64 of compiled code


@borrowing
def _learn(m: Any, past: Any, age: int, outcome: float, weight: float) -> None:
    n, cells = m.numbers, _cells(m, past, age)
    total = (n[cells[0]] + n[cells[1]] + n[cells[2]] + n[cells[3]]) / _UNIT
    gradient = (1 / (1 + np.exp(-total)) - outcome) * weight
    for cell in cells:
        square = cell + np.uint64(_ENTRIES)
        n[square] += wide(gradient * gradient * _SQUARE_UNIT)
        n[cell] -= wide(_STEP * _UNIT * gradient / np.sqrt(n[square] / _SQUARE_UNIT))
