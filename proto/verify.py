"""Read a store's records and compare each with its checksum; and publish a store whose bad records were replaced."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.proto.errors import StoreCorrupt, StoreIdentityError
from strataflux.proto.store_format import Section, SectionSpec, StoreManifest, load_checksums
from strataflux.proto.store_writer import StoreWriter

__all__ = ["CHUNK_BYTES", "Chunk", "chunks_of", "find_bad", "read_chunk", "repair_store", "verify_store"]

CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Records ``first … first + count - 1`` of a section, in its own numbering."""

    section: Section
    first: int
    count: int

    @property
    def offset(self) -> int:
        """Of the first byte in the file of records."""
        return self.section.offset + self.first * self.section.stride

    @property
    def bytes(self) -> int:
        """Length in the file."""
        return self.count * self.section.stride

    @property
    def oid(self) -> int:
        """Object id of the first record."""
        return self.section.first_oid + self.first


def chunks_of(manifest: StoreManifest, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """All records, in file order, in pieces of about ``chunk_bytes``."""
    for section in manifest.sections:
        step = max(chunk_bytes // section.stride, 1)
        for first in range(0, section.count, step):
            yield Chunk(section, first, min(step, section.count - first))


def read_chunk(descriptor: int, chunk: Chunk) -> NDArray[np.uint8] | None:
    """Records of a chunk, u8 [count, record_bytes], C order; None where the device does not give them all."""
    try:
        raw = os.pread(descriptor, chunk.bytes, chunk.offset)
    except OSError:
        return None
    if len(raw) < chunk.bytes:
        return None
    rows = np.frombuffer(raw, np.uint8).reshape(chunk.count, chunk.section.stride)
    return np.ascontiguousarray(rows[:, : chunk.section.record_bytes])


def find_bad(descriptor: int, chunk: Chunk, checksums: NDArray[np.uint32]) -> list[int]:
    """Object ids of a chunk's records whose bytes are not what their checksum says, or cannot be read.

    Args:
        descriptor: the store's file of records.
        chunk: which of them.
        checksums: u32 [record_count] of the whole store.
    """
    rows = read_chunk(descriptor, chunk)
    if rows is None and chunk.count > 1:  # one bad block must not condemn its neighbours
        singles = (Chunk(chunk.section, chunk.first + i, 1) for i in range(chunk.count))
        return [oid for single in singles for oid in find_bad(descriptor, single, checksums)]
    if rows is None:
        return [chunk.oid]
    return [chunk.oid + int(index) for index in _wrong(rows, chunk, checksums)]


def verify_store(
    manifest: StoreManifest, threads: int, throttle: Callable[[int], None], advance: Callable[[int], None]
) -> list[int]:
    """Object ids of all bad records, in order.

    Args:
        manifest: the store.
        threads: reads in flight at a time.
        throttle: called before each read with its bytes; waits as long as it likes.
        advance: told how many records were looked at.

    Raises:
        StoreCorrupt, StoreTruncated: the checksums themselves are damaged.
    """
    checksums = load_checksums(manifest)
    bad: list[int] = []
    descriptor = os.open(manifest.records_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(threads) as pool:
            chunks = chunks_of(manifest)
            # A few ahead of what is being read: a large store is never queued whole.
            while batch := list(islice(chunks, 2 * threads)):
                throttle(sum(chunk.bytes for chunk in batch))
                for chunk, found in zip(
                    batch, pool.map(lambda piece: find_bad(descriptor, piece, checksums), batch), strict=True
                ):
                    bad += found
                    advance(chunk.count)
    finally:
        os.close(descriptor)
    return bad


def repair_store(
    manifest: StoreManifest, source: StoreManifest, bad: list[int], advance: Callable[[int], None]
) -> StoreManifest:
    """Publish a new generation of a store in which ``bad`` records come from ``source``; every record is checked again.

    Raises:
        StoreIdentityError: ``source`` is another store. StoreCorrupt: a record is bad in both, and nothing was changed.
    """
    if source.identity_digest != manifest.identity_digest:
        raise StoreIdentityError(
            source.folder,
            f"identity {source.identity_digest[:12]}…",
            f"identity {manifest.identity_digest[:12]}…, the damaged store's",
            "name a copy of the same store",
        )
    checksums, wanted = load_checksums(manifest), set(bad)
    names = SectionSpec.__dataclass_fields__
    specs = [SectionSpec(**{name: getattr(section, name) for name in names}) for section in manifest.sections]
    mine = os.open(manifest.records_path, os.O_RDONLY | os.O_CLOEXEC)
    theirs = os.open(source.records_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with StoreWriter(manifest.folder, manifest.identity, specs, manifest.generation + 1) as writer:
            for chunk in chunks_of(manifest):
                rows = _merged(mine, theirs, chunk, wanted)
                if rows is None or _wrong(rows, chunk, checksums).size:
                    raise StoreCorrupt(
                        source.records_path,
                        f"records {chunk.oid} … {chunk.oid + chunk.count - 1} unreadable or wrong there, too",
                        "good copies of the bad records",
                        "name another copy, or prepare the model again",
                    )
                writer.write(manifest.sections.index(chunk.section), chunk.first, rows)
                advance(chunk.count)
            return writer.publish()
    finally:
        os.close(mine)
        os.close(theirs)


def _wrong(rows: NDArray[np.uint8], chunk: Chunk, checksums: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Which of a chunk's records, u8 [count, record_bytes], are not what their checksums say."""
    from strataflux.proto.checksum import crc32c_rows

    found = np.zeros(chunk.count, np.uint32)
    crc32c_rows(rows, found)
    return np.flatnonzero(found != checksums[chunk.oid : chunk.oid + chunk.count])


def _merged(mine: int, theirs: int, chunk: Chunk, wanted: set[int]) -> NDArray[np.uint8] | None:
    """A chunk's records, those that are ``wanted`` from the other file; None if one cannot be read."""
    if not wanted.intersection(range(chunk.oid, chunk.oid + chunk.count)):
        return read_chunk(mine, chunk)
    rows = np.zeros((chunk.count, chunk.section.record_bytes), np.uint8)
    for i in range(chunk.count):
        single = Chunk(chunk.section, chunk.first + i, 1)
        row = read_chunk(theirs if single.oid in wanted else mine, single)
        if row is None:
            return None
        rows[i] = row[0]
    return rows
