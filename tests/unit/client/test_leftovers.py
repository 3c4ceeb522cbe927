"""Each kind of leftover is seen."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from strataflux.client import leftovers
from strataflux.client.leftovers import Leftovers, find_leftovers, shared_memory_names


def test_nothing(tmp_path: Path) -> None:
    assert find_leftovers(tmp_path / "gone", shared_memory_names()) == Leftovers()
    assert Leftovers().names == ()


def test_files_and_sockets(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    (folder / "dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "control.sock"))
        found = find_leftovers(folder, frozenset())
    assert {name.rpartition("/")[2] for name in found.files} == {folder.name, "dangling", "control.sock"}
    assert found.sockets == (f"socket {folder / 'control.sock'}",)


def test_a_process_that_names_the_folder(tmp_path: Path) -> None:
    program = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", program, f"--runtime-dir={tmp_path / 'gone'}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        assert find_leftovers(tmp_path / "gone", frozenset()).processes == (f"process {process.pid}",)
        process.communicate()
    assert find_leftovers(tmp_path / "gone", frozenset(), forced=True).processes != ()


def test_shared_memory_with_our_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    (tmp_path / "strataflux-old").touch()
    before = shared_memory_names()
    (tmp_path / "strataflux-new").touch()
    (tmp_path / "of-another").touch()
    assert find_leftovers(tmp_path / "gone", before).shared_memory == ("shared memory strataflux-new",)


def test_sum_has_all() -> None:
    both = Leftovers(processes=("a",), files=("b",)) + Leftovers(sockets=("c",), shared_memory=("d",))
    assert both.names == ("a", "b", "c", "d")
