"""Every bad record is found and no good one is; a repair takes bad ones from a good copy, or changes nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.proto.errors import StoreCorrupt, StoreIdentityError
from strataflux.proto.store_format import SectionSpec, StoreManifest, load_checksums, open_store
from strataflux.proto.store_writer import StoreWriter
from strataflux.proto.verify import Chunk, chunks_of, find_bad, repair_store, verify_store

SHAPES = ((37, 100), (5, 4096), (64, 64))
RECORDS = sum(count for count, _ in SHAPES)


def make(folder: Path, name: str = "a") -> StoreManifest:
    specs = [SectionSpec(f"s{n}", "weight_channel", n, "qkv", count, size) for n, (count, size) in enumerate(SHAPES)]
    random = np.random.default_rng(7)
    with StoreWriter(folder, {"name": name}, specs) as writer:
        for number, (count, size) in enumerate(SHAPES):
            writer.write(number, 0, random.integers(0, 256, (count, size), dtype=np.uint8))
        return writer.publish()


def flip(manifest: StoreManifest, oid: int) -> None:
    section = next(s for s in manifest.sections if s.first_oid <= oid < s.first_oid + s.count)
    at = section.offset + (oid - section.first_oid) * section.stride + oid % section.record_bytes
    with manifest.records_path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def verify(manifest: StoreManifest, threads: int = 2) -> list[int]:
    seen: list[int] = []
    bad = verify_store(manifest, threads, lambda count: None, seen.append)
    assert sum(seen) == manifest.record_count
    return bad


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, RECORDS - 1)))
def test_exactly_the_damaged_are_found(tmp_path_factory: pytest.TempPathFactory, damaged: set[int]) -> None:
    manifest = make(tmp_path_factory.mktemp("verify") / "store")
    for oid in damaged:
        flip(manifest, oid)
    assert verify(manifest) == sorted(damaged)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 1 << 20])
def test_chunks_cover_every_record_once(tmp_path: Path, chunk_bytes: int) -> None:
    seen = [c.oid + i for c in chunks_of(make(tmp_path / "store"), chunk_bytes) for i in range(c.count)]
    assert seen == list(range(RECORDS))


def test_a_record_that_cannot_be_read_condemns_no_neighbour(tmp_path: Path) -> None:
    manifest = make(tmp_path / "store")
    last = manifest.sections[-1]
    checksums = load_checksums(manifest)
    with manifest.records_path.open("r+b") as file:
        file.truncate(last.offset + (last.count - 1) * last.stride)  # cut under an open daemon
        assert find_bad(file.fileno(), Chunk(last, 0, last.count), checksums) == [RECORDS - 1]


def test_padding_is_nobodys_record(tmp_path: Path) -> None:
    manifest = make(tmp_path / "store")
    section = manifest.sections[0]
    with manifest.records_path.open("r+b") as file:
        file.seek(section.offset + section.record_bytes)
        file.write(b"\xff")
    assert verify(manifest) == []


def test_a_repair_is_a_new_generation_of_good_records(tmp_path: Path) -> None:
    manifest, copy = make(tmp_path / "store"), make(tmp_path / "copy")
    for oid in (0, 36, 37, 41, RECORDS - 1):
        flip(manifest, oid)
    flip(copy, 5)  # bad in the copy, good in the store
    mended = repair_store(manifest, copy, verify(manifest), lambda count: None)
    assert mended.generation == manifest.generation + 1
    assert mended.identity_digest == manifest.identity_digest
    assert verify(open_store(manifest.folder)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "store"]


def test_bad_in_both_changes_nothing(tmp_path: Path) -> None:
    manifest, copy = make(tmp_path / "store"), make(tmp_path / "copy")
    flip(manifest, 3)
    flip(copy, 3)
    with pytest.raises(StoreCorrupt, match="there, too"):
        repair_store(manifest, copy, [3], lambda count: None)
    assert open_store(manifest.folder).generation == manifest.generation
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "store"]


def test_another_store_is_no_copy(tmp_path: Path) -> None:
    manifest, other = make(tmp_path / "store"), make(tmp_path / "other", name="b")
    with pytest.raises(StoreIdentityError):
        repair_store(manifest, other, [3], lambda count: None)
