"""The runtime folder: one daemon owns it, and nothing of it is left behind.

Life: *open* (make or check the folder, take its lock) → *bind* sockets (leftovers of a dead daemon are replaced, which
only the holder of the lock may do) → *close* (remove what is still ours, and the folder if we made it). A daemon that
was killed leaves names behind that the next one replaces; the kernel has dropped its lock.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Final

from strataflux.daemon.errors import RuntimeFolderError, SocketInUse
from strataflux.proto.runtime import LOCK_FILE, RUNTIME_DIR_VARIABLE

__all__ = ["RuntimeFolder"]

_SOCKET_MODE: Final = 0o660
_PATH_MAX: Final = 107
"""sun_path holds this many bytes and a NUL."""
_BACKLOG: Final = 64
_PRIVATE: Final = "private"


class RuntimeFolder:
    """Made by :meth:`open`, which holds the lock from then on. The thread of the event loop only."""

    def __init__(self, path: Path, lock: int, made: bool) -> None:
        # fixed after construction
        self.path = path
        self._lock = lock
        self._made = made
        # event loop only
        self._ours: dict[Path, tuple[int, int]] = {}
        self._open = True

    @classmethod
    def open(cls, path: Path) -> "RuntimeFolder":
        """Make or check the folder and take its lock.

        Raises:
            SocketInUse: a live daemon holds it. RuntimeFolderError: it cannot be made, or others could replace our
            sockets.
        """
        made = _make(path)
        try:
            _check(path)
            return cls(path, _lock(path), made)
        except BaseException:
            if made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise

    def bind(self, name: str, kind: int) -> socket.socket:
        """A non-blocking listening socket at ``name``, mode 0660, in place of what a dead daemon left there.

        Raises:
            RuntimeFolderError: the path is too long, or something there is no socket.
        """
        path = self.path / name
        remedy = f"choose another folder with --runtime-dir or ${RUNTIME_DIR_VARIABLE}"
        if len(os.fsencode(path)) > _PATH_MAX:
            raise RuntimeFolderError(path, f"a path of {len(os.fsencode(path))} bytes", f"at most {_PATH_MAX}", remedy)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise RuntimeFolderError(path, "something that is no socket", "a free name", f"remove it, or {remedy}")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # The name takes its mode from the socket, minus the umask: nobody ever sees a wider one.
            os.fchmod(listener.fileno(), _SOCKET_MODE)
            listener.bind(str(path))
            path.chmod(_SOCKET_MODE)
            self._remember(path)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise RuntimeFolderError(path, str(error.strerror), "a socket", remedy) from error
        return listener

    def private_folder(self) -> Path:
        """A new, empty folder that only this user can enter, removed at close."""
        path = self.path / _PRIVATE
        if path.is_symlink() or path.exists():
            shutil.rmtree(path)
        path.mkdir(mode=0o700)
        self._remember(path)
        return path

    def close(self) -> None:
        """Remove what is ours and let the next daemon in. Idempotent. Names that another took over are left alone."""
        if not self._open:
            return
        self._open = False
        for path, identity in self._ours.items():
            with contextlib.suppress(FileNotFoundError):
                if _identity(path.lstat()) == identity:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        # Whoever waits for the lock finds its file gone and starts anew; see _lock.
        with contextlib.suppress(FileNotFoundError):
            (self.path / LOCK_FILE).unlink()
        os.close(self._lock)
        if self._made:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _remember(self, path: Path) -> None:
        self._ours[path] = _identity(path.lstat())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _make(path: Path) -> bool:
    """Make the folder if it is missing: for the group as well where root runs the service, else for this user alone."""
    mode = 0o750 if os.geteuid() == 0 else 0o700
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=mode)
        except FileExistsError:
            return False
    except OSError as error:
        raise RuntimeFolderError(
            path, str(error.strerror), "a folder that can be made", f"set --runtime-dir or ${RUNTIME_DIR_VARIABLE}"
        ) from error
    return True


def _check(path: Path) -> None:
    """Whoever may write to the folder may put a socket of theirs in place of ours."""
    status = path.lstat()
    remedy = f"chown and chmod it, or set --runtime-dir or ${RUNTIME_DIR_VARIABLE}"
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimeFolderError(path, "something that is no folder", "a folder", remedy)
    if status.st_uid not in (0, os.geteuid()):
        raise RuntimeFolderError(path, f"owner {status.st_uid}", f"owner {os.geteuid()} or 0", remedy)
    if status.st_mode & 0o022:
        found = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise RuntimeFolderError(path, found, "a folder that only its owner may write to", remedy)


def _lock(folder: Path) -> int:
    """Take the lock. Its file is removed at close, so one that was locked must still be the one that has the name."""
    path = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RuntimeFolderError(path, str(error.strerror), "a file to lock", "check the folder's mode") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(os.fstat(descriptor)) == _identity(path.lstat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno != errno.EWOULDBLOCK:
                raise RuntimeFolderError(path, str(error.strerror), "a lock", "use a local file system") from error
            raise SocketInUse(
                folder,
                f"a daemon that is alive (process {holder or 'unknown'})",
                "a folder that no other daemon holds",
                "stop that daemon, or start this one with another --runtime-dir",
            ) from error
        os.close(descriptor)
