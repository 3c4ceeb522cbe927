"""Sessions hear about segments that come and go, also while they are made; who does not let go is hung up on."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from strataflux.daemon.interface import AddedSegment
from strataflux.daemon.notices import SegmentNotices
from strataflux.proto import messages
from strataflux.proto.messages import SegmentInfo, SegmentRetiring, SegmentsAdded
from tests.unit.daemon.conftest import until

SIZE = 16 << 20


@dataclass
class FakeHolder:
    notices: "Rig"
    segments: set[int] = field(default_factory=set)
    held_stores: tuple[int, ...] = (0,)
    opening: bool = False
    said: list[messages.Message] = field(default_factory=list)
    handed: int = 0
    closed: str = ""

    def send(self, message: messages.Message, descriptors: list[int] | None = None) -> bool:
        for descriptor in descriptors or []:
            assert os.fstat(descriptor)  # still open
            self.handed += 1
        self.said.append(message)
        return True

    def close(self, cause: str) -> None:
        self.closed = cause
        self.opening = False
        self.notices.rig.left(self)


class Rig:
    def __init__(self) -> None:
        self.holders: list[FakeHolder] = []
        self.rig = SegmentNotices(lambda: self.holders)

    def holder(self, *segments: int, stores: tuple[int, ...] = (0,), opening: bool = False) -> FakeHolder:
        self.holders.append(FakeHolder(self, set(segments), stores, opening))
        return self.holders[-1]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def added() -> Iterator[AddedSegment]:
    descriptor = os.memfd_create("added")
    yield AddedSegment(SegmentInfo(512, SIZE), (0,), descriptor)
    os.close(descriptor)


async def test_all_who_hold_it_let_go(rig: Rig) -> None:
    first, second, other = rig.holder(512), rig.holder(512), rig.holder(1024)
    retiring = asyncio.create_task(rig.rig.retire(512))
    await until(lambda: bool(second.said))
    assert first.said == [SegmentRetiring(512)]
    assert other.said == []
    assert rig.rig.dropped(first, 512)
    assert not retiring.done()
    assert rig.rig.dropped(second, 512)
    assert await retiring == 0
    assert not first.closed


async def test_who_does_not_let_go_is_hung_up_on(rig: Rig) -> None:
    slow, good = rig.holder(512), rig.holder(512)
    retiring = asyncio.create_task(rig.rig.retire(512, seconds=0.05))
    await until(lambda: bool(good.said))
    rig.rig.dropped(good, 512)
    assert await retiring == 1
    assert (slow.closed, good.closed) == ("segment", "")


async def test_a_session_that_ends_holds_nothing(rig: Rig) -> None:
    holder = rig.holder(512)
    retiring = asyncio.create_task(rig.rig.retire(512))
    await until(lambda: bool(holder.said))
    holder.close("hang_up")
    assert await retiring == 0


async def test_one_in_the_making_is_asked_when_it_is_made(rig: Rig) -> None:
    holder = rig.holder(opening=True)
    retiring = asyncio.create_task(rig.rig.retire(512))
    await asyncio.sleep(0)
    assert holder.said == []
    holder.opening, holder.segments = False, {512}
    rig.rig.attached(holder)
    assert holder.said == [SegmentRetiring(512)]
    rig.rig.dropped(holder, 512)
    assert await retiring == 0


def test_a_confirmation_nobody_asked_for_is_misuse(rig: Rig) -> None:
    assert not rig.rig.dropped(rig.holder(512), 512)


def test_a_new_segment_goes_to_those_who_use_its_stores(rig: Rig, added: AddedSegment) -> None:
    user, stranger, known = rig.holder(), rig.holder(stores=(1,)), rig.holder(512)
    rig.rig.announce(added)
    assert user.said == [SegmentsAdded([SegmentInfo(512, SIZE)])]
    assert (user.handed, user.segments) == (1, {512})
    assert stranger.said == known.said == []


def test_a_new_segment_reaches_a_session_in_the_making_once(rig: Rig, added: AddedSegment) -> None:
    late, gone, told = (rig.holder(opening=True) for _ in range(3))
    before = len(os.listdir("/proc/self/fd"))
    rig.rig.announce(added)
    late.opening = told.opening = False
    rig.rig.attached(late)
    assert (late.handed, late.segments) == (1, {512})
    told.segments = {512}  # its welcome had it
    rig.rig.attached(told)
    assert told.handed == 0
    gone.close("hang_up")
    assert len(os.listdir("/proc/self/fd")) == before
