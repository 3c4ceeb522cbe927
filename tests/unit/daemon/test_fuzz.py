"""What no right client would write: two million ring entries and a hundred thousand messages, none of which harms."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.daemon.engines.board import Board
from strataflux.proto import layout, messages
from strataflux.proto.errors import MessageError
from strataflux.proto.messages import Hello, KvGeometry, KvRelease, StoreRef
from tests.fakes.core_rig import Client, Rig, make_store
from tests.fakes.rubbish import mutated

ENTRIES = 2_000_000
RING_LOG2 = 16
RECORDS = 500
MESSAGES = 100_000

RIGHT: tuple[messages.Message, ...] = (
    Hello(1, "fuzz", [StoreRef("f" * 64, {"weights": "a"})], 100, 4096, KvGeometry("kv_group", 64, 4, 16, 512, 8)),
    KvRelease(3, [[0, 4], [9, 1]]),
    messages.KvReserve(2, 8),
    messages.SegmentDropped(512),
)


def test_ring_entries_of_all_kinds(tmp_path: Path) -> None:
    """A third is noise, a third has the right lap, a third names records that exist; a right client is served after."""
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, 100)])])
    assert isinstance(rig.engine, Board)
    rig.engine.start_threads(1)
    client, good = Client(rig.tier, ring_log2=RING_LOG2), Client(rig.tier)
    cells, random_ = client.ring_cells(), np.random.default_rng(11)
    written = 0
    while written < ENTRIES:
        position = int(client.counters["head"])
        entries = random_.integers(0, 1 << 64, cells.size, np.uint64)
        kind = (written >> RING_LOG2) % 3
        if kind:
            entries &= np.uint64((1 << 56) - 1)
            entries |= np.uint64((1 + (position >> RING_LOG2) % 255) << 56)
        if kind == 2:
            entries &= ~np.uint64(0xFF << layout.TABLE_SHIFT | layout.OID_MASK)
            entries |= random_.integers(0, 2 * RECORDS, cells.size, np.uint64)
        cells[:] = entries
        client.page["ring_tail"] = position + cells.size
        while int(client.counters["head"]) < position + cells.size:
            rig.sweep()
        written += cells.size
    counted = client.counters
    prefetches = int(rig.rd["prefetch_asked"])
    assert int(counted["taken"]) + prefetches == written
    # Each position was a hole, an entry out of bounds, a request or a prefetch; nothing is counted twice or lost.
    assert int(counted["holes"]) + int(counted["invalid"]) + int(rig.rd["requests"]) + prefetches == written
    assert prefetches > ENTRIES // 20
    assert int(good.counters["invalid"]) == int(good.counters["holes"]) == 0
    oids = range(0, RECORDS, 7)
    while good.ask(oids) < len(oids):
        rig.sweep()
    assert good.read(oids) == [rig.record(oid) for oid in oids]
    while rig.rd["in_flight"]:
        rig.sweep()
    rig.intact()
    rig.close()


def test_mutated_messages_are_messages_or_malformed() -> None:
    """Bytes changed, cut, doubled: every outcome is a message of ours or a MessageError, and nothing else."""
    source, outcomes = random.Random(5), {True: 0, False: 0}
    encoded = [messages.encode(message) for message in RIGHT]
    for number in range(MESSAGES):
        raw = mutated(source, encoded[number % len(encoded)])
        try:
            messages.decode(raw)
            outcomes[True] += 1
        except MessageError:
            outcomes[False] += 1
    assert outcomes[False] > outcomes[True] > 0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(RIGHT), st.data())
def test_right_types_with_wrong_fields(right: messages.Message, data: st.DataObject) -> None:
    body = json.loads(messages.encode(right))
    for name in data.draw(st.lists(st.sampled_from(sorted(body)), max_size=3)):
        body[name] = data.draw(_JSON)
    raw = json.dumps(body).encode()
    try:
        decoded = messages.decode(raw)
    except MessageError:
        return
    assert messages.decode(messages.encode(decoded)) == decoded


@pytest.mark.parametrize("raw", [b"", b"\x00" * 100, b"[" * 60_000, b'{"type":"hello"' + b" " * 70_000])
def test_extremes(raw: bytes) -> None:
    with pytest.raises(MessageError):
        messages.decode(raw)
