"""Each thing that may be off is found by its own check, and nothing is found where all is well."""

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from strataflux.client import doctor
from strataflux.proto import control_pb2

WELL = control_pb2.GetInfoResponse(state="ready", engine="uring", direct_io="direct", registered_buffers=True)


def names(found: Iterable[doctor.Finding]) -> list[str]:
    return [finding.name for finding in found]


def test_nothing_is_off() -> None:
    assert names(doctor.check_daemon(WELL, control_pb2.Stats())) == []
    store = control_pb2.Store(digest="ab" * 32, stats=control_pb2.StoreStats(direct=True))
    assert names(doctor.check_stores([store])) == []


@pytest.mark.parametrize(
    ("info", "stats", "name"),
    [
        ({"state": "unready"}, {}, "state"),
        ({"degraded": {"memory": "cache was given back"}}, {}, "degraded: memory"),
        ({"registered_buffers": False}, {}, "memlock"),
        ({"engine": "threads"}, {}, "io_uring"),
        ({}, {"reads": control_pb2.ReadStats(reads=200, microseconds=2_000_000)}, "device"),
        ({}, {"io_errors": [control_pb2.IoErrorStats(op="read", errno="EIO", count=1)]}, "device"),
        ({}, {"io_errors": [control_pb2.IoErrorStats(op="write", errno="ENOSPC", count=1)]}, "device"),
        ({}, {"fills": control_pb2.FillStats(corrupt=2)}, "corruption"),
        ({}, {"fences": 1}, "fences"),
        ({}, {"kv": control_pb2.KvStats(free_bytes=1 << 20)}, "space"),
        ({}, {"kv": control_pb2.KvStats(granted_bytes=4096)}, "space"),
    ],
)
def test_what_a_daemon_says_about_itself(info: dict[str, Any], stats: dict[str, Any], name: str) -> None:
    well: dict[str, Any] = {"state": "ready", "engine": "uring", "direct_io": "direct", "registered_buffers": True}
    said = control_pb2.GetInfoResponse(**(well | info))
    (finding,) = doctor.check_daemon(said, control_pb2.Stats(**stats))
    assert finding.name == name
    assert finding.remedy


def test_a_slow_device_is_told_by_enough_reads_only() -> None:
    few = control_pb2.Stats(reads=control_pb2.ReadStats(reads=2, microseconds=2_000_000))
    assert names(doctor.check_daemon(WELL, few)) == []


def test_stores(tmp_path: Path) -> None:
    assert names(doctor.check_stores([])) == ["stores"]
    bad = control_pb2.Store(digest="ab" * 32, path=str(tmp_path / "gone"), stats=control_pb2.StoreStats(quarantined=3))
    assert names(doctor.check_stores([bad])) == ["direct I/O", "quarantine", "store"]


def test_little_space_beside_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = control_pb2.Store(digest="ab" * 32, path=str(tmp_path), stats=control_pb2.StoreStats(direct=True))
    free = os.statvfs_result((4096, 4096, 1 << 20, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr("strataflux.client.doctor.os.statvfs", lambda path: free)
    (finding,) = doctor.check_stores([store])
    assert (finding.name, finding.found) == ("space", f"0 MiB free beside {tmp_path}")


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EPERM, "denies"), (errno.ENOSYS, "has none"), (errno.EFAULT, None), (errno.EINVAL, None)],
)
def test_io_uring_where_no_daemon_can_be_asked(monkeypatch: pytest.MonkeyPatch, code: int, words: str | None) -> None:
    monkeypatch.setattr("strataflux.client.doctor._try_io_uring", lambda: code)
    found = list(doctor.check_machine())
    assert [finding.name for finding in found] == (["io_uring"] if words else [])
    assert all(words is not None and words in finding.found for finding in found)


def test_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(doctor.check_access(tmp_path)) == ["daemon"]
    (tmp_path / "attach.sock").write_text("")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
    (finding,) = doctor.check_access(tmp_path)
    assert "is no socket" in finding.found
    monkeypatch.setattr("os.access", lambda *_: False)
    assert names(doctor.check_access(tmp_path)) == ["daemon", "group"]
