"""Frequency and recency blended by what was learnt: evict the slot least likely to be used when its turn comes.

The estimate is that of :mod:`reuse`, over the past of each resident slot and of up to sixteen times as many keys that
are not resident (ghosts). A missed key is admitted if it is as likely to be used as the slot it would replace.

Nothing is kept in order: a use changes its slot's own 16 bytes and no list, so that a hit costs one cache line. Each
miss looks at *blocks* of adjacent slots, and the lowest of each block joins the class's *pool* of the few lowest known
(:mod:`pool`), from which the victim is taken after a second look. Blocks are visited in the order of a golden-ratio
sequence: each about as often as any other, and neighbours in memory not one after the other, because neighbours were
filled one after the other and would all be found at one age. The more a miss looks at, the sooner is found what has
fallen; small caches, which a CPU's own cache holds, look at eight blocks, large ones at a line of one, fetched ahead.

In large caches a use is written down when eight more have come: a CPU that waits for the line of each cannot go on to
the next request meanwhile. A slot is not named, and does not leave, before its uses that wait are known.

What a request tells a ghost (:mod:`recall`) is written down when it is next needed, so that its line is on the way
while victims are looked at.

Where least recently used would keep more (:mod:`duel`), slots are compared by age alone, and every missed key enters,
for a while; everything is learnt as ever.

Each request also offers one sample to the model. Caches too large to learn from every request learn from one in 2**k:
the tables have some thousand entries, and more samples than ``_LEARNT`` a turn-over of the cache change nothing.

States and invariants: a slot is resident iff its ``cls`` is not -1; ``count`` of a class is the number of its resident
slots, each of which stands in a block that the class names (:mod:`blocks`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import blocks, duel, pool, recall, reuse
from strataflux.cache_policy.base import INTACT, NO_SLOT, WRONG_COUNT, wide
from strataflux.cache_policy.bits import prefetch
from strataflux.cache_policy.ghosts import WAYS, hash_key
from strataflux.cache_policy.lists import ABSENT
from strataflux.proto.compiled import borrowing

__all__ = [
    "State",
    "admit",
    "candidate",
    "check_integrity",
    "insert",
    "make_state",
    "remove",
    "requested",
    "tail_clock",
    "touch",
]
_LOOKS = 8  # blocks a miss of a small cache looks at
_LOOKS_TIMES_SLOTS = 1 << 19  # for larger ones: a million slots fill a CPU's own cache, and one block is looked at
_LARGE = 1 << 19  # slots from which on a look is at a quarter of a block, one line, and uses are written down later
_PART_BITS = 2
_WAITS = 8
_LEARNT = 16384
_TICKS_A_TURNOVER = 64
_DUELS_AFTER = 32  # ticks from the first choice on: until then, too little is known of turns
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
_LINE = 64

# Numbers behind the model's, the ghosts' and the blocks'.
_DRAWS = blocks.NUMBERS  # samples drawn so far
_CALLS = _DRAWS + 1  # calls that change what is the candidate
_N_CLASSES = _DRAWS + 2
_RESIDENT = _DRAWS + 3  # slots of all classes
_PENDING, _PENDING_TIME = _DRAWS + 4, _DRAWS + 5  # the tag whose ghost has yet to learn of its use, or -1; and when
_LOOKS_A_MISS = _DRAWS + 6
_OFFERED = _DRAWS + 7  # the slot named last
_LATE, _NEXT_LATE = _DRAWS + 8, _DRAWS + 9  # whether uses are written down later; which of those that wait goes next
_WAITING = _DRAWS + 10  # their slots, or -1, and behind them their times
_DUELS_FROM = _WAITING + 2 * _WAITS  # the tick, or 0
_DUEL = _DUELS_FROM + 1
_CLASSES = _DUEL + duel.SIZE

# Numbers of a class, from _CLASSES + cls * _CLASS on.
_COUNT, _CHOSEN, _CHOSEN_VALUE, _LOOKED, _NEXT, _SWEEP, _POOL = range(7)
_CLASS = _POOL + pool.SIZE


class State(NamedTuple):
    """Slots, ghosts, the model and some counters; see the module for the invariants."""

    pasts: NDArray[np.void]  # [slots in whole blocks, then ghosts] of reuse.PAST
    numbers: NDArray[np.int64]  # the parts named above, then those of the blocks


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:
    """As :meth:`base.Policy.make_state`, for at most 63 classes; 16 bytes a slot and a ghost."""
    n_blocks = -(-n_slots // blocks.BLOCK)
    in_blocks, sets = n_blocks * blocks.BLOCK, recall.sets_for(n_slots, n_keys_hint)
    raw = np.zeros((in_blocks + sets * WAYS) * reuse.PAST.itemsize + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    pasts = raw[start : start + len(raw) - _LINE].view(reuse.PAST)
    pasts["cls"][:in_blocks] = pasts["named"][:in_blocks] = ABSENT
    learn_every = 1
    while learn_every * _LEARNT < n_slots:
        learn_every *= 2
    lists = _CLASSES + n_classes * _CLASS
    own = lists - reuse.NUMBERS + blocks.size(n_blocks, n_classes)
    numbers = reuse.make_numbers(max(n_slots // _TICKS_A_TURNOVER, 1), learn_every, own)
    recall.make_recall(numbers, in_blocks, sets)
    numbers[_LATE] = n_slots >= _LARGE
    blocks.make_blocks(numbers, lists, n_blocks, _PART_BITS * numbers[_LATE])
    numbers[_CALLS], numbers[_N_CLASSES] = 1, n_classes
    numbers[_PENDING] = numbers[_OFFERED] = numbers[_WAITING : _WAITING + _WAITS] = NO_SLOT
    numbers[_LOOKS_A_MISS] = min(max(_LOOKS_TIMES_SLOTS // max(n_slots, 1), 1), _LOOKS)
    duel.make_duel(numbers, _DUEL, n_slots)
    for cls in range(n_classes):
        numbers[_CLASSES + cls * _CLASS + _CHOSEN] = NO_SLOT
    return State(pasts, numbers)


@borrowing
def requested(s: State, key: int, _score: int, clock: int) -> None:
    """As :meth:`base.Policy.requested`: its ghost is to learn of the use, or to begin."""
    tag = hash_key(key)
    prefetch(s.pasts, recall.first_way(s, tag))
    if s.numbers[_PENDING] >= 0:
        _settle(s)
    if reuse.advance(s, clock) and reuse.attend(s, clock):
        _learn_absences(s)
        at, known = recall.seek(s, tag)
        if known:
            reuse.learn_use(s, s.pasts[at])
    s.numbers[_PENDING], s.numbers[_PENDING_TIME] = tag, reuse.now(s)
    s.numbers[_CALLS] += 1


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: its past grows; nothing else knows."""
    n = s.numbers
    if reuse.advance(s, clock) and reuse.attend(s, clock):
        _learn_absences(s)
        reuse.learn_use(s, s.pasts[slot])
    if slot == n[_OFFERED]:
        _pass_over(s, slot)
    if n[_LATE]:
        # This line is asked for, and another has arrived meanwhile.
        prefetch(s.pasts, slot)
        at = _WAITING + n[_NEXT_LATE]
        n[_NEXT_LATE] = n[_NEXT_LATE] + 1 & _WAITS - 1
        earlier, time = n[at], n[at + _WAITS]
        n[at], n[at + _WAITS] = slot, reuse.now(s)
        if earlier >= 0:
            _use(s, earlier, time)
    else:
        _use(s, slot, reuse.now(s))


@borrowing
def _use(s: State, slot: int, time: int) -> None:
    past = s.pasts[slot]
    if duel.sampled(s.numbers, _DUEL, wide(past.tag)):
        _count(s, past, True, 1, time)
    reuse.used(s, past, time)


@borrowing
def _pass_over(s: State, slot: int) -> None:
    """A tier that touches what it was named wants another."""
    n, c = s.numbers, _CLASSES + wide(s.pasts[slot].cls) * _CLASS
    n[_OFFERED] = NO_SLOT
    if n[c + _CHOSEN] == slot:
        n[c + _CHOSEN] = NO_SLOT
        pool.pass_over(n, c + _POOL, slot, wide(n[c + _COUNT]))


@borrowing
def insert(s: State, slot: int, cls: int, key: int, _clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: with the past its ghost kept."""
    n, past, tag = s.numbers, s.pasts[slot], hash_key(key)
    if s.numbers[_PENDING] >= 0:
        _settle(s)
    at = recall.find(s, tag)
    if at >= 0:
        reuse.filled(s, s.pasts[at])
        reuse.copy_past(past, s.pasts[at])
        s.pasts[at].last = 0
    else:
        reuse.begin(s, past, tag)
    past.cls = cls
    n[_CLASSES + cls * _CLASS + _COUNT] += 1
    n[_RESIDENT] += 1
    n[_CALLS] += 1
    if past.named != cls:
        blocks.name(s, slot, cls)


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: an evicted slot's past goes to a ghost."""
    past = s.pasts[slot]
    if s.numbers[_PENDING] >= 0:
        _settle(s)
    if s.numbers[_LATE]:
        _use_waiting(s, slot)
    s.numbers[_CLASSES + wide(past.cls) * _CLASS + _COUNT] -= 1
    s.numbers[_RESIDENT] -= 1
    past.cls = ABSENT
    if evicted:
        reuse.copy_past(s.pasts[recall.seek(s, wide(past.tag))[0]], past)
    s.numbers[_CALLS] += 1


@borrowing
def _use_waiting(s: State, slot: int) -> None:
    """Uses of ``slot`` that wait are written down."""
    waiting = False
    for at in range(_WAITING, _WAITING + _WAITS):
        waiting |= s.numbers[at] == slot
    if not waiting:
        return
    for turn in range(_WAITS):
        at = _WAITING + (s.numbers[_NEXT_LATE] + turn & _WAITS - 1)
        if s.numbers[at] == slot:
            _use(s, slot, s.numbers[at + _WAITS])
            s.numbers[at] = NO_SLOT


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the slot with the lowest estimate, as far as was looked."""
    n, c = s.numbers, _CLASSES + cls * _CLASS
    if n[c + _COUNT] and (n[c + _LOOKED] != n[_CALLS] or n[c + _CHOSEN] < 0):
        if n[c + _LOOKED] != n[_CALLS]:
            n[c + _LOOKED] = n[_CALLS]
            pool.take_back(n, c + _POOL)
        looks, seen = 0, 0
        # Where slots are numbered sparsely, a line holds few.
        while looks < n[_LOOKS_A_MISS] or (n[_LATE] and seen < WAYS and looks < blocks.BLOCK // WAYS):
            seen += _look(s, cls)
            looks += 1
        _choose(s, cls)
    n[_OFFERED] = n[c + _CHOSEN] if n[c + _COUNT] else NO_SLOT
    return n[_OFFERED]  # type: ignore[no-any-return]


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the candidate was last used."""
    slot = candidate(s, cls)
    return reuse.last_clock(s, s.pasts[slot]) if slot >= 0 else NO_SLOT


@borrowing
def admit(s: State, key: int, cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: if it is at least as likely to be used as the candidate."""
    n, c = s.numbers, _CLASSES + cls * _CLASS
    if n[c + _LOOKED] != n[_CALLS] and candidate(s, cls) < 0:
        return True
    if n[_PENDING] >= 0:
        _settle(s)
    at = recall.find(s, hash_key(key))
    if at < 0 or _worth(s, s.pasts[at]) >= n[c + _CHOSEN_VALUE]:
        return True
    n[_CALLS] += 1  # the next miss looks further, though nothing came or went
    return False


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`.

    LOST_SLOT: no list names the block of a resident slot; WRONG_CLASS: a slot of no class there is, or a list and
    ``listed`` or ``named`` that deny each other; WRONG_COUNT: a class has another number of slots, or of blocks, than
    it says, or all have together; or the duel one of keys.
    """
    n, n_classes, resident = s.numbers, s.numbers[_N_CLASSES], 0
    code = blocks.check_blocks(s, n_classes)
    for cls in range(n_classes):
        count = 0
        for slot in range(recall.first_ghost(s)):
            count += s.pasts[slot].cls == cls
        if code == INTACT and count != n[_CLASSES + cls * _CLASS + _COUNT]:
            code = WRONG_COUNT
        resident += count
    if code == INTACT and (resident != n[_RESIDENT] or not duel.check_duel(n, _DUEL)):
        code = WRONG_COUNT
    return code


@borrowing
def _look(s: State, cls: int) -> int:
    """Look at the next part of a block that holds slots of ``cls``, and how many; the lowest of them joins the pool."""
    n, c = s.numbers, _CLASSES + cls * _CLASS
    best, lowest, resident = NO_SLOT, 0, 0
    while best < 0:
        resident = 0
        first, size = blocks.part(s, cls, n[c + _NEXT])
        for slot in range(first, first + size):
            if s.pasts[slot].cls == cls:
                resident += 1
                if pool.was_passed(n, c + _POOL, slot):
                    continue
                value = _worth(s, s.pasts[slot])
                if best < 0 or value < lowest:
                    best, lowest = slot, value
        if not resident:
            blocks.forget(s, cls, n[c + _NEXT])
        n[c + _SWEEP] = (n[c + _SWEEP] + _GOLDEN) & 0xFFFFFFFF
        n[c + _NEXT] = blocks.place(s, cls, n[c + _SWEEP])
    prefetch(n, blocks.index(s, cls, blocks.place(s, cls, n[c + _SWEEP] + _GOLDEN & 0xFFFFFFFF)))
    ahead, size = blocks.part(s, cls, n[c + _NEXT])
    for slot in range(ahead, ahead + size, WAYS):
        prefetch(s.pasts, slot)
    pool.offer(n, c + _POOL, best, lowest)
    return resident


@borrowing
def _choose(s: State, cls: int) -> None:
    """The lowest of the pool as it is now becomes the candidate; what left or rose moves on the way."""
    n, c = s.numbers, _CLASSES + cls * _CLASS
    at = c + _POOL
    slot, value = NO_SLOT, 0
    while True:  # each entry is dropped, or brought up to date, at most once
        slot = pool.lowest(n, at)
        if slot < 0:
            _look(s, cls)
        elif s.pasts[slot].cls != cls:
            pool.drop_lowest(n, at)
        else:
            if n[_LATE]:
                _use_waiting(s, slot)
            value = _worth(s, s.pasts[slot])
            if value <= pool.second_value(n, at):
                break
            pool.drop_lowest(n, at)
            pool.offer(n, at, slot, value)
    n[c + _CHOSEN], n[c + _CHOSEN_VALUE] = slot, value
    if not n[_DUELS_FROM]:
        n[_DUELS_FROM] = reuse.ticks(s) + _DUELS_AFTER
    prefetch(s.pasts, recall.first_way(s, wide(s.pasts[slot].tag)))
    following = pool.second(n, at)
    prefetch(s.pasts, recall.first_way(s, wide(s.pasts[following].tag)))


@borrowing
def _settle(s: State) -> None:
    """The ghost of the key asked for last learns of it: not at once, so that memory has time to bring it."""
    n = s.numbers
    at, known = recall.seek(s, n[_PENDING])
    if duel.sampled(n, _DUEL, n[_PENDING]):
        _count(s, s.pasts[at], known, 0, n[_PENDING_TIME])
    reuse.begin_or_use(s, s.pasts[at], n[_PENDING], known, n[_PENDING_TIME])
    recall.found(s, n[_PENDING], at)
    n[_PENDING] = -1


@borrowing
def _learn_absences(s: State) -> None:
    """One slot and one set of ghosts, drawn by a hash: in turn they would come in the order they were filled in."""
    n_slots, sets = recall.first_ghost(s), recall.sets(s)
    s.numbers[_DRAWS] += 1
    draw = hash_key(s.numbers[_DRAWS])
    slot = (draw * n_slots) >> 32
    if s.pasts[slot].cls != ABSENT:
        reuse.learn_absence(s, s.pasts[slot], n_slots / reuse.pace(s))
    first = recall.first_way(s, hash_key(draw))
    for at in range(first, first + WAYS):
        if s.pasts[at].last:
            reuse.learn_absence(s, s.pasts[at], sets / reuse.pace(s))


@borrowing
def _worth(s: State, past: Any) -> int:
    """What a slot or a ghost is compared by: its estimate, or its age where recency leads."""
    return -(reuse.since(s, past) >> 1) if duel.recency_leads(s.numbers, _DUEL) else reuse.estimate(s, past)


@borrowing
def _count(s: State, past: Any, known: bool, hit: int, time: int) -> None:
    """A sampled key is asked for at ``time``, before its past learns of it."""
    n = s.numbers
    age = (time - wide(past.last)) & 0xFFFFFFFF if known else duel.UNKNOWN
    moves = not known or not reuse.repeats(age)
    counts = 0 < n[_DUELS_FROM] < reuse.ticks(s) and (hit == 1 or not known or age > 2 * reuse.delay(s))
    if duel.asked(n, _DUEL, time, age, hit, n[_RESIDENT], moves, counts):
        # What was found to be lowest was so by the other measure.
        n[_CALLS] += 1
        for c in range(_CLASSES, _CLASSES + n[_N_CLASSES] * _CLASS, _CLASS):
            n[c + _POOL] = 0
