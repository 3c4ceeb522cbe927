"""What is particular to ``blend``: a hit touches its slot alone, a touched candidate is passed over, many classes."""

import numpy as np

from strataflux.cache_policy import base, blend

SLOTS = 64


def full(n_classes: int = 1) -> blend.State:
    s = blend.make_state(SLOTS, n_classes, 200)
    for key in range(SLOTS):
        blend.requested(s, key, 0, 1)
        blend.insert(s, key, key % n_classes, key, 1, 0)
    return s


def test_a_hit_changes_no_other_slot_and_no_ghost() -> None:
    s = full()
    blend.requested(s, 150, 0, 2)
    assert blend.candidate(s, 0) >= 0
    before = s.pasts.copy()
    blend.touch(s, 40, 3, 0)
    assert np.flatnonzero(s.pasts != before).tolist() == [40]
    assert blend.check_integrity(s) == base.INTACT


def test_candidates_that_are_touched_are_passed_over_until_something_comes_or_goes() -> None:
    s = full()
    named = []
    for _ in range(20):
        named.append(blend.candidate(s, 0))
        blend.touch(s, named[-1], 1, 0)
    assert len(set(named)) == 20
    blend.remove(s, named[0], True)
    blend.insert(s, named[0], 0, 500, 1, 0)
    assert blend.candidate(s, 0) >= 0
    assert blend.check_integrity(s) == base.INTACT


def test_the_only_slot_of_a_class_is_named_however_often_it_is_touched() -> None:
    s = blend.make_state(SLOTS, 2, 10)
    blend.insert(s, 9, 1, 3, 1, 0)
    for _ in range(40):
        assert blend.candidate(s, 1) == 9
        blend.touch(s, 9, 1, 0)


def large() -> blend.State:
    """A cache so large that uses are written down late; 64 of its slots are taken."""
    s = blend.make_state(1 << 19, 1, 200)
    for key in range(SLOTS):
        blend.requested(s, key, 0, 1)
        blend.insert(s, key, 0, key, 1, 0)
    return s


def test_large_caches_write_a_use_down_when_eight_more_have_come() -> None:
    s = large()
    for at in range(9):
        before = s.pasts[:SLOTS].copy()
        blend.touch(s, at, 2, 0)
        assert np.flatnonzero(s.pasts[:SLOTS] != before).tolist() == ([0] if at == 8 else [])


def test_a_slot_that_leaves_a_large_cache_takes_uses_along_that_were_not_written_down() -> None:
    small, late = full(), large()
    for s in (small, late):
        for clock in range(2, 6):
            blend.touch(s, 5, clock, 0)
        blend.remove(s, 5, True)
        blend.requested(s, 5, 0, 6)
        blend.insert(s, 5, 0, 5, 6, 0)
    uses = int(small.pasts[5]["uses"])
    assert uses.bit_count() > 3
    assert late.pasts[5]["uses"] == uses
    for at in range(8):  # and nothing is left of them
        blend.touch(late, 20 + at, 6, 0)
    assert late.pasts[5]["uses"] == uses


def test_a_slot_of_a_large_cache_is_not_named_for_a_use_that_was_not_written_down() -> None:
    s = large()
    for clock in range(2, 8):
        for at in range(SLOTS):
            if at != 40 and (at != 63 or clock < 4):
                blend.touch(s, at, clock, 0)
    for oldest in (40, 63):
        for key in range(40):  # four slots are looked at for each
            blend.requested(s, 300 + key, 0, 8)
            named = blend.candidate(s, 0)
        assert named == oldest
        blend.touch(s, oldest, 9, 0)


def test_an_evicted_key_comes_back_with_its_past() -> None:
    s = full()
    for clock in range(2, 8):
        blend.touch(s, 5, clock, 0)
    uses = int(s.pasts[5]["uses"])
    assert uses.bit_count() > 4
    blend.remove(s, 5, True)
    blend.requested(s, 5, 0, 8)
    blend.insert(s, 5, 0, 5, 8, 0)
    assert s.pasts[5]["uses"] == uses << 1 | 1


def test_an_invalidated_key_comes_back_as_new() -> None:
    s = full()
    for clock in range(2, 8):
        blend.touch(s, 5, clock, 0)
    blend.remove(s, 5, False)
    blend.requested(s, 5, 0, 8)
    blend.insert(s, 5, 0, 5, 8, 0)
    assert s.pasts[5]["uses"] == 1


def test_a_block_emptied_of_a_class_is_forgotten_and_found_again() -> None:
    """All slots of three classes change to one, and back."""
    s = full(3)
    for cls, other in ((0, 2), (1, 2), (2, 0)):
        while (slot := blend.candidate(s, cls)) >= 0:
            blend.remove(s, slot, True)
            blend.insert(s, slot, other, 100 + slot, 2, 0)
            assert blend.check_integrity(s) == base.INTACT
    assert [blend.candidate(s, cls) >= 0 for cls in range(3)] == [True, False, False]
    assert (s.pasts["cls"][:SLOTS] == 0).all()


def test_rare_keys_are_kept_out_of_a_cache_of_favourites() -> None:
    s = full()
    refused = 0
    for clock in range(2, 200):
        for slot in range(SLOTS):
            blend.touch(s, slot, clock, 0)
        key = 1000 + clock
        blend.requested(s, key, 0, clock)
        refused += not blend.admit(s, key, 0, 0, clock)
    assert refused > 150


def test_a_cache_without_slots_has_no_candidate() -> None:
    s = blend.make_state(0, 2, 0)
    blend.requested(s, 1, 0, 1)
    assert blend.candidate(s, 0) == base.NO_SLOT
    assert blend.check_integrity(s) == base.INTACT
