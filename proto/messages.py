"""Attach messages: one JSON object of at most 64 KiB a SOCK_SEQPACKET message (FORMAT.md, "Attach").

Each message is a frozen dataclass; ``encode`` writes it, :func:`decode` bounds and checks every field of a received one
before an object of ours exists. :func:`send` and :func:`receive` carry descriptors beside them.
"""

import array
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, Final, get_args, get_type_hints

from strataflux.proto import layout
from strataflux.proto.errors import MessageError

__all__ = [
    "MAX_ATTACHED_TABLES",
    "MAX_DESCRIPTORS",
    "MESSAGE_MAX_BYTES",
    "REFUSALS",
    "Draining",
    "Hello",
    "KvGeometry",
    "KvRelease",
    "KvReleased",
    "KvReserve",
    "KvReserved",
    "Message",
    "Reattach",
    "Refuse",
    "SegmentDropped",
    "SegmentInfo",
    "SegmentRetiring",
    "SegmentsAdded",
    "StoreRef",
    "TableInfo",
    "Welcome",
    "decode",
    "encode",
    "receive",
    "send",
]

MESSAGE_MAX_BYTES: Final = 64 * 1024
MAX_DESCRIPTORS: Final = 250
MAX_ATTACHED_TABLES: Final = 128
_TEXT_MAX: Final = 16 * 1024
_LIST_MAX: Final = 4096
_NUMBER_MAX: Final = (1 << 63) - 1

REFUSALS: Final = frozenset(
    {"layout", "identity", "denied", "limit", "busy", "too_large", "malformed", "draining", "unsupported", "quota"}
)


@dataclass(frozen=True)
class StoreRef:
    """A store that a client asks for: its digest and identity, so that a refusal can name what differs."""

    digest: str
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class KvGeometry:
    """KV blocks of a session. ``record_bytes`` is one group of ``group_tokens`` tokens of one head (K bits then V
    bits) or one FSQ unit; a block holds ``groups_per_block`` of them: ``block_tokens / group_tokens`` a head,
    head by head.
    """

    kind: str
    block_tokens: int
    group_tokens: int
    groups_per_block: int
    record_bytes: int
    max_blocks: int


@dataclass(frozen=True)
class TableInfo:
    """A directory the session may use. ``number`` is the table number of ring entries; ``store`` is empty for KV."""

    number: int
    kind: str
    store: str
    store_generation: int
    records: int


@dataclass(frozen=True)
class SegmentInfo:
    """A cache segment: slots ``first_slot …`` of the cache's one address range lie in it."""

    first_slot: int
    bytes: int


@dataclass(frozen=True)
class Hello:
    """First message of a client, within two seconds. ``selections_per_step`` sizes the ring; ``largest_set_bytes`` is
    what one projection set selects at most, in slot bytes (checked against the cache for ``wait``).
    """

    type: ClassVar = "hello"
    layout: int
    client: str
    stores: list[StoreRef]
    selections_per_step: int
    largest_set_bytes: int
    kv: KvGeometry | None = None


@dataclass(frozen=True)
class Welcome:
    """Answer to a right hello. Descriptors, in order: daemon page, session view, session segment, doorbell, one
    directory a table, one a segment.
    """

    type: ClassVar = "welcome"
    layout: int
    session: int
    generation: int
    tables: list[TableInfo]
    segments: list[SegmentInfo]
    ring_log2: int
    stamps_count: int
    staging_block_bytes: int
    engine: str
    direct_io: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refuse:
    """The answer to a hello or request that cannot be met; the daemon hangs up after refusing a hello."""

    type: ClassVar = "refuse"
    code: str
    found: str
    expected: str
    remedy: str
    request: int = 0


@dataclass(frozen=True)
class SegmentsAdded:
    """The cache grew; descriptors are beside it, one a segment."""

    type: ClassVar = "segments_added"
    segments: list[SegmentInfo]


@dataclass(frozen=True)
class SegmentRetiring:
    """A segment's slots are evicted and past grace: unmap it and say :class:`SegmentDropped` within five seconds."""

    type: ClassVar = "segment_retiring"
    first_slot: int


@dataclass(frozen=True)
class SegmentDropped:
    """The client holds no map or registration of that segment any more."""

    type: ClassVar = "segment_dropped"
    first_slot: int


@dataclass(frozen=True)
class Reattach:
    """The session is over for ``reason`` (a store's new generation, a fence); connect anew."""

    type: ClassVar = "reattach"
    reason: str


@dataclass(frozen=True)
class Draining:
    """The daemon is stopping: what is resident stays readable, nothing more will be filled."""

    type: ClassVar = "draining"


@dataclass(frozen=True)
class KvReserve:
    """Ask for ``blocks`` more block ids (a sequence is created or grows). Sequences and forks are the client's own."""

    type: ClassVar = "kv_reserve"
    request: int
    blocks: int


@dataclass(frozen=True)
class KvReserved:
    """Block ids granted, as [first, count] ranges."""

    type: ClassVar = "kv_reserved"
    request: int
    ranges: list[list[int]]


