"""Segments: read-only for whom they are sent to, never resized, checked before they are mapped."""

import errno
import mmap
import os

import pytest

from strataflux.proto.errors import SegmentError
from strataflux.proto.segment import Segment, create, map_descriptor

SIZE = 8192


@pytest.fixture
def segment() -> Segment:
    return create("test", SIZE, reserve=True)


def test_what_is_written_is_seen_by_a_reader(segment: Segment) -> None:
    reader = map_descriptor(segment.read_only_descriptor(), SIZE, writable=False)
    assert reader.address != segment.address
    with mmap.mmap(segment.descriptor, SIZE) as memory:
        memory[5000] = 77
    with mmap.mmap(reader.descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        assert memory[5000] == 77
    reader.close()
    segment.close()


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(segment: Segment) -> None:
    with pytest.raises(SegmentError, match="Permission denied"):
        map_descriptor(segment.read_only_descriptor(), SIZE, writable=True)
    segment.close()


def test_nobody_can_resize_it(segment: Segment) -> None:
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    segment.close()


def test_it_is_private_and_not_inherited(segment: Segment) -> None:
    status = os.fstat(segment.descriptor)
    assert status.st_mode & 0o777 == 0o600
    assert not os.get_inheritable(segment.descriptor)
    reader = segment.read_only_descriptor()
    assert not os.get_inheritable(reader)
    os.close(reader)
    segment.close()


def test_another_user_cannot_reopen_it_for_writing(segment: Segment) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reader = segment.read_only_descriptor()
    child = os.fork()
    if child == 0:
        os._exit(_errno_of_reopening(reader))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == errno.EACCES
    os.close(reader)
    segment.close()


def _errno_of_reopening(descriptor: int) -> int:
    """As nobody: open the file behind a descriptor for reading and writing."""
    try:
        os.setgroups([])
        os.setresgid(65_534, 65_534, 65_534)
        os.setresuid(65_534, 65_534, 65_534)
        os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        return int(error.errno or 0)
    return 0


def test_another_size_than_announced_is_not_mapped(segment: Segment) -> None:
    descriptor = segment.read_only_descriptor()
    with pytest.raises(SegmentError, match=f"{SIZE} bytes.*expected {2 * SIZE} bytes"):
        map_descriptor(descriptor, 2 * SIZE, writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    segment.close()


def test_what_could_still_be_resized_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(SegmentError, match="sealed against resizing"):
        map_descriptor(descriptor, SIZE, writable=False)


def test_a_descriptor_that_is_no_memfd_is_not_mapped() -> None:
    with pytest.raises(SegmentError, match="sealed memfd"):
        map_descriptor(os.open("/dev/null", os.O_RDONLY), SIZE, writable=False)


def test_a_forked_child_does_not_have_it(segment: Segment) -> None:
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            os._exit(any(f"{segment.address:x}-" in line for line in maps))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with open("/proc/self/maps") as maps:
        assert any(f"{segment.address:x}-" in line for line in maps)
    segment.close()


def test_closing_twice_is_fine(segment: Segment) -> None:
    segment.close()
    segment.close()


def test_what_cannot_be_mapped_is_an_error_with_its_numbers() -> None:
    size = 1 << 60
    with pytest.raises(SegmentError, match=f"segment huge: found .* for {size} bytes; .*cache budgets"):
        create("huge", size, reserve=False)
