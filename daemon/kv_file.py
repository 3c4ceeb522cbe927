"""The anonymous file of a session's KV blocks: made, and parts of it reserved or given back.

The last two may take long: a file system without extents writes zeroes, one with a journal waits for it, and so would
everybody's reads if the reader thread did. Whoever asked does them, on a descriptor of its own.
"""

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from strataflux.daemon.system import punch_hole

__all__ = ["KvSpace", "Reserve", "anonymous_file", "free_bytes"]

Reserve = Callable[[int, int, int], None]
"""Make sure that (descriptor, offset, bytes) has blocks on disk, or raise OSError: posix_fallocate(3)."""


class KvSpace:
    """Parts of a file, each (offset, bytes). Pairs: construction / ``close``, or ``with``; :meth:`reserve` /
    :meth:`give_back`. It outlives the session that it was made for.
    """

    def __init__(self, descriptor: int, parts: Sequence[tuple[int, int]], allocate: Reserve) -> None:
        """``descriptor`` is duplicated. Raises OSError: no descriptor is left."""
        self._descriptor = os.dup(descriptor)
        self._parts = parts
        self._allocate = allocate

    def reserve(self) -> None:
        """Reserve all parts, or none.

        Raises:
            OSError: the file system has no room, or failed.
        """
        try:
            for offset, size in self._parts:
                self._allocate(self._descriptor, offset, size)
        except OSError:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Their blocks are free again; a file system without holes keeps them for the next grant."""
        for offset, size in self._parts:
            punch_hole(self._descriptor, offset, size)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def anonymous_file(folder: Path) -> int:
    """A file without a name: O_TMPFILE, or created and unlinked where the file system has none."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = folder / f".kv-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def free_bytes(descriptor: int) -> int:
    """Free for everybody in the file system of a file."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize
