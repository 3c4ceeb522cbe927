"""Talk to the service manager: sd_notify(3) in a few lines, and the sockets it may have opened for us.

Outside a service manager every call does nothing.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

__all__ = ["Notifier", "activated_sockets", "watchdog_seconds"]

_FIRST_DESCRIPTOR: Final = 3


class Notifier:
    """Sends states to ``$NOTIFY_SOCKET``: a path, or an abstract name that starts with ``@``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # fixed after construction
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name

    def send(self, **states: str) -> None:
        """Send states such as ``READY="1", STATUS="serving"``. A manager that is not listening is no error of ours."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            try:
                out.sendto(text.encode(), self._address)
            except OSError:
                return


def watchdog_seconds(environment: Mapping[str, str], pid: int) -> float | None:
    """WatchdogSec as told to this process; None when nobody watches it."""
    microseconds, watched = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", str(pid))
    if not microseconds.isdecimal() or int(microseconds) == 0 or watched != str(pid):
        return None
    return int(microseconds) / 1e6


def activated_sockets(environment: MutableMapping[str, str], pid: int) -> dict[str, socket.socket]:
    """Listening sockets handed over by the manager (sd_listen_fds(3)), by name; the variables are consumed.

    ``FileDescriptorName=`` of the socket unit names them; without it the last part of their path does.
    """
    count, owner = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if owner != str(pid) or not count.isdecimal():
        return {}
    found: dict[str, socket.socket] = {}
    for index in range(int(count)):
        descriptor = _FIRST_DESCRIPTOR + index
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        path = listener.getsockname()
        given = names[index] if index < len(names) else ""
        name = given if given.endswith(".sock") else os.path.basename(path if isinstance(path, str) else "")
        found[name] = listener
    return found
