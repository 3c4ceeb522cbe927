"""FORMAT.md says what the code does: its tables are read here and compared with layout.py, ring.py and the rest."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import strataflux.proto
from strataflux.proto import layout, messages, store_format

TEXT = (Path(strataflux.proto.__file__).parent / "FORMAT.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    match = re.search(rf"^#+ (?:\d+\. )?{re.escape(title)}$\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"FORMAT.md has no heading {title}"
    return match[1]


def rows(title: str, table: int = 0) -> Iterator[list[str]]:
    """The rows of a table of a section, header and rule left out."""
    tables = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    for line in tables[table].splitlines()[2:]:
        yield [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


WIDTHS = {
    "u32": np.dtype("<u4"),
    "u64": np.dtype("<u8"),
    "u32 × 4": np.dtype(("<u4", (4,))),
    "u64 × 2": np.dtype(("<u8", (2,))),
}


@pytest.mark.parametrize(
    ("title", "page"),
    [
        ("Daemon page", layout.DAEMON_PAGE),
        ("Session view", layout.SESSION_VIEW),
        ("Session segment", layout.SESSION_PAGE),
    ],
)
def test_pages_are_as_written(title: str, page: np.dtype[np.void]) -> None:
    assert page.fields is not None
    written = {row[0]: (int(row[1]), WIDTHS[row[2]]) for row in rows(title)}
    actual = {name: (offset, dtype) for name, (dtype, offset, *_) in page.fields.items() if name != "header"}
    assert written == actual


@pytest.mark.parametrize("title", ["Daemon page", "Session view", "Session segment"])
def test_words_of_different_writers_never_share_a_cache_line(title: str) -> None:
    lines: dict[int, str] = {}
    for name, offset, _, writer, *_ in rows(title):
        assert lines.setdefault(int(offset) // layout.CACHE_LINE, writer) == writer, name


def test_the_header_of_pages_is_as_written() -> None:
    assert layout.HEADER.fields is not None
    written = {row[0]: (int(row[1]), WIDTHS[row[2]]) for row in rows("Pages")}
    assert written == {name: (offset, dtype) for name, (dtype, offset, *_) in layout.HEADER.fields.items()}
    magics = next(row[3] for row in rows("Pages") if row[0] == "magic")
    for magic in (layout.DAEMON_MAGIC, layout.VIEW_MAGIC, layout.SESSION_MAGIC):
        assert magic.to_bytes(8, "little").decode().replace("\0", "\\0") in magics


def test_directory_values_are_as_written() -> None:
    values = [row[0] for row in rows("Directory")]
    assert values == ["0", "1 … 0xFFFFFFFE", "0xFFFFFFFF"]
    assert (layout.ENTRY_ABSENT, layout.ENTRY_QUARANTINED) == (0, 0xFFFFFFFF)


def test_ring_entry_bits_are_as_written() -> None:
    bits = [row[0] for row in rows("Rings")]
    assert bits == ["56-63", "48-55", "40-47", "39", "0-38"]
    assert (layout.LAP_SHIFT, layout.SCORE_SHIFT, layout.TABLE_SHIFT) == (56, 48, 40)
    assert layout.PREFETCH == 1 << 39
    assert layout.OID_MASK == (1 << 39) - 1
    assert layout.PUT_STAGING_SHIFT == 48


def test_put_results_are_as_written() -> None:
    assert [int(row[1]) for row in rows("KV blocks and puts")] == [
        layout.PUT_NONE,
        layout.PUT_ACCEPTED,
        layout.PUT_REFUSED_QUOTA,
        layout.PUT_REFUSED_SPACE,
        layout.PUT_REFUSED_DUPLICATE,
        layout.PUT_REFUSED_INVALID,
    ]


def test_the_records_header_is_as_written() -> None:
    raw = store_format.records_header("ab" * 32, 7, 9)
    at = {row[0]: int(row[1]) for row in rows("Header of records.bin")}
    assert raw[at["magic"] : 8] == b"SFRECORD"
    assert int.from_bytes(raw[at["version"] :][:4], "little") == store_format.FORMAT_VERSION
    assert int.from_bytes(raw[at["header bytes"] :][:4], "little") == len(raw) == 4096
    assert raw[at["identity digest"] :][:32] == b"\xab" * 32
    assert int.from_bytes(raw[at["generation"] :][:8], "little") == 7
    assert int.from_bytes(raw[at["record count"] :][:8], "little") == 9
    assert not any(raw[at["reserved"] :])


def test_manifest_keys_are_as_written() -> None:
    sections, size = store_format.plan_sections([store_format.SectionSpec("a", "weight_channel", 0, "o", 3, 70)])
    body = store_format.manifest_body({"model": "x"}, 1, sections, size, 0)
    assert {row[0] for row in rows("Manifest")} == set(body)
    assert {row[0] for row in rows("Manifest", 1)} == set(body["sections"][0])


PARTS = {
    "store_ref": messages.StoreRef,
    "kv_geometry": messages.KvGeometry,
    "table_info": messages.TableInfo,
    "segment_info": messages.SegmentInfo,
}


def type_name(hint: Any) -> str:
    """A field's type in the words of FORMAT.md."""
    names: dict[Any, str] = {int: "int", str: "text", messages.KvGeometry | None: "kv_geometry"}
    names |= {kind: name for name, kind in PARTS.items()}
    if getattr(hint, "__origin__", None) is list:
        return f"list of {type_name(hint.__args__[0])}"
    return str(names.get(hint, "object"))


