"""Reads are measured on files that are there, and a scratch file leaves nothing behind."""

from pathlib import Path

import pytest

from strataflux.client.disk import measure_reads, scratch_file
from strataflux.client.errors import InputError


def test_random_reads_of_a_scratch_file(tmp_path: Path) -> None:
    with scratch_file(tmp_path, 8 << 20, 60.0) as path:
        found = measure_reads(path, 5000, 0.05, threads=4)
    assert list(tmp_path.iterdir()) == []
    assert (found.read_bytes, found.file_bytes) == (8192, 8 << 20)
    assert found.reads_per_second > 0
    assert 0 < found.median_seconds <= found.slow_seconds


def test_writing_stops_when_its_time_is_over(tmp_path: Path) -> None:
    with scratch_file(tmp_path, 1 << 50, 0.0) as path:
        assert path.stat().st_size == 8 << 20


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--at"), scratch_file(tmp_path / "nowhere", 1 << 20, 1.0):
        pass


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_file_that_is_too_small(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(content)
    with pytest.raises(InputError, match="a smaller file"):
        measure_reads(tmp_path / "small", 4096, 1.0)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        measure_reads(tmp_path / "nowhere", 4096, 1.0)
