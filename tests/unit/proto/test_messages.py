"""Attach messages: what is sent arrives, and nothing else is believed."""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strataflux.proto import messages as m
from strataflux.proto.errors import MessageError

Pair = tuple[socket.socket, socket.socket]
naturals = st.integers(0, (1 << 63) - 1)
texts = st.text(max_size=40)
ranges = st.lists(st.lists(naturals, max_size=2), max_size=5)
segments = st.lists(st.builds(m.SegmentInfo, naturals, naturals), max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
kv = st.builds(
    lambda kind, tokens, groups, heads, size, blocks: m.KvGeometry(
        kind, tokens * groups, tokens, groups * heads, size, blocks
    ),
    st.sampled_from(["kv_group", "fsq_unit"]),
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(1, 100),
    st.integers(1, 1 << 18),
    st.integers(1, 1000),
)
stores = st.lists(st.builds(m.StoreRef, texts, st.dictionaries(texts, json_values, max_size=3)), max_size=3)
valid: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(m.Hello, naturals, texts, stores, naturals, naturals, st.none() | kv),
    st.builds(
        m.Welcome,
        naturals,
        naturals,
        naturals,
        st.lists(st.builds(m.TableInfo, naturals, texts, texts, naturals, naturals), max_size=3),
        segments,
        naturals,
        naturals,
        naturals,
        texts,
        texts,
        st.dictionaries(texts, json_values, max_size=3),
    ),
    st.builds(m.Refuse, texts, texts, texts, texts, naturals),
    st.builds(m.SegmentsAdded, segments),
    st.builds(m.SegmentRetiring, naturals),
    st.builds(m.SegmentDropped, naturals),
    st.builds(m.Reattach, texts),
    st.builds(m.Draining),
    st.builds(m.KvReserve, naturals, naturals),
    st.builds(m.KvReserved, naturals, ranges),
    st.builds(m.KvRelease, naturals, ranges),
    st.builds(m.KvReleased, naturals),
)


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


@given(valid)
def test_round_trip(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_in_one_way(raw: bytes) -> None:
    with pytest.raises(MessageError):
        m.decode(raw)


@given(json_values)
def test_random_json_is_refused_in_one_way(value: Any) -> None:
    with pytest.raises(MessageError):
        m.decode(json.dumps(value).encode())


@given(valid, st.data())
def test_one_field_of_another_value_is_refused_or_right(message: m.Message, data: st.DataObject) -> None:
    body = json.loads(m.encode(message))
    name = data.draw(st.sampled_from(sorted(body)))
    body[name] = data.draw(json_values)
    raw = json.dumps(body).encode()
    try:
        decoded = m.decode(raw)
    except MessageError:
        return
    assert json.loads(m.encode(decoded)) == body


@given(valid, st.data())
def test_a_missing_or_extra_field_is_refused(message: m.Message, data: st.DataObject) -> None:
    body = json.loads(m.encode(message))
    with pytest.raises(MessageError):
        m.decode(json.dumps({**body, "extra": 1}).encode())
    optional = {"kv", "request", "settings"} if message.type in ("hello", "refuse", "welcome") else set()
    name = data.draw(st.sampled_from(sorted(body.keys() - optional)))
    del body[name]
    with pytest.raises(MessageError):
        m.decode(json.dumps(body).encode())


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.0, True, "1", None, [1]])
def test_numbers_are_natural_and_below_2_63(value: Any) -> None:
    with pytest.raises(MessageError, match="natural number"):
        m.decode(json.dumps({"type": "segment_dropped", "first_slot": value}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "weight_channel"),
        ("record_bytes", 0),
        ("record_bytes", (1 << 18) + 1),
        ("block_tokens", 0),
        ("block_tokens", (1 << 16) + 1),
        ("group_tokens", 0),
        ("group_tokens", 5),
        ("groups_per_block", 0),
        ("groups_per_block", 65),
        ("max_blocks", 1 << 40),
    ],
)
def test_kv_geometry_is_bounded(field: str, value: Any) -> None:
    geometry = {"kind": "kv_group", "block_tokens": 128, "group_tokens": 4, "groups_per_block": 64}
    geometry |= {"record_bytes": 512, "max_blocks": 9}
    hello = {"type": "hello", "layout": 1, "client": "t", "stores": [], "selections_per_step": 1}
    body = {**hello, "largest_set_bytes": 0, "kv": geometry}
    m.decode(json.dumps(body).encode())
    geometry[field] = value
    with pytest.raises(MessageError):
        m.decode(json.dumps(body).encode())


def test_lengths_are_bounded() -> None:
    with pytest.raises(MessageError, match="at most 65536"):
        m.decode(b" " * 65_537)
    with pytest.raises(MessageError, match="attach fewer stores"):
        m.encode(m.Hello(1, "t", [m.StoreRef("d", {"x": "y" * 70_000})], 1, 0))
    with pytest.raises(MessageError, match="at most 16384 characters"):
        m.decode(json.dumps({"type": "reattach", "reason": "x" * 16_385}).encode())
    with pytest.raises(MessageError, match="at most 4096"):
        m.decode(json.dumps({"type": "kv_reserved", "request": 1, "ranges": [[]] * 4097}).encode())
    with pytest.raises(MessageError):
        m.decode(b"[" * 60_000)


def test_descriptors_travel_beside_a_message(pair: Pair) -> None:
    reader, writer = os.pipe()
    m.send(pair[0], m.Draining(), [writer])
    received = m.receive(pair[1])
    assert received is not None
    message, (copy,) = received
    assert message == m.Draining()
    assert not os.get_inheritable(copy)
    os.write(copy, b"x")
    assert os.read(reader, 1) == b"x"
    for descriptor in (reader, writer, copy):
        os.close(descriptor)


def test_descriptors_beside_rubbish_are_closed(pair: Pair) -> None:
    reader, writer = os.pipe()
    socket.send_fds(pair[0], [b"rubbish"], [writer])
    os.close(writer)
    with pytest.raises(MessageError):
        m.receive(pair[1])
    assert os.read(reader, 1) == b""  # nobody holds the other end
    os.close(reader)


def test_a_message_too_long_for_its_buffer_is_refused(pair: Pair) -> None:
    pair[0].send(b" " * 70_000)
    with pytest.raises(MessageError, match="a truncated one"):
        m.receive(pair[1])


def test_a_hang_up_is_none(pair: Pair) -> None:
    pair[0].close()
    assert m.receive(pair[1]) is None
