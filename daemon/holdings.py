"""What the tier holds beside the reader's arrays: segments of memory, and the memory of each session."""

from dataclasses import dataclass

from strataflux.daemon.kv import KvPlace
from strataflux.proto import layout
from strataflux.proto.messages import SegmentInfo, TableInfo
from strataflux.proto.segment import Segment

__all__ = ["CacheSegment", "OpenSession", "SessionRow"]


@dataclass
class OpenSession:
    """What a client needs; :class:`strataflux.daemon.interface.OpenedSession`."""

    index: int
    session_id: int
    tables: list[TableInfo]
    segments: list[SegmentInfo]
    ring_log2: int
    stamps_count: int
    staging_block_bytes: int
    descriptors: list[int]


@dataclass
class CacheSegment:
    """One memfd of cache slots. ``domain`` is the group of stores with the same access rule whose bytes it holds."""

    segment: Segment
    first_page: int
    domain: int

    @property
    def info(self) -> SegmentInfo:
        """As announced to clients."""
        return SegmentInfo(self.first_page * layout.UNITS_PER_PAGE, self.segment.size)


@dataclass
class SessionRow:
    """Memory of a session, kept while the reader may look at it."""

    session_id: int
    view: Segment
    page: Segment
    stores: tuple[int, ...]
    domains: set[int]
    place: KvPlace | None
    tenant: str
