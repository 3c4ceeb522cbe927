"""The runtime folder: one live daemon, leftovers replaced, nothing left behind."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from strataflux.daemon.errors import RuntimeFolderError, SocketInUse
from strataflux.daemon.runtime_dir import RuntimeFolder
from strataflux.proto.runtime import LOCK_FILE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def test_modes_keep_others_out(path: Path) -> None:
    folder = RuntimeFolder.open(path)
    with folder.bind("a.sock", socket.SOCK_STREAM) as listener:
        assert not os.get_inheritable(listener.fileno())
        assert not listener.getblocking()
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if os.geteuid() == 0 else 0o700)
        assert stat.S_IMODE((path / "a.sock").stat().st_mode) == 0o660
        assert stat.S_IMODE(folder.private_folder().stat().st_mode) == 0o700
        assert connects(path / "a.sock")
    folder.close()


def test_nothing_is_left_behind(path: Path) -> None:
    folder = RuntimeFolder.open(path)
    folder.bind("a.sock", socket.SOCK_STREAM).close()
    (folder.private_folder() / "inner").touch()
    folder.close()
    folder.close()
    assert not path.exists()


def test_a_folder_that_was_there_stays(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "theirs").touch()
    folder = RuntimeFolder.open(path)
    folder.bind("a.sock", socket.SOCK_STREAM).close()
    folder.close()
    assert [p.name for p in path.iterdir()] == ["theirs"]


def test_a_live_daemon_is_not_disturbed(path: Path) -> None:
    folder = RuntimeFolder.open(path)
    with folder.bind("a.sock", socket.SOCK_STREAM):
        with pytest.raises(SocketInUse) as caught:
            RuntimeFolder.open(path)
        assert str(os.getpid()) in caught.value.found
        assert connects(path / "a.sock")
    folder.close()
    RuntimeFolder.open(path).close()


def test_what_a_killed_daemon_left_is_replaced(path: Path) -> None:
    program = (
        "import os, socket, sys; from pathlib import Path; from strataflux.daemon.runtime_dir import RuntimeFolder\n"
        "folder = RuntimeFolder.open(Path(sys.argv[1])); folder.bind('a.sock', socket.SOCK_STREAM)\n"
        "(folder.private_folder() / 'inner').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    left = (path / "a.sock").stat().st_ino
    assert not connects(path / "a.sock")
    folder = RuntimeFolder.open(path)
    assert list(folder.private_folder().iterdir()) == []
    with folder.bind("a.sock", socket.SOCK_STREAM):
        assert connects(path / "a.sock")
        assert left
    folder.close()


def test_a_name_that_another_took_over_is_left_alone(path: Path) -> None:
    folder = RuntimeFolder.open(path)
    folder.bind("a.sock", socket.SOCK_STREAM).close()
    replacement = path / "b.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(replacement))
        replacement.rename(path / "a.sock")
        folder.close()
        assert (path / "a.sock").exists()


def test_a_lock_whose_file_was_removed_is_taken_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that stops removes the file between our open and our lock: then what we locked is nobody's lock."""
    path.mkdir(mode=0o700)
    opened = []
    original = os.open

    def open_and_lose(name: Path, *rest: int) -> int:
        descriptor = original(name, *rest)
        opened.append(descriptor)
        if len(opened) == 1:
            (path / LOCK_FILE).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    folder = RuntimeFolder.open(path)
    assert len(opened) == 2
    with pytest.raises(SocketInUse):
        RuntimeFolder.open(path)
    folder.close()


def test_a_file_in_the_way_is_not_removed(path: Path) -> None:
    folder = RuntimeFolder.open(path)
    (path / "a.sock").write_text("precious")
    with pytest.raises(RuntimeFolderError, match="no socket"):
        folder.bind("a.sock", socket.SOCK_STREAM)
    assert (path / "a.sock").read_text() == "precious"
    folder.close()


def test_a_path_that_is_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    folder = RuntimeFolder.open(path)
    with pytest.raises(RuntimeFolderError, match="at most 107"):
        folder.bind("a.sock", socket.SOCK_STREAM)
    folder.close()


def test_a_folder_that_others_may_write_to_is_refused(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(RuntimeFolderError, match="0770"):
        RuntimeFolder.open(path)
    assert list(path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12_345, -1)
    with pytest.raises(RuntimeFolderError, match="owner 12345"):
        RuntimeFolder.open(path)


def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeFolderError, match="no folder"):
        RuntimeFolder.open(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFolderError, match=r"--runtime-dir"):
        RuntimeFolder.open(tmp_path / "file" / "run")
