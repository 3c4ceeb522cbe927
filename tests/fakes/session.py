"""The fake daemon's view of one session, and the words the two share."""

import socket
from dataclasses import dataclass, field

import numpy as np

from strataflux.proto import layout, messages
from strataflux.proto.atomics import fence, load_acquire_u32, load_u32, store_release_u32, store_u32
from strataflux.proto.compiled import compiled
from strataflux.proto.ring import Consumer
from strataflux.proto.segment import Segment
from strataflux.proto.store_format import StoreManifest
from tests.fakes.kv import FakeKv


@compiled
def store_word(address: int, value: int) -> None:
    store_u32(np.uint64(address), np.uint32(value))


@compiled
def publish_word(address: int, value: int) -> None:
    # SYNC: directory-entry (publish), and the like: what was written before is visible before this word.
    store_release_u32(np.uint64(address), np.uint32(value))


@compiled
def load_word(address: int) -> int:
    return np.int64(load_acquire_u32(np.uint64(address)))  # type: ignore[return-value]


@compiled
def bump_and_look(fills: int, awaiting: int) -> bool:
    """Count ``fills`` up; True if the session sleeps on it."""
    store_release_u32(np.uint64(fills), load_u32(np.uint64(fills)) + np.uint32(1))
    fence()
    return bool(load_u32(np.uint64(awaiting)) != np.uint32(0))


def record_bytes(manifest: StoreManifest, oid: int) -> bytes:
    """A record as it lies on disk."""
    section = next(s for s in manifest.sections if s.first_oid <= oid < s.first_oid + s.count)
    with manifest.records_path.open("rb") as file:
        file.seek(section.offset + (oid - section.first_oid) * section.stride)
        return file.read(section.record_bytes)


@dataclass(frozen=True)
class Request:
    """An entry taken from a session's ring."""

    session: int
    table: int
    oid: int
    score: int
    prefetch: bool = False


@dataclass
class FakeSession:
    """The daemon's side of one session."""

    number: int
    connection: socket.socket
    hello: messages.Hello
    view: Segment
    page: Segment
    geometry: layout.SessionGeometry
    consumer: Consumer
    kv: FakeKv | None = None
    received: list[messages.Message] = field(default_factory=list)

    def view_at(self, name: str) -> int:
        """Address of a word of the session view."""
        return self.view.address + layout.offset_of(layout.SESSION_VIEW, name)

    def page_at(self, name: str) -> int:
        """Address of a word of the session page."""
        return self.page.address + layout.offset_of(layout.SESSION_PAGE, name)

    def inside(self) -> bool:
        """The session is inside a step."""
        return load_word(self.page_at("step_begun")) != load_word(self.page_at("step_ended"))

    def count_prefetches(self, counts: dict[str, tuple[int, int]]) -> None:
        """Say in the session's view what became of its prefetches, by name: of weights, of KV."""
        view = self.view.view(layout.SESSION_VIEW)
        for name, pair in counts.items():
            view[f"prefetch_{name}"][0] = pair
