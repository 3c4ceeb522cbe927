"""Frequency and recency blended by what was learnt: evict the slot least likely to be used when its turn comes.

The estimate is that of :mod:`reuse`, over the past of each resident slot and of up to sixteen times as many keys that
are not resident (ghosts). A missed key is admitted if it is as likely to be used as the slot it would replace.

Nothing is kept in order: a use changes its slot's own 16 bytes and no list, so that a hit costs one cache line. Each
miss looks at *blocks* of adjacent slots, and the lowest of each block joins the class's *pool* of the few lowest known
(:mod:`pool`), from which the victim is taken after a second look. Blocks are visited in the order of a golden-ratio
sequence: each about as often as any other, and neighbours in memory not one after the other, because neighbours were
filled one after the other and would all be found at one age. The more a miss looks at, the sooner is found what has
fallen; small caches, which a CPU's own cache holds, look at eight blocks, large ones at one, fetched ahead.

What a request tells a ghost (:mod:`recall`) is written down when it is next needed, so that its line is on the way
while victims are looked at.

Where least recently used would keep more (:mod:`duel`), slots are compared by age alone, and every missed key enters,
for a while; everything is learnt as ever.

Each request also offers one sample to the model. Caches too large to learn from every request learn from one in 2**k:
the tables have some thousand entries, and more samples than ``_LEARNT`` a turn-over of the cache change nothing.

States and invariants: a slot is resident iff its ``cls`` is not -1; ``count`` of a class is the number of its resident
slots; a block with resident slots of a class is named once in the class's list of blocks (a block without any may be
named, until it is next looked at), and ``listed`` of the block has the bits of the classes that name it; a slot whose
``named`` is a class stands in a block that the class names.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import duel, pool, recall, reuse
from strataflux.cache_policy.base import INTACT, LOST_SLOT, NO_SLOT, WRONG_CLASS, WRONG_COUNT, wide
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
_BLOCK = 16
_LOOKS = 8  # blocks a miss of a small cache looks at
_LOOKS_TIMES_SLOTS = 1 << 19  # for larger ones: a million slots fill a CPU's own cache, and one block is looked at
_LEARNT = 16384
_TICKS_A_TURNOVER = 64
_DUELS_FROM = 32  # ticks: before, too little is known of turns
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
_LINE = 64

# Numbers behind the model's and the ghosts'.
_DRAWS = recall.NUMBERS  # samples drawn so far
_CALLS = _DRAWS + 1  # calls that change what is the candidate
_BLOCKS = _DRAWS + 2
_FIRST = _DRAWS + 3  # index in the numbers of the first of ``listed``
_PENDING, _PENDING_TIME = _DRAWS + 4, _DRAWS + 5  # the tag whose ghost has yet to learn of its use, or -1; and when
_LOOKS_A_MISS = _DRAWS + 6
_RESIDENT = _DRAWS + 7  # slots of all classes
_DUEL = _DRAWS + 8
_CLASSES = _DUEL + duel.SIZE

# Numbers of a class, from _CLASSES + cls * _CLASS on.
_COUNT, _NAMED, _CHOSEN, _CHOSEN_VALUE, _LOOKED, _NEXT, _SWEEP, _POOL = range(8)
_CLASS = _POOL + pool.SIZE


class State(NamedTuple):
    """Slots, ghosts, the model and some counters; see the module for the invariants."""

    pasts: NDArray[np.void]  # [slots in whole blocks, then ghosts] of reuse.PAST
    numbers: NDArray[np.int64]  # the parts named above, then listed[blocks], then a list of blocks for each class


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:
    """As :meth:`base.Policy.make_state`, for at most 63 classes; 16 bytes a slot and a ghost."""
    blocks = -(-n_slots // _BLOCK)
    sets = recall.sets_for(n_slots, n_keys_hint)
    raw = np.zeros((blocks * _BLOCK + sets * WAYS) * reuse.PAST.itemsize + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    pasts = raw[start : start + len(raw) - _LINE].view(reuse.PAST)
    pasts["cls"][: blocks * _BLOCK] = pasts["named"][: blocks * _BLOCK] = ABSENT
    own = _CLASSES - reuse.NUMBERS + n_classes * _CLASS + blocks * (1 + n_classes)
    learn_every = 1
    while learn_every * _LEARNT < n_slots:
        learn_every *= 2
    numbers = reuse.make_numbers(max(n_slots // _TICKS_A_TURNOVER, 1), learn_every, own)
    recall.make_recall(numbers, blocks * _BLOCK, sets)
    numbers[_CALLS], numbers[_BLOCKS], numbers[_FIRST] = 1, blocks, _CLASSES + n_classes * _CLASS
    numbers[_PENDING] = -1
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
    past = s.pasts[slot]
    if reuse.advance(s, clock) and reuse.attend(s, clock):
        _learn_absences(s)
        reuse.learn_use(s, past)
    if duel.sampled(s.numbers, _DUEL, wide(past.tag)):
        _count(s, past, True, 1, reuse.now(s))
    reuse.used(s, past, reuse.now(s))
    c = _CLASSES + wide(past.cls) * _CLASS
    if s.numbers[c + _CHOSEN] == slot:
        # A tier that touches what it was named wants another.
        s.numbers[c + _CHOSEN] = NO_SLOT
        pool.pass_over(s.numbers, c + _POOL, slot, wide(s.numbers[c + _COUNT]))


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
        _name_block(s, slot, cls)


@borrowing
def _name_block(s: State, slot: int, cls: int) -> None:
    """The block of ``slot`` stands in the list of ``cls``; ``slot`` remembers that, to save asking again."""
    n, c, block, first = s.numbers, _CLASSES + cls * _CLASS, slot // _BLOCK, s.numbers[_FIRST]
    s.pasts[slot].named = cls
    if not n[first + block] >> cls & 1:
        n[first + block] |= 1 << cls
        n[first + (1 + cls) * n[_BLOCKS] + n[c + _NAMED]] = block
        n[c + _NAMED] += 1


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: an evicted slot's past goes to a ghost."""
    past = s.pasts[slot]
    if s.numbers[_PENDING] >= 0:
        _settle(s)
    s.numbers[_CLASSES + wide(past.cls) * _CLASS + _COUNT] -= 1
    s.numbers[_RESIDENT] -= 1
    past.cls = ABSENT
    if evicted:
        reuse.copy_past(s.pasts[recall.seek(s, wide(past.tag))[0]], past)
    s.numbers[_CALLS] += 1


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the slot with the lowest estimate, as far as was looked."""
    n, c = s.numbers, _CLASSES + cls * _CLASS
    if n[c + _COUNT] and (n[c + _LOOKED] != n[_CALLS] or n[c + _CHOSEN] < 0):
        if n[c + _LOOKED] != n[_CALLS]:
            n[c + _LOOKED] = n[_CALLS]
            pool.take_back(n, c + _POOL)
        for _ in range(n[_LOOKS_A_MISS]):
            _look(s, cls)
        _choose(s, cls)
    return wide(n[c + _CHOSEN]) if n[c + _COUNT] else NO_SLOT


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
    it says.
    """
    n, first = s.numbers, s.numbers[_FIRST]
    n_classes = (first - _CLASSES) // _CLASS
    for slot in range(recall.first_ghost(s)):
        past, listed = s.pasts[slot], n[first + slot // _BLOCK]
        if past.cls != ABSENT and not 0 <= past.cls < n_classes:
            return WRONG_CLASS
        if past.cls != ABSENT and not listed >> wide(past.cls) & 1:
            return LOST_SLOT
        if past.named != ABSENT and not listed >> wide(past.named) & 1:
            return WRONG_CLASS
    for cls in range(n_classes):
        code = _check_class(s, cls)
        if code != INTACT:
            return code
    return INTACT


@borrowing
def _check_class(s: State, cls: int) -> int:
    n, c, first = s.numbers, _CLASSES + cls * _CLASS, s.numbers[_FIRST]
    named, found, listed = first + (1 + cls) * n[_BLOCKS], 0, 0
    for at in range(named, named + n[c + _NAMED]):
        if not n[first + n[at]] >> cls & 1:
            return WRONG_CLASS
    for slot in range(recall.first_ghost(s)):
        found += s.pasts[slot].cls == cls
    for block in range(n[_BLOCKS]):
        listed += n[first + block] >> cls & 1
    return INTACT if (found, listed) == (n[c + _COUNT], n[c + _NAMED]) else WRONG_COUNT


@borrowing
def _look(s: State, cls: int) -> None:
    """Look at the next block that holds slots of ``cls``: the lowest of them joins the pool."""
    n, c, first = s.numbers, _CLASSES + cls * _CLASS, s.numbers[_FIRST]
    named = first + (1 + cls) * n[_BLOCKS]
    best, lowest = NO_SLOT, 0
    while best < 0:
        resident = False
        at = named + n[c + _NEXT]
        block = n[at]
        for slot in range(block * _BLOCK, block * _BLOCK + _BLOCK):
            if s.pasts[slot].cls == cls:
                resident = True
                if pool.was_passed(n, c + _POOL, slot):
                    continue
                value = _worth(s, s.pasts[slot])
                if best < 0 or value < lowest:
                    best, lowest = slot, value
        if not resident:
            _forget_block(s, cls, at)
        n[c + _SWEEP] = (n[c + _SWEEP] + _GOLDEN) & 0xFFFFFFFF
        n[c + _NEXT] = (n[c + _SWEEP] * n[c + _NAMED]) >> 32
    prefetch(n, named + ((n[c + _SWEEP] + _GOLDEN & 0xFFFFFFFF) * n[c + _NAMED] >> 32))
    ahead = n[named + n[c + _NEXT]] * _BLOCK
    for slot in range(ahead, ahead + _BLOCK, WAYS):
        prefetch(s.pasts, slot)
    pool.offer(n, c + _POOL, best, lowest)


@borrowing
def _forget_block(s: State, cls: int, at: int) -> None:
    """The block named at index ``at`` of the numbers holds no slot of ``cls`` any more."""
    n, c, first = s.numbers, _CLASSES + cls * _CLASS, s.numbers[_FIRST]
    block = n[at]
    n[c + _NAMED] -= 1
    n[at] = n[first + (1 + cls) * n[_BLOCKS] + n[c + _NAMED]]
    n[first + block] ^= 1 << cls
    for slot in range(block * _BLOCK, block * _BLOCK + _BLOCK):
        if s.pasts[slot].named == cls:
            s.pasts[slot].named = ABSENT


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
            value = _worth(s, s.pasts[slot])
            if value <= pool.second_value(n, at):
                break
            pool.offer(n, at, slot, value)
    n[c + _CHOSEN], n[c + _CHOSEN_VALUE] = slot, value
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
    counts = reuse.ticks(s) > _DUELS_FROM and (hit == 1 or not known or age > 2 * reuse.delay(s))
    if duel.asked(n, _DUEL, time, age, hit, n[_RESIDENT], moves, counts):
        # What was found to be lowest was so by the other measure.
        n[_CALLS] += 1
        for c in range(_CLASSES, n[_FIRST], _CLASS):
            n[c + _POOL] = 0
