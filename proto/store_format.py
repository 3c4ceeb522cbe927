"""The on-disk store of refinement bits: manifest, packed records, checksums (FORMAT.md, "Store").

A store is a folder of three files. ``manifest.json`` is JSON that carries its own SHA-256, ``records.bin`` the
records at a 64-byte stride after a 4096-byte header, ``records.crc`` one CRC-32C a record. A :class:`StoreWriter` makes
them in a sibling folder and publishes it by rename: a store is whole or it is not there. :func:`open_store` believes
nothing it reads before it has bounded and checked it.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.proto import layout
from strataflux.proto.errors import (
    StoreCorrupt,
    StoreGeometryError,
    StoreIdentityError,
    StoreMissing,
    StoreTruncated,
    StoreVersionError,
)

__all__ = [
    "CHECKSUMS_FILE",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MANIFEST_FILE",
    "MANIFEST_MAX_BYTES",
    "MAX_SECTIONS",
    "REBUILD",
    "RECORDS_FILE",
    "RECORDS_MAGIC",
    "RECORD_STRIDE",
    "SECTION_ALIGNMENT",
    "Section",
    "SectionSpec",
    "StoreManifest",
    "canonical_json",
    "identity_digest",
    "load_checksums",
    "manifest_body",
    "open_store",
    "plan_sections",
    "read_manifest",
    "records_header",
]

FORMAT_VERSION: Final = 1
FORMAT_NAME: Final = "strataflux-store"
MANIFEST_FILE: Final = "manifest.json"
RECORDS_FILE: Final = "records.bin"
CHECKSUMS_FILE: Final = "records.crc"

HEADER_BYTES: Final = 4096
RECORDS_MAGIC: Final = b"SFRECORD"
RECORD_STRIDE: Final = 64
SECTION_ALIGNMENT: Final = 4096
MANIFEST_MAX_BYTES: Final = 16 << 20
MAX_SECTIONS: Final = 65_536

_HEADER = struct.Struct("<8sII32sQQ")
REBUILD: Final = "make it again with `strataflux prepare`"


@dataclass(frozen=True)
class SectionSpec:
    """What a writer asks for: ``count`` records of ``record_bytes`` each for one projection set of one layer.

    ``kind`` is a key of :data:`layout.RECORD_KINDS`; ``set`` names the projection set (``qkv``, ``o``, ``gate_up``,
    ``down``, ``mlp``).
    """

    name: str
    kind: str
    layer: int
    set: str
    count: int
    record_bytes: int


@dataclass(frozen=True)
class Section:
    """A section in place: records ``first_oid … first_oid + count - 1`` at ``offset + i * stride`` of records.bin."""

    name: str
    kind: str
    layer: int
    set: str
    count: int
    record_bytes: int
    first_oid: int
    offset: int
    stride: int


@dataclass(frozen=True)
class StoreManifest:
    """A validated manifest. ``identity_digest`` is the store's name; ``generation`` grows with each update."""

    folder: Path
    identity: Mapping[str, Any]
    identity_digest: str
    generation: int
    sections: tuple[Section, ...]
    record_count: int
    records_bytes: int
    checksums_crc32c: int

    @property
    def records_path(self) -> Path:
        """The file of packed records."""
        return self.folder / RECORDS_FILE

    @property
    def checksums_path(self) -> Path:
        """The file of CRC-32Cs."""
        return self.folder / CHECKSUMS_FILE

    def section(self, layer: int, set_name: str) -> Section:
        """The section of one projection set.

        Raises:
            KeyError: the store has none.
        """
        for section in self.sections:
            if section.layer == layer and section.set == set_name:
                return section
        raise KeyError((layer, set_name))


def canonical_json(value: Any) -> bytes:
    """The one encoding of ``value`` that digests are taken over: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def identity_digest(identity: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of an identity's canonical JSON."""
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def plan_sections(specs: "list[SectionSpec] | tuple[SectionSpec, ...]") -> tuple[tuple[Section, ...], int]:
    """Lay sections out back to back; returns them and the size of records.bin.

    Raises:
        StoreGeometryError: a count or record size out of bounds, an unknown kind, or more records than an oid names.
    """
    sections: list[Section] = []
    oid, offset = 0, HEADER_BYTES
    for spec in specs:
        stride = layout.round_up(spec.record_bytes, RECORD_STRIDE)
        section = Section(**asdict(spec), first_oid=oid, offset=offset, stride=stride)
        sections.append(section)
        oid += spec.count
        offset = layout.round_up(offset + spec.count * stride, SECTION_ALIGNMENT)
    _check_sections("sections", sections, oid, offset)
    return tuple(sections), offset


