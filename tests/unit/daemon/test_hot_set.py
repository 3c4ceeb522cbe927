"""The hot set's file: what was written is read, what was not is refused, and a death leaves one or the other whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.daemon.hot_set import HotSetError, read_hot_set, write_hot_set
from strataflux.daemon.interface import HotRecords

DIGESTS = ["ab" * 32, "cd" * 32, "00" * 32]


def hot(digest: str, records: int, *oids: int) -> HotRecords:
    return HotRecords(digest, records, np.array(oids, np.uint32))


def same(found: list[HotRecords], written: list[HotRecords]) -> bool:
    return [(d, n, oids.tolist()) for d, n, oids in found] == [(d, n, oids.tolist()) for d, n, oids in written]


parts = st.lists(st.integers(0, 999), unique=True, max_size=50).map(lambda oids: np.array(oids, np.uint32))


@settings(max_examples=40, deadline=None)
@given(oids=st.lists(parts, max_size=3))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, oids: list[np.ndarray]) -> None:
    path = tmp_path_factory.mktemp("hot") / "hot.set"
    written = [HotRecords(DIGESTS[at], 1000, mine) for at, mine in enumerate(oids)]
    write_hot_set(path, written)
    assert same(read_hot_set(path), written)
    assert [file.name for file in path.parent.iterdir()] == ["hot.set"]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "hot.set"
    write_hot_set(path, [hot(DIGESTS[0], 9, 3, 8), hot(DIGESTS[1], 9, 1)])
    good = path.read_bytes()
    for at in [*range(28), *range(32, len(good))]:  # four bytes of the header are reserved
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(HotSetError):
            read_hot_set(path)


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "hot.set"
    write_hot_set(path, [hot(DIGESTS[0], 9, 3, 8)])
    good = path.read_bytes()
    for raw in (*(good[:length] for length in range(len(good))), good + b"\0"):
        path.write_bytes(raw)
        with pytest.raises(HotSetError):
            read_hot_set(path)


@pytest.mark.parametrize(
    ("oids", "words"),
    [([9], "record 9 of a store, expected one below 9"), ([2, 2], "a record twice"), ([3] * 40, "a record twice")],
)
def test_a_sound_file_of_impossible_records_is_refused(tmp_path: Path, oids: list[int], words: str) -> None:
    path = tmp_path / "hot.set"
    write_hot_set(path, [hot(DIGESTS[0], 9, *oids)])
    with pytest.raises(HotSetError, match=words):
        read_hot_set(path)


def test_none_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_hot_set(tmp_path / "hot.set")


_DYING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from strataflux.daemon.hot_set import write_hot_set
from strataflux.daemon.interface import HotRecords
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
setattr(*{"sync": (os, "fsync"), "rename": (Path, "rename")}[sys.argv[2]], die)
write_hot_set(Path(sys.argv[1]), [HotRecords("cd" * 32, 9, np.array([5], np.uint32))])
"""


@pytest.mark.parametrize("moment", ["sync", "rename"])
def test_a_death_before_the_rename_leaves_the_old_one(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "hot.set"
    old = [hot(DIGESTS[0], 9, 3, 8)]
    write_hot_set(path, old)
    died = subprocess.run([sys.executable, "-c", _DYING, str(path), moment], env=dict(os.environ), check=False)
    assert died.returncode == -signal.SIGKILL
    assert same(read_hot_set(path), old)
    write_hot_set(path, [])
    assert read_hot_set(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["hot.set"]


def test_nobody_is_followed_and_nobody_else_reads_it(tmp_path: Path) -> None:
    """The service may run as root: what lies where it writes is replaced, never written through."""
    path, other = tmp_path / "hot.set", tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / "hot.set.new").symlink_to(other)
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        read_hot_set(path)
    write_hot_set(path, [hot(DIGESTS[0], 9, 3)])
    assert other.read_text() == "not ours"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert same(read_hot_set(path), [hot(DIGESTS[0], 9, 3)])


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hot.set")
    with pytest.raises(HotSetError, match="no regular file"):
        read_hot_set(tmp_path / "hot.set")
