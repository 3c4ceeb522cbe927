"""Bytes that no right client would send, made from a seed: for rings, for the attach socket, for the control socket."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from strataflux.proto import layout, messages, ring
from strataflux.proto.atomics import U64, load_acquire_u64, store_release_u64, store_u64
from strataflux.proto.compiled import compiled

__all__ = ["attach_rubbish", "control_rubbish", "mutated", "spray_ring"]

_WORDS: Final = (b"null", b"-1", b"1e999", b"[", b"{}", b'"', b"\xff", b"18446744073709551616")
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mutated(source: random.Random, right: bytes) -> bytes:
    """One to three bytes of a right message changed, cut out, doubled, or replaced by what JSON chokes on."""
    raw = bytearray(right)
    for _ in range(source.randrange(1, 4)):
        at = source.randrange(len(raw)) if raw else 0
        how = source.randrange(4)
        if how == 0 and raw:
            raw[at] = source.randrange(256)
        elif how == 1:
            del raw[at : at + source.randrange(8)]
        elif how == 2:
            raw[at:at] = raw[at : at + 16]
        else:
            raw[at:at] = source.choice(_WORDS)
    return bytes(raw) or b" "


def _wrong_fields(source: random.Random, right: bytes) -> bytes:
    """A message of the right type with values of wrong kinds and sizes."""
    body = json.loads(right)
    values: Sequence[Any] = (None, True, -1, 1 << 70, 1.5, "", "x" * 5000, [], [[[]]], {}, {"a": {"b": []}}, [1] * 5000)
    for name in source.sample(sorted(body), source.randrange(1, min(4, len(body)) + 1)):
        body[name] = source.choice(values)
    return json.dumps(body).encode()


def attach_rubbish(source: random.Random, right: Sequence[bytes]) -> bytes:
    """A first message for the attach socket; ``right`` are messages to start from."""
    how: Callable[[], bytes] = source.choice(
        [
            lambda: source.randbytes(source.randrange(1, 400)),
            lambda: mutated(source, source.choice(right)),
            lambda: _wrong_fields(source, source.choice(right)),
            lambda: b"[" * source.randrange(1, 2000),
            lambda: b" " * source.randrange(1, messages.MESSAGE_MAX_BYTES + 100) if source.random() < 0.02 else b"{}",
        ]
    )
    return how()


def control_rubbish(source: random.Random) -> bytes:
    """Bytes for the control socket: noise, or HTTP/2 as far as its preface and frames with noise in them."""
    if source.random() < 0.3:
        return source.randbytes(source.randrange(1, 600))
    frames = [_PREFACE, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
    for _ in range(source.randrange(1, 6)):
        body = source.randbytes(source.randrange(64))
        size = len(body) if source.random() < 0.8 else source.randrange(1 << 24)
        stream = struct.pack(">I", source.choice([0, 1, 3, source.randrange(1 << 31)]))
        frames.append(
            struct.pack(">I", size)[1:] + bytes([source.randrange(12), source.randrange(256)]) + stream + body
        )
    return b"".join(frames)


@compiled
def _mix(x: U64) -> U64:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def spray_ring(
    cells: U64, log2: U64, tail_at: U64, head_at: U64, position: U64, count: int, seed: U64, records: U64
) -> U64:
    """Write up to ``count`` entries into a request ring from ``position`` on, as many as there is room for.

    A third is noise; a third has the right lap and a payload of noise; a third has the right lap, table 0 and a record
    number below 64 times ``records``, so that one in 64 of these names a record that exists. ``ring_tail`` is noise for
    a moment, upon which the reader may go ahead of what was written. Returns the position after the last entry.
    """
    capacity = np.uint64(1) << log2
    head = load_acquire_u64(head_at)
    first = max(position, head)
    room = min(np.uint64(count), head + capacity - first)
    for i in range(room):
        at = first + np.uint64(i)
        entry = _mix(seed + np.uint64(_GOLDEN) * at)
        kind = (entry >> np.uint64(5)) % np.uint64(3)
        if kind != np.uint64(0):
            payload = entry & np.uint64((1 << layout.LAP_SHIFT) - 1)
            if kind == np.uint64(2):
                payload = _mix(entry) % (records << np.uint64(6))
            entry = ring.lap_of(at, log2) << np.uint64(layout.LAP_SHIFT) | payload
        store_u64(cells + (at & (capacity - np.uint64(1))) * np.uint64(8), entry)
    store_release_u64(tail_at, _mix(seed ^ first))
    store_release_u64(tail_at, first + room)
    return first + room
