"""Talking to a service manager: real datagrams, and descriptors where a manager puts them."""

import os
import socket
import sys
from pathlib import Path

import pytest

from strataflux.daemon.notify import Notifier, activated_sockets, watchdog_seconds


def manager(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.settimeout(60)
    listener.bind(name)
    return listener


def test_states_arrive_at_a_path(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with manager(path) as listener:
        notifier = Notifier({"NOTIFY_SOCKET": path})
        notifier.send(READY="1", STATUS="two stores")
        notifier.send(WATCHDOG="1")
        assert listener.recv(1000) == b"READY=1\nSTATUS=two stores"
        assert listener.recv(1000) == b"WATCHDOG=1"


def test_states_arrive_at_an_abstract_name() -> None:
    name = f"strataflux-test-{os.getpid()}"
    with manager(f"\0{name}") as listener:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).send(STOPPING="1")
        assert listener.recv(1000) == b"STOPPING=1"


def test_nobody_to_talk_to_is_no_error(tmp_path: Path) -> None:
    Notifier({}).send(READY="1")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "absent")}).send(READY="1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_ours_or_nobodys(environment: dict[str, str], expected: float | None) -> None:
    assert watchdog_seconds(environment, 7) == expected


_ACTIVATED = """
import os, sys
from strataflux.daemon.notify import activated_sockets
environment = {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": sys.argv[1]}
found = activated_sockets(environment, os.getpid())
for name, listener in sorted(found.items()):
    print(name, listener.fileno(), os.get_inheritable(listener.fileno()), listener.getblocking())
print(environment)
"""


@pytest.mark.parametrize("names", ["", "attach.sock:control.sock", "unknown:unknown"])
def test_activated_sockets_have_their_names(tmp_path: Path, names: str) -> None:
    listeners = []
    for name, kind in (("attach.sock", socket.SOCK_SEQPACKET), ("control.sock", socket.SOCK_STREAM)):
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(str(tmp_path / name))
        listener.listen()
        listeners.append(listener)
    # As a manager does: descriptors 3 and 4, whatever was there.
    actions = [(os.POSIX_SPAWN_DUP2, listener.fileno(), 100 + i) for i, listener in enumerate(listeners)]
    actions += [(os.POSIX_SPAWN_DUP2, 100 + i, 3 + i) for i in range(2)]
    read, write = os.pipe()
    actions.append((os.POSIX_SPAWN_DUP2, write, 1))
    arguments = [sys.executable, "-c", _ACTIVATED, names]
    process = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=actions)
    os.close(write)
    with os.fdopen(read) as out:
        lines = out.read().splitlines()
    assert os.waitpid(process, 0)[1] == 0
    assert lines == ["attach.sock 3 False False", "control.sock 4 False False", "{}"]
    for listener in listeners:
        listener.close()


def test_sockets_of_another_process_are_not_ours() -> None:
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": "1"}
    assert activated_sockets(environment, 2) == {}
    assert environment == {}