def manifest_body(
    identity: Mapping[str, Any], generation: int, sections: tuple[Section, ...], records_bytes: int, crc: int
) -> dict[str, Any]:
    """The manifest as the JSON object that is written, its digest included."""
    body: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "identity": dict(identity),
        "identity_digest": identity_digest(identity),
        "generation": generation,
        "record_count": sum(s.count for s in sections),
        "records_bytes": records_bytes,
        "checksums_crc32c": crc,
        "sections": [asdict(s) for s in sections],
    }
    body["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    return body


def records_header(digest: str, generation: int, count: int) -> bytes:
    """First 4096 bytes of records.bin: it names its store, so that files of two stores cannot be mixed up."""
    packed = _HEADER.pack(RECORDS_MAGIC, FORMAT_VERSION, HEADER_BYTES, bytes.fromhex(digest), generation, count)
    return packed.ljust(HEADER_BYTES, b"\0")


def open_store(folder: Path, expected_digest: str | None = None) -> StoreManifest:
    """Validate a store's manifest, file sizes and header; record bytes are checked one by one when they are read.

    Raises:
        StoreMissing, StoreTruncated, StoreCorrupt, StoreVersionError, StoreIdentityError, StoreGeometryError: by cause.
    """
    manifest = read_manifest(folder, expected_digest)
    _check_size(manifest.records_path, manifest.records_bytes)
    _check_size(manifest.checksums_path, 4 * manifest.record_count)
    _check_header(manifest)
    return manifest


def read_manifest(folder: Path, expected_digest: str | None = None) -> StoreManifest:
    """Validate a store's manifest alone, without a look at the files it describes.

    Raises:
        StoreMissing, StoreCorrupt, StoreVersionError, StoreIdentityError, StoreGeometryError: by cause.
    """
    manifest = _parse(folder, _read_manifest(folder))
    if expected_digest is not None and manifest.identity_digest != expected_digest:
        raise StoreIdentityError(
            folder,
            f"identity {manifest.identity_digest[:12]}… {canonical_json(manifest.identity).decode()[:400]}",
            f"identity {expected_digest[:12]}…",
            "point to the store prepared from the same weights, quantizer and layout",
        )
    _check_sections(folder / MANIFEST_FILE, manifest.sections, manifest.record_count, manifest.records_bytes)
    return manifest


def load_checksums(manifest: StoreManifest) -> NDArray[np.uint32]:
    """The CRC-32C of each record, u32 [record_count], itself checked against the manifest.

    Raises:
        StoreTruncated, StoreCorrupt: the file changed since it was written.
    """
    from strataflux.proto.checksum import crc32c

    data = np.fromfile(manifest.checksums_path, dtype="<u4")
    if data.size != manifest.record_count:
        _check_size(manifest.checksums_path, 4 * manifest.record_count)
    found = crc32c(data.view(np.uint8))
    if found != manifest.checksums_crc32c:
        raise StoreCorrupt(manifest.checksums_path, f"CRC {found:#010x}", f"{manifest.checksums_crc32c:#010x}", REBUILD)
    return data


def _where_instead(folder: Path) -> str:
    """What to do about a folder without a manifest: in a prepared model the store is a folder further down."""
    inner = next((path.parent for path in sorted(folder.glob(f"*/{MANIFEST_FILE}"))), None)
    return f"check the path, or {REBUILD}" if inner is None else f"name the store in it: {inner}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST_MAX_BYTES + 1)
    except OSError as error:
        raise StoreMissing(path, str(error.strerror), "a readable manifest", _where_instead(folder)) from error
    if len(raw) > MANIFEST_MAX_BYTES:
        raise StoreCorrupt(path, f"more than {MANIFEST_MAX_BYTES} bytes", "a manifest within that", REBUILD)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(path, f"no JSON ({error})", "a manifest", REBUILD) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise StoreCorrupt(path, "another kind of file", f'"format": "{FORMAT_NAME}"', REBUILD)
    version = body.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreVersionError(
            path,
            f"format version {version}",
            f"at most {FORMAT_VERSION}",
            "upgrade strataflux, or prepare again",
        )
    digest = body.pop("digest", None)
    actual = hashlib.sha256(canonical_json(body)).hexdigest()
    if version != FORMAT_VERSION or digest != actual:
        raise StoreCorrupt(path, f"digest {actual[:12]}… over its text", f"{str(digest)[:12]}…", REBUILD)
    return body


_SECTION_FIELDS: Final = {
    "name": str,
    "kind": str,
    "layer": int,
    "set": str,
    "count": int,
    "record_bytes": int,
    "first_oid": int,
    "offset": int,
    "stride": int,
}


def _parse(folder: Path, body: dict[str, Any]) -> StoreManifest:
    """Types and ranges. A right digest says who wrote it, not that they wrote sense."""
    path = folder / MANIFEST_FILE
    try:
        raw_sections = body["sections"]
        if not isinstance(raw_sections, list) or not 0 < len(raw_sections) <= MAX_SECTIONS:
            raise ValueError(f"{len(raw_sections)} sections (1 … {MAX_SECTIONS} allowed)")
        sections = tuple(_parse_section(raw) for raw in raw_sections)
        numbers = {
            key: _natural(body[key]) for key in ("generation", "record_count", "records_bytes", "checksums_crc32c")
        }
        identity = body["identity"]
        if not isinstance(identity, dict) or identity_digest(identity) != body["identity_digest"]:
            raise ValueError("identity_digest is not the digest of identity")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(path, f"a bad field ({error})", "a manifest of this version", REBUILD) from error
    return StoreManifest(folder, identity, body["identity_digest"], sections=sections, **numbers)


def _parse_section(raw: Any) -> Section:
    if not isinstance(raw, dict) or raw.keys() != _SECTION_FIELDS.keys():
        raise ValueError("a section with missing or unknown fields")
    for key, kind in _SECTION_FIELDS.items():
        if kind is int:
            _natural(raw[key])
        elif not isinstance(raw[key], str):
            raise ValueError(f"section field {key} is no text")
    return Section(**raw)


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no natural number below 2^63")
    return value


def _check_sections(subject: object, sections: "tuple[Section, ...] | list[Section]", count: int, size: int) -> None:
    """Sections follow one another in oids and in the file: no overlap, no hole, nothing past the end."""
    oid, offset = 0, HEADER_BYTES
    for section in sections:
        stride = layout.round_up(section.record_bytes, RECORD_STRIDE)
        found = (section.first_oid, section.offset, section.stride)
        if found != (oid, offset, stride):
            raise StoreGeometryError(
                subject,
                f"section {section.name}: first_oid, offset, stride = {found}",
                f"{(oid, offset, stride)}, so that records neither overlap nor leave holes",
                REBUILD,
            )
        if not 0 < section.record_bytes <= layout.MAX_RECORD_BYTES or section.count <= 0:
            raise StoreGeometryError(
                subject,
                f"section {section.name}: {section.count} records of {section.record_bytes} bytes",
                f"at least one record of 1 … {layout.MAX_RECORD_BYTES} bytes",
                REBUILD,
            )
        if section.kind not in layout.RECORD_KINDS:
            raise StoreGeometryError(
                subject, f"record kind {section.kind!r}", f"one of {sorted(layout.RECORD_KINDS)}", REBUILD
            )
        oid += section.count
        offset = layout.round_up(offset + section.count * stride, SECTION_ALIGNMENT)
    if not 0 < oid <= layout.MAX_OID or (oid, offset) != (count, size):
        raise StoreGeometryError(
            subject,
            f"{count} records in {size} bytes (limit {layout.MAX_OID} records)",
            f"the sections' {oid} records in {offset} bytes",
            REBUILD,
        )


def _check_size(path: Path, expected: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise StoreTruncated(path, str(error.strerror), f"{expected} bytes", REBUILD) from error
    if actual != expected:
        raise StoreTruncated(path, f"{actual} bytes", f"{expected} bytes", REBUILD)


def _check_header(manifest: StoreManifest) -> None:
    path = manifest.records_path
    with path.open("rb") as file:
        found = file.read(HEADER_BYTES)
    if found != records_header(manifest.identity_digest, manifest.generation, manifest.record_count):
        raise StoreCorrupt(path, "the header of another store or generation", "its manifest's", REBUILD)
