"""Credentials and rules: who is there, and what they may use."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from strataflux.daemon.access import Peer, StoreAccess, peer_of, pidfd_of, role_of
from strataflux.daemon.config import StoreConfig

DAEMON = os.geteuid()
OTHER = 1_000_001


def peer(uid: int, *groups: int) -> Peer:
    return Peer(1, uid, uid, frozenset({uid, *groups}))


def access(**settings: object) -> StoreAccess:
    return StoreAccess(StoreConfig(Path("/s"), **settings))  # type: ignore[arg-type]


def test_credentials_of_a_peer_are_its_own() -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        found = peer_of(one)
    assert (found.pid, found.uid, found.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert found.groups == {os.getgid(), *os.getgroups()}


def test_a_pidfd_tells_when_the_peer_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        program = "import socket, sys; s = socket.socket(1, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.recv(1)"
        process = subprocess.Popen([sys.executable, "-c", program, str(path)])
        connection, _ = listener.accept()
        with connection:
            found = peer_of(connection)
            descriptor = pidfd_of(connection, found)
            assert found.pid == process.pid
            assert descriptor is not None
            assert not os.get_inheritable(descriptor)
            assert select.select([descriptor], [], [], 0)[0] == []
            process.kill()
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
            os.close(descriptor)
    process.wait()


@pytest.mark.parametrize(("uid", "role"), [(0, "admin"), (DAEMON, "admin"), (OTHER, "reader")])
def test_roles(uid: int, role: str) -> None:
    assert role_of(peer(uid)) == role


@pytest.mark.parametrize(
    ("settings", "who", "allowed"),
    [
        ({}, peer(OTHER), True),
        ({"allow_uids": (5,)}, peer(OTHER), False),
        ({"allow_uids": (5, OTHER)}, peer(OTHER), True),
        ({"allow_uids": ()}, peer(OTHER), False),
        ({"allow_uids": ()}, peer(0), True),
        ({"allow_uids": ()}, peer(DAEMON), True),
        ({"allow_groups": (7,)}, peer(OTHER), False),
        ({"allow_groups": (7,)}, peer(OTHER, 7), True),
        ({"allow_uids": (5,), "allow_groups": (7,)}, peer(5), True),
        ({"allow_uids": (5,), "allow_groups": (7,)}, peer(OTHER, 8), False),
    ],
)
def test_lists(settings: dict[str, object], who: Peer, allowed: bool) -> None:
    assert access(**settings).allows(who) is allowed


@pytest.mark.parametrize(
    ("share", "users", "excluded"),
    [
        ("all", [1, 2], False),
        ("uid", [], False),
        ("uid", [OTHER, OTHER], False),
        ("uid", [OTHER, 2], True),
        ("session", [], False),
        ("session", [OTHER], True),
    ],
)
def test_sharing(share: str, users: list[int], excluded: bool) -> None:
    assert access(share=share).excluded_by(peer(OTHER), users) is excluded
