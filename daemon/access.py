"""Who is at the other end of a socket, and which stores they may use."""

import array
import errno
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from strataflux.daemon.config import StoreConfig

__all__ = ["ADMIN", "READER", "Peer", "StoreAccess", "peer_of", "pidfd_of", "role_of"]

ADMIN: Final = "admin"
READER: Final = "reader"

_CREDENTIALS: Final = struct.Struct("iII")
_SO_PEERGROUPS: Final = 59
_SO_PEERPIDFD: Final = 77
_GROUPS_BYTES: Final = 1024
"""The longest option that Python reads: 256 groups."""


@dataclass(frozen=True)
class Peer:
    """Credentials as the kernel recorded them when the peer connected."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of the process at the other end of a Unix socket, its supplementary groups included.

    Raises:
        OSError: the peer is gone already.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    groups = array.array("I")
    try:
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        # Of somebody in more groups than Python can ask for only the first counts: too few rights, never too many.
    return Peer(pid, uid, gid, frozenset({gid, *groups}))


def pidfd_of(connection: socket.socket, peer: Peer) -> int | None:
    """A descriptor that becomes readable when the peer's process ends; None where its process cannot be named.

    Kernels from 6.5 on give one that cannot be of a later process with the same number; before, it is opened by
    number. A peer in another PID namespace has none: then its hang-up has to do.
    """
    try:
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        try:
            return os.pidfd_open(peer.pid)
        except OSError:
            return None
    os.set_inheritable(descriptor, False)
    return descriptor


def role_of(peer: Peer) -> str:
    """Role on the control socket: root and the daemon's own user administer, everybody else in reach reads."""
    return ADMIN if peer.uid in (0, os.geteuid()) else READER


class StoreAccess:
    """The rule of one store: who may attach it, and with whom at the same time."""

    def __init__(self, config: StoreConfig) -> None:
        # fixed after construction
        self.share = config.share
        self._uids = config.allow_uids
        self._groups = config.allow_groups

    def allows(self, peer: Peer) -> bool:
        """Whether ``peer`` may use the store at all. Without lists: anybody who reached the socket."""
        if peer.uid in (0, os.geteuid()) or (self._uids is None and self._groups is None):
            return True
        return peer.uid in (self._uids or ()) or not peer.groups.isdisjoint(self._groups or ())

    def excluded_by(self, peer: Peer, users: Iterable[int]) -> bool:
        """Whether ``share`` keeps ``peer`` out while sessions of these uids (one entry a session) hold the store."""
        if self.share == "all":
            return False
        return any(True for uid in users if self.share == "session" or uid != peer.uid)
