"""A client believes nothing of a welcome before it was checked, and leaves nothing behind when it is wrong."""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.attach import AttachRequest, attach
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.proto import layout, messages
from strataflux.proto.errors import ContractError, MessageError, SegmentError
from strataflux.proto.messages import Message, SegmentInfo, StoreRef, Welcome
from strataflux.proto.runtime import ATTACH_SOCKET
from strataflux.proto.store_format import StoreManifest
from tests.fakes.daemon import FakeDaemon
from tests.fakes.store import make_store

CHUNK = layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=3, record_bytes=100)


@pytest.fixture
def daemon(tmp_path: Path, manifest: StoreManifest) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [manifest]) as fake:
        yield fake


@pytest.fixture
def request_(tmp_path: Path, manifest: StoreManifest) -> AttachRequest:
    return AttachRequest(tmp_path / ATTACH_SOCKET, (manifest,), 64, 0, "test")


def open_descriptors(daemon: FakeDaemon) -> int:
    """Descriptors of this process without those the fake holds for sessions."""
    daemon.hang_up()
    return len(os.listdir("/proc/self/fd"))


def edit(**values: Any) -> Callable[[Welcome, list[int]], Message]:
    return lambda welcome, _: replace(welcome, **values)


def edit_table(**values: Any) -> Callable[[Welcome, list[int]], Message]:
    return lambda welcome, _: replace(welcome, tables=[replace(welcome.tables[0], **values)])


def edit_segment(**values: Any) -> Callable[[Welcome, list[int]], Message]:
    return lambda welcome, _: replace(welcome, segments=[replace(welcome.segments[0], **values)])


def swap(first: int, second: int) -> Callable[[Welcome, list[int]], Message]:
    def change(welcome: Welcome, descriptors: list[int]) -> Message:
        descriptors[first], descriptors[second] = descriptors[second], descriptors[first]
        return welcome

    return change


def drop_last(welcome: Welcome, descriptors: list[int]) -> Message:
    descriptors.pop()
    return welcome


def overlap(welcome: Welcome, descriptors: list[int]) -> Message:
    descriptors.append(descriptors[-1])
    return replace(welcome, segments=[*welcome.segments, welcome.segments[0]])


WRONG: dict[str, tuple[Callable[[Welcome, list[int]], Message], type[ContractError], str]] = {
    "another layout": (
        edit(layout=layout.LAYOUT_VERSION + 1),
        MessageError,
        rf"welcome\.layout: found {layout.LAYOUT_VERSION + 1}; expected {layout.LAYOUT_VERSION}",
    ),
    "another generation": (edit(generation=9), MessageError, "page header"),
    "another session": (edit(session=9), MessageError, "page header"),
    "a ring too large": (edit(ring_log2=21), MessageError, "ring_log2: found 21; expected 8 … 20"),
    "a ring of another size": (edit(ring_log2=12), SegmentError, "sealed against resizing"),
    "too many stamps": (edit(stamps_count=1 << 40), MessageError, "stamps"),
    "no tables": (edit(tables=[]), MessageError, "descriptors"),
    "a table of another number": (edit_table(number=1), MessageError, "table 0: found number 1"),
    "a table of another store": (edit_table(store="ab"), MessageError, "store ab"),
    "a table without records": (edit_table(records=0), MessageError, "table 0"),
    "a segment off its grid": (edit_segment(first_slot=1), MessageError, "segment"),
    "a segment beyond the stamps": (edit_segment(first_slot=2 * CHUNK), MessageError, f"below slot {2 * CHUNK}"),
    "a segment of no bytes": (edit_segment(bytes=0), MessageError, "0 bytes"),
    "a segment of half a page": (edit_segment(bytes=layout.CACHE_PAGE_BYTES // 2), MessageError, "whole pages"),
    "a segment of another size": (edit_segment(bytes=layout.CACHE_PAGE_BYTES), SegmentError, "sealed"),
    "segments over one another": (overlap, MessageError, "over another"),
    "a descriptor too few": (drop_last, MessageError, "5 descriptors; expected 6"),
    "pages mixed up": (swap(0, 1), MessageError, "page header"),
    "a read-only session segment": (swap(2, 4), SegmentError, "descriptor"),
    "another message": (lambda *_: messages.Draining(), MessageError, "found draining; expected welcome"),
}


@pytest.mark.parametrize(("change", "error", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_welcome_is_refused_and_leaves_nothing(
    daemon: FakeDaemon,
    request_: AttachRequest,
    change: Callable[[Welcome, list[int]], Message],
    error: type[ContractError],
    text: str,
) -> None:
    before = open_descriptors(daemon)
    daemon.tamper = change
    with pytest.raises(error, match=text):
        attach(request_)
    assert open_descriptors(daemon) == before


def test_a_right_welcome_leaves_nothing_after_close(daemon: FakeDaemon, request_: AttachRequest) -> None:
    before = open_descriptors(daemon)
    attachment = attach(request_)
    assert attachment.welcome.segments == [SegmentInfo(0, layout.SEGMENT_MIN_BYTES)]
    attachment.close()
    attachment.close()
    assert open_descriptors(daemon) == before


def test_a_store_of_another_size_is_named(daemon: FakeDaemon, request_: AttachRequest, manifest: StoreManifest) -> None:
    other = replace(request_, stores=(replace(manifest, record_count=4),))
    with pytest.raises(RefusedError, match="3 records at the daemon; expected the manifest's 4"):
        attach(other)


def test_a_digest_and_identity_are_enough(daemon: FakeDaemon, request_: AttachRequest, manifest: StoreManifest) -> None:
    ref = StoreRef(manifest.identity_digest, manifest.identity)
    attachment = attach(replace(request_, stores=(ref,)))
    assert daemon.call(lambda: daemon.sessions[0].hello.stores) == [ref]
    assert attachment.welcome.tables[0].records == 3
    attachment.close()


def test_a_refusal_carries_its_code_and_numbers(daemon: FakeDaemon, request_: AttachRequest) -> None:
    daemon.refuse_next = messages.Refuse("limit", "17 sessions of uid 0", "at most 16", "close one")
    with pytest.raises(RefusedError, match=r"attach \(limit\): found 17 sessions of uid 0; expected at most 16"):
        attach(request_)


def test_a_hello_too_long_for_a_message_is_misuse(daemon: FakeDaemon, request_: AttachRequest) -> None:
    with pytest.raises(MisuseError, match="attach fewer stores"):
        attach(replace(request_, stores=(StoreRef("d", {"x": "y" * 70_000}),)))


def test_a_server_of_another_uid_is_not_trusted(tmp_path: Path, request_: AttachRequest) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can listen as another user")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(request_.socket_path))
        os.seteuid(65_534)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(DaemonUnavailableError, match="a server of uid 65534"):
            attach(request_)


def test_a_socket_nobody_listens_on(request_: AttachRequest) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(os.fspath(request_.socket_path))
    with pytest.raises(DaemonUnavailableError, match="Connection refused"):
        attach(request_)