def test_message_fields_are_as_written() -> None:
    written = {(row[0], row[1]): row[2].split(" [")[0] for row in rows("Attach") if row[1] != "-"}
    kinds: dict[str, Any] = {kind.type: kind for kind in get_args(messages.Message)} | PARTS
    actual = {
        (name, field.name): type_name(get_type_hints(kind)[field.name])
        for name, kind in kinds.items()
        for field in fields(kind)
    }
    assert written == actual


def test_refusal_codes_are_as_written() -> None:
    line = re.search(r"^Codes of `refuse`:.*?(?=After a refused)", section("Attach"), re.MULTILINE | re.DOTALL)
    assert line
    assert set(re.findall(r"`(\w+)`", line[0])) - {"refuse"} == messages.REFUSALS


def test_numbers_in_the_text_are_the_codes() -> None:
    assert f"most {messages.MESSAGE_MAX_BYTES:,} bytes" in TEXT
    assert f"at most {messages.MAX_DESCRIPTORS} descriptors" in TEXT
    assert f"{messages.MAX_ATTACHED_TABLES} tables a session" in TEXT
    assert f"Layout version (segments, rings, attach messages): {layout.LAYOUT_VERSION}" in TEXT
    assert f"Store format version: {store_format.FORMAT_VERSION}" in TEXT
    assert f"1 … {layout.MAX_RECORD_BYTES:,}" in TEXT
    assert f"2^{layout.RING_LOG2_MIN} … 2^{layout.RING_LOG2_MAX}" in TEXT


def test_the_session_segments_parts_follow_one_another() -> None:
    for ring_log2, stamps, staging in ((8, 0, 0), (9, 1, 1), (20, 65_537, 5000)):
        at = layout.session_geometry(ring_log2, stamps, staging)
        assert at.ring_offset == 4096
        assert at.put_ring_offset == at.ring_offset + layout.round_up(8 << ring_log2, 4096)
        assert at.stamps_offset == at.put_ring_offset + 4096
        assert at.staging_offset == at.stamps_offset + layout.round_up(4 * stamps, 4096)
        assert at.total_bytes == at.staging_offset + 4 * layout.round_up(staging, 4096)


def test_every_label_between_processes_is_in_the_table() -> None:
    root = Path(strataflux.proto.__file__).parent.parent
    used: set[str] = set()
    for folder in ("proto", "client", "daemon"):
        for path in (root / folder).rglob("*.py"):
            if path.parent.name != "engines":  # those pair the daemon with its kernel and its own threads
                used |= set(re.findall(r"SYNC: ([\w-]+) \((?:publish|read)\)", path.read_text()))
    written = {name.strip() for row in rows("Memory order") for name in row[0].split(",")}
    assert used <= written
    assert {"directory-entry", "ring-entry", "step-begun", "step-ended", "fenced"} <= used
