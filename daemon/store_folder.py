"""The folder of stores that come and go while the service runs, and the list of those of it that are served.

Only this service and root write there. A name is a single component, so nothing outside the folder can be meant by it,
and a link is not followed. The list is ``added.json``; it is put in place by rename and read at the next start.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from strataflux.daemon.config import StoreConfig, resolve_config
from strataflux.daemon.errors import AlreadyServed, ConfigError, NotServed
from strataflux.proto.store_writer import sync_folder

__all__ = ["ADDED_FILE", "StoreFolder"]

ADDED_FILE: Final = "added.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TEMPORARY: Final = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.[0-9a-f]{16}\.tmp")
_ADDED_MAX_BYTES: Final = 1 << 20
_SETTINGS: Final = ("share", "preload", "allow_uids", "allow_groups")


class StoreFolder:
    """``path`` is made when it is first needed. Pairs: :meth:`begin_temporary` / :meth:`publish` or ``rmtree``."""

    def __init__(self, path: Path, free_bytes: int) -> None:
        # fixed after construction
        self.path = path
        self.free_bytes = free_bytes

    def path_of(self, name: str) -> Path:
        """Where a store of that name lies, or would.

        Raises:
            ConfigError: a name that is none.
        """
        if not _NAME.fullmatch(name) or name == ADDED_FILE:
            raise ConfigError(
                "name", f"{name[:200]!a}", 'at most 100 letters, digits, ".", "-" and "_"', "name a folder, not a path"
            )
        return self.path / name

    def existing(self, name: str) -> Path:
        """The folder of that name, which is there and no link.

        Raises:
            ConfigError: a name that is none. NotServed: no such folder.
        """
        path = self.path_of(name)
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            raise NotServed(
                path, str(error.strerror), "the folder of a store", "import it, or mend the name"
            ) from error
        return path

    def holds(self, path: Path) -> bool:
        """Whether a store that is served from ``path`` lies here, and not behind a link."""
        return path.parent == self.path and not path.is_symlink()

    def begin_temporary(self, name: str) -> tuple[Path, int]:
        """A new folder beside the one of that name, and a descriptor that says that its maker lives: close it last.

        Raises:
            ConfigError: a name that is none. AlreadyServed: there is such a store. OSError: as mkdir(2).
        """
        target = self.path_of(name)
        self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
        if target.exists():
            raise AlreadyServed(target, "a folder of that name", "none", "choose another name, or remove that store")
        temporary = self.path / f".{name}.{secrets.token_hex(8)}.tmp"
        temporary.mkdir(mode=0o750)
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return temporary, descriptor

    def publish(self, temporary: Path, name: str) -> Path:
        """Give a temporary folder its name, in one step.

        Raises:
            AlreadyServed: the name is taken meanwhile.
        """
        target = self.path_of(name)
        sync_folder(temporary)
        try:
            temporary.rename(target)
        except OSError as error:
            raise AlreadyServed(target, str(error.strerror), "a free name", "choose another name") from error
        sync_folder(self.path)
        return target

    def hide(self, path: Path) -> Path:
        """Take the name from a store's folder, in one step: another store may have it at once. The answer is what to
        delete; the next start does, if nobody gets to it.

        Raises:
            FileNotFoundError: nothing is there. OSError: as rename(2).
        """
        temporary = self.path / f".{path.name}.{secrets.token_hex(8)}.tmp"
        path.rename(temporary)
        sync_folder(self.path)
        return temporary

    def sweep(self) -> int:
        """Remove temporary folders whose maker died; how many. One that lives holds a lock on its own."""
        removed = 0
        with contextlib.suppress(FileNotFoundError):
            for path in [path for path in self.path.iterdir() if _TEMPORARY.fullmatch(path.name)]:
                removed += self._remove_dead(path)
        return removed

    @staticmethod
    def _remove_dead(path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def load_added(self) -> tuple[StoreConfig, ...]:
        """The stores to serve besides those of the configuration.

        Raises:
            ConfigError: a list that is none.
        """
        path = self.path / ADDED_FILE
        try:
            with path.open("rb") as file:
                body = json.loads(file.read(_ADDED_MAX_BYTES))
            rows = [self._table(row) for row in body["stores"]]
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            remedy = "remove it, and add the stores again"
            raise ConfigError(path, f"{type(error).__name__}: {error}", "a list of stores", remedy) from error
        return resolve_config({"store": rows}, str(path)).stores

    def _table(self, row: dict[str, Any]) -> dict[str, Any]:
        settings = {name: value for name, value in row.items() if name != "name" and value is not None}
        return {**settings, "path": str(self.path_of(row["name"]))}

    def save_added(self, stores: Sequence[StoreConfig]) -> None:
        """Remember which stores to serve besides those of the configuration."""
        rows = [{"name": s.path.name, **{name: getattr(s, name) for name in _SETTINGS}} for s in stores]
        path = self.path / ADDED_FILE
        temporary = path.with_name(f".{ADDED_FILE}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x") as file:
                json.dump({"stores": rows}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)