@dataclass(frozen=True)
class KvRelease:
    """Block ids that no sequence uses any more, as [first, count] ranges."""

    type: ClassVar = "kv_release"
    request: int
    ranges: list[list[int]]


@dataclass(frozen=True)
class KvReleased:
    """Their directory entries are absent and past grace: the ids may be granted again."""

    type: ClassVar = "kv_released"
    request: int


Message = (
    Hello
    | Welcome
    | Refuse
    | SegmentsAdded
    | SegmentRetiring
    | SegmentDropped
    | Reattach
    | Draining
    | KvReserve
    | KvReserved
    | KvRelease
    | KvReleased
)
_TYPES: Final = {kind.type: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One message as bytes.

    Raises:
        MessageError: it is longer than a message may be.
    """
    raw = json.dumps({"type": message.type, **asdict(message)}, separators=(",", ":")).encode()
    if len(raw) > MESSAGE_MAX_BYTES:
        raise MessageError(message.type, f"{len(raw)} bytes", f"at most {MESSAGE_MAX_BYTES}", "attach fewer stores")
    return raw


def decode(raw: bytes) -> Message:
    """The message in ``raw``, every field checked for type and bounds.

    Raises:
        MessageError: anything else.
    """
    if len(raw) > MESSAGE_MAX_BYTES:
        raise _bad("message", f"{len(raw)} bytes", f"at most {MESSAGE_MAX_BYTES}")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad("message", f"no JSON ({error})", "one JSON object") from error
    if not isinstance(body, dict) or not isinstance(body.get("type"), str) or body["type"] not in _TYPES:
        raise _bad("message type", repr(body)[:80], f"one of {sorted(_TYPES)}")
    kind = _TYPES[body.pop("type")]
    message: Message = _build(kind, body, kind.type)
    return message


def _bad(subject: str, found: str, expected: str) -> MessageError:
    return MessageError(subject, found, expected, "is the other side strataflux of the same layout version?")


def _build(kind: Any, body: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if not isinstance(body, dict) or not required <= body.keys() <= names:
        found = sorted(body) if isinstance(body, dict) else type(body).__name__
        raise _bad(where, f"fields {found}"[:400], f"{sorted(names)}")
    return kind(**{name: _field(hints[name], value, f"{where}.{name}") for name, value in body.items()})


def _field(hint: Any, value: Any, where: str) -> Any:
    if hint is int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _NUMBER_MAX:
            raise _bad(where, repr(value)[:80], "a natural number below 2^63")
        return value
    if hint is str:
        if not isinstance(value, str) or len(value) > _TEXT_MAX:
            raise _bad(where, repr(value)[:80], f"text of at most {_TEXT_MAX} characters")
        return value
    if hint == Mapping[str, Any]:
        if not isinstance(value, dict):
            raise _bad(where, type(value).__name__, "an object")
        return value
    if getattr(hint, "__origin__", None) is list:
        if not isinstance(value, list) or len(value) > _LIST_MAX:
            raise _bad(where, repr(value)[:80], f"a list of at most {_LIST_MAX}")
        return [_field(hint.__args__[0], item, where) for item in value]
    if hint == KvGeometry | None:
        return None if value is None else _checked_kv(_build(KvGeometry, value, where))
    return _build(hint, value, where)


def _checked_kv(kv: KvGeometry) -> KvGeometry:
    records = kv.groups_per_block * kv.max_blocks
    if kv.kind not in ("kv_group", "fsq_unit") or not 0 < kv.record_bytes <= layout.MAX_RECORD_BYTES:
        raise _bad("hello.kv", f"{kv.kind} of {kv.record_bytes} bytes", f"at most {layout.MAX_RECORD_BYTES} bytes")
    if not 0 < records <= layout.MAX_OID or not 0 < kv.block_tokens <= 1 << 16:
        raise _bad("hello.kv", f"{records} records", f"1 … {layout.MAX_OID}")
    groups, rest = divmod(kv.block_tokens, max(kv.group_tokens, 1))
    if rest or kv.group_tokens == 0 or kv.groups_per_block % groups:
        raise _bad(
            "hello.kv",
            f"{kv.groups_per_block} groups of {kv.group_tokens} tokens a block of {kv.block_tokens}",
            "whole groups, as many for each head",
        )
    return kv


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message, descriptors beside it (they stay the caller's).

    Raises:
        MessageError: too long. OSError: the peer is gone.
    """
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([encode(message)], ancillary)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one message and the descriptors beside it, which are then the caller's (CLOEXEC); None at hang-up.

    Raises:
        MessageError: malformed or truncated; descriptors that came are closed. OSError: as recvmsg(2).
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    raw, ancillary, flags, _ = connection.recvmsg(MESSAGE_MAX_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not raw and not descriptors:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise _bad(
                "message", "a truncated one", f"at most {MESSAGE_MAX_BYTES} bytes, {MAX_DESCRIPTORS} descriptors"
            )
        return decode(raw), list(descriptors)
    except MessageError:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise
