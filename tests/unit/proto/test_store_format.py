"""Stores: what is written is read back, and nothing that was damaged is opened."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strataflux.proto import layout
from strataflux.proto.checksum import crc32c
from strataflux.proto.errors import (
    StoreCorrupt,
    StoreError,
    StoreGeometryError,
    StoreIdentityError,
    StoreMissing,
    StoreTruncated,
    StoreVersionError,
)
from strataflux.proto.store_format import SectionSpec, StoreManifest, canonical_json, load_checksums, open_store
from strataflux.proto.store_writer import StoreWriter
from tests.fakes.store import make_store

tmp_path_per_example = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=5, record_bytes=70, layers=2)


def sections() -> st.SearchStrategy[list[SectionSpec]]:
    """A few sections of small records of all sizes around a stride."""
    one = st.builds(
        SectionSpec,
        name=st.text(max_size=8),
        kind=st.sampled_from(sorted(layout.RECORD_KINDS)),
        layer=st.integers(0, 99),
        set=st.sampled_from(["qkv", "o", "mlp"]),
        count=st.integers(1, 70),
        record_bytes=st.integers(1, 200),
    )
    return st.lists(one, min_size=1, max_size=5)


@tmp_path_per_example
@given(specs=sections(), seed=st.integers(0, 99))
def test_round_trip(tmp_path: Path, specs: list[SectionSpec], seed: int) -> None:
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    random = np.random.default_rng(seed)
    data = [random.integers(0, 256, (spec.count, spec.record_bytes)).astype(np.uint8) for spec in specs]
    with StoreWriter(folder, {"seed": seed}, specs) as writer:
        for number in random.permutation(len(specs)):
            half = len(data[number]) // 2
            writer.write(int(number), half, data[number][half:])
            writer.write(int(number), 0, data[number][:half])
        writer.publish()

    opened = open_store(folder)
    raw = opened.records_path.read_bytes()
    checksums = load_checksums(opened)
    assert len(raw) == opened.records_bytes
    for section, records in zip(opened.sections, data, strict=True):
        for i, record in enumerate(records):
            at = section.offset + i * section.stride
            assert at % 64 == 0
            assert raw[at : at + section.record_bytes] == record.tobytes()
            assert not any(raw[at + section.record_bytes : at + section.stride])
            assert checksums[section.first_oid + i] == crc32c(record)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@tmp_path_per_example
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_in_the_manifest_is_never_opened(
    tmp_path: Path, manifest: StoreManifest, place: float, bit: int
) -> None:
    path = manifest.folder / "manifest.json"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[int(place * len(bad))] ^= 1 << bit
    path.write_bytes(bad)
    try:
        opened: StoreManifest | None = open_store(manifest.folder)
    except StoreError:
        opened = None
    finally:
        path.write_bytes(good)
    if opened is not None:  # a flip within white space, which means the same
        assert json.loads(bad) == json.loads(good)
        assert opened == manifest


@pytest.mark.parametrize("name", ["records.bin", "records.crc"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size(manifest: StoreManifest, name: str, change: int) -> None:
    path = manifest.folder / name
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + change)
    with pytest.raises(StoreTruncated, match=f"{name}: found {size + change} bytes; expected {size} bytes"):
        open_store(manifest.folder)


@pytest.mark.parametrize("name", ["records.bin", "records.crc"])
def test_a_missing_file(manifest: StoreManifest, name: str) -> None:
    (manifest.folder / name).unlink()
    with pytest.raises(StoreTruncated, match=name):
        open_store(manifest.folder)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match="strataflux prepare"):
        open_store(tmp_path / "nowhere")


def test_the_folder_around_a_store_names_it(manifest: StoreManifest) -> None:
    with pytest.raises(StoreMissing, match=f"name the store in it: {manifest.folder}"):
        open_store(manifest.folder.parent)


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_truncated_manifest(manifest: StoreManifest, size: int) -> None:
    path = manifest.folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StoreCorrupt, match="no JSON"):
        open_store(manifest.folder)


def test_a_manifest_too_deep_or_too_long_is_refused(manifest: StoreManifest) -> None:
    path = manifest.folder / "manifest.json"
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(StoreCorrupt):
        open_store(manifest.folder)
    path.write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(StoreCorrupt, match="more than 16777216 bytes"):
        open_store(manifest.folder)


def rewrite(manifest: StoreManifest, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and make its digest right again, as a mistaken or hostile writer would."""
    path = manifest.folder / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["digest"]
    change(body)
    body["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    path.write_text(json.dumps(body))


def test_a_newer_version_is_refused_by_number(manifest: StoreManifest) -> None:
    rewrite(manifest, lambda body: body.update(version=2))
    with pytest.raises(StoreVersionError, match="format version 2; expected at most 1; upgrade"):
        open_store(manifest.folder)


def test_another_identity_is_refused(manifest: StoreManifest) -> None:
    with pytest.raises(StoreIdentityError, match="prepared from the same weights"):
        open_store(manifest.folder, expected_digest="0" * 64)
    assert open_store(manifest.folder, expected_digest=manifest.identity_digest) == manifest


def test_an_identity_that_is_not_its_digest(manifest: StoreManifest) -> None:
    rewrite(manifest, lambda body: body["identity"].update(model="another"))
    with pytest.raises(StoreCorrupt, match="identity_digest"):
        open_store(manifest.folder)


def set_section(number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["sections"][number].update(values)


GEOMETRY = {
    "overlap in the file": set_section(1, offset=4096),
    "a hole in the file": set_section(1, offset=12_288),
    "overlap in ids": set_section(1, first_oid=4),
    "a hole in ids": set_section(1, first_oid=6),
    "a stride below the record": set_section(0, stride=64),
    "more records than the file": set_section(1, count=6),
    "an overflowing count": set_section(1, count=1 << 60),
    "an empty section": set_section(1, count=0),
    "an empty record": set_section(0, record_bytes=0, stride=0),
    "a record larger than a page": set_section(0, record_bytes=layout.MAX_RECORD_BYTES + 1, stride=262_208),
    "an unknown kind": set_section(0, kind="other"),
    "another count": lambda body: body.update(record_count=9),
    "another size": lambda body: body.update(records_bytes=16_384),
}


@pytest.mark.parametrize("change", GEOMETRY.values(), ids=GEOMETRY.keys())
def test_geometry_that_overlaps_overflows_or_leaves_holes(
    manifest: StoreManifest, change: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(manifest, change)
    with pytest.raises(StoreGeometryError):
        open_store(manifest.folder)


FIELDS = {
    "a negative number": set_section(0, count=-1),
    "a number of 2^63": set_section(0, offset=1 << 63),
    "a fraction": set_section(0, stride=64.0),
    "a truth value": set_section(0, layer=True),
    "a text for a number": set_section(0, record_bytes="70"),
    "a number for a text": set_section(0, name=1),
    "an unknown field": set_section(0, extra=1),
    "a missing field": lambda body: body["sections"][0].pop("set"),
    "no sections": lambda body: body.update(sections=[]),
    "sections of another type": lambda body: body.update(sections={}),
    "no generation": lambda body: body.pop("generation"),
    "an identity of another type": lambda body: body.update(identity=[]),
    "another format": lambda body: body.update(format="other"),
    "a version of zero": lambda body: body.update(version=0),
    "a version that is a text": lambda body: body.update(version="1"),
}


@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS.keys())
def test_fields_of_another_type_or_range(manifest: StoreManifest, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(manifest, lambda body: (change(body), None)[1])
    with pytest.raises(StoreCorrupt):
        open_store(manifest.folder)


def test_swapped_files_of_two_stores(tmp_path: Path, manifest: StoreManifest) -> None:
    other = make_store(tmp_path / "other", records=5, record_bytes=70, layers=2, name="other one")
    shutil.copy(other.records_path, manifest.records_path)
    with pytest.raises(StoreCorrupt, match="the header of another store or generation"):
        open_store(manifest.folder)


def test_swapped_checksums_of_two_stores(tmp_path: Path, manifest: StoreManifest) -> None:
    other = make_store(tmp_path / "other", records=5, record_bytes=70, layers=2, name="other one")
    shutil.copy(other.checksums_path, manifest.checksums_path)
    with pytest.raises(StoreCorrupt, match=r"records\.crc: found CRC 0x"):
        load_checksums(open_store(manifest.folder))


def test_nothing_appears_before_publish_and_nothing_stays_after_abort(tmp_path: Path) -> None:
    spec = SectionSpec("a", "weight_channel", 0, "o", 2, 10)
    with StoreWriter(tmp_path / "store", {}, [spec]) as writer:
        writer.write(0, 0, np.zeros((1, 10), np.uint8))
        assert not (tmp_path / "store").exists()
        with pytest.raises(StoreGeometryError, match="1 records written; expected all 2"):
            writer.publish()
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_place_is_replaced_whole_and_its_readers_keep_theirs(tmp_path: Path) -> None:
    old = make_store(tmp_path / "store", records=5, record_bytes=70)
    with old.records_path.open("rb") as reader:
        before = reader.read()
        make_store(tmp_path / "store", records=9, record_bytes=70, name="newer")
        reader.seek(0)
        assert reader.read() == before
    assert open_store(tmp_path / "store").record_count == 9
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("first", "shape"), [(0, (1, 9)), (0, (1, 11)), (2, (1, 10)), (0, (3, 10)), (-1, (1, 10)), (0, (10,))]
)
def test_records_that_do_not_fit_their_section(tmp_path: Path, first: int, shape: tuple[int, ...]) -> None:
    spec = SectionSpec("a", "weight_channel", 0, "o", 2, 10)
    with StoreWriter(tmp_path / "store", {}, [spec]) as writer, pytest.raises(StoreGeometryError, match="section a"):
        writer.write(0, first, np.zeros(shape, np.uint8))
