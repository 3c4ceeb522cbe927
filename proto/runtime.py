"""Where a daemon and its clients meet: the runtime folder and the names in it.

Both sides resolve the folder by the same order, so that a client started like its daemon finds it without a setting.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["ATTACH_SOCKET", "CONTROL_SOCKET", "LOCK_FILE", "RUNTIME_DIR_VARIABLE", "runtime_folder"]

ATTACH_SOCKET: Final = "attach.sock"
"""SOCK_SEQPACKET: hello, descriptors; a connection's life is its session's life."""
CONTROL_SOCKET: Final = "control.sock"
"""SOCK_STREAM: gRPC, service ``strataflux.control.v1.Control``."""
LOCK_FILE: Final = "lock"
"""Held with flock(2) by the daemon that is alive."""
RUNTIME_DIR_VARIABLE: Final = "STRATAFLUX_RUNTIME_DIR"

_SYSTEM_FOLDER: Final = Path("/run/stratafluxd")


def runtime_folder(explicit: Path | None, environment: Mapping[str, str]) -> Path:
    """``explicit``, ``$STRATAFLUX_RUNTIME_DIR``, ``$XDG_RUNTIME_DIR/stratafluxd`` or /run/stratafluxd, in this order.

    Pure: nothing is looked at on disk. Empty variables count as unset.
    """
    if explicit is not None:
        return explicit
    if chosen := environment.get(RUNTIME_DIR_VARIABLE):
        return Path(chosen)
    if user := environment.get("XDG_RUNTIME_DIR"):
        return Path(user) / "stratafluxd"
    return _SYSTEM_FOLDER
