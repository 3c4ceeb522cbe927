"""The decorator for compiled functions, and the folder their machine code is cached in.

Compiling the reader's loop takes many seconds, so its machine code is kept on disk. Numba's own cache looks only at
the file that holds a function: when a function *called* from another file changes, or a constant imported from
one, the old machine code is used without a word. So the cache folder here is named by a digest of every source file
that compiled code can depend on: each file of this package that imports :func:`compiled`, and each file of this package
those import, followed to the end. The digest also covers the versions of Numba and Python and the CPU's name.
Folders of digests that nobody used for thirty days are removed.

Numba's cache is pickle: whoever can write to it runs code as us. The folder is therefore created 0700, and one that
belongs to another user, or that others may write to, is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numba.core.config

__all__ = ["PACKAGE_ROOT", "CompiledCacheError", "cache_folder", "cache_root", "compiled", "source_digest"]

F = TypeVar("F", bound=Callable[..., Any])

PACKAGE_ROOT = Path(__file__).parent.parent
"""The folder that is ``strataflux``: the installed one, or the one of links in a checkout."""

_FOLDERS = ("proto", "cache_policy", "daemon", "client", "kernels")
_UNUSED_SECONDS = 30 * 24 * 3600

# Numba fills this module from the environment at import, which hides its names from type checkers.
_numba_config: Any = numba.core.config

_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+(strataflux[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+(strataflux[\w.]*))",
    re.MULTILINE,
)
_DIGEST_NAME = re.compile(r"[0-9a-f]{32}")
_decorating = threading.Lock()


class CompiledCacheError(RuntimeError):
    """The folder for compiled code cannot be trusted or cannot be used."""


def compiled(fn: F) -> F:
    """Compile ``fn`` with Numba on its first call: no GIL, no bounds checks, IEEE division, cached on disk.

    Raises:
        CompiledCacheError: at decoration, when the cache folder is missing and cannot be made, belongs to another
            user, or may be written by others.
    """
    folder = str(cache_folder())
    # Numba reads its setting while it decorates. It is put back at once: other users of Numba in this process
    # keep their own cache folder.
    with _decorating:
        previous = _numba_config.CACHE_DIR
        _numba_config.CACHE_DIR = folder
        try:
            decorate = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
            return cast(F, decorate(fn))
        finally:
            _numba_config.CACHE_DIR = previous


@cache
def cache_folder() -> Path:
    """The checked folder for this digest, below :func:`cache_root`; made if need be, chosen once a process.

    Raises:
        CompiledCacheError: as :func:`compiled`.
    """
    root = cache_root()
    _make_private(root, forbidden=0o022)
    folder = root / source_digest(PACKAGE_ROOT)
    # Numba makes folders below this one with the caller's umask, so this one must keep everybody else out.
    _make_private(folder, forbidden=0o077)
    os.utime(folder)
    _prune(root, keep=folder)
    return folder


def cache_root() -> Path:
    """Where the folders of all digests lie: the first that the environment names.

    ``$STRATAFLUX_COMPILED_DIR``; ``$CACHE_DIRECTORY/compiled``, which systemd sets;
    ``$XDG_CACHE_HOME/strataflux/compiled``; ``~/.cache/strataflux/compiled``.

    Raises:
        CompiledCacheError: when none is named and the user has no home folder.
    """
    if chosen := os.environ.get("STRATAFLUX_COMPILED_DIR"):
        return Path(chosen)
    if service := os.environ.get("CACHE_DIRECTORY"):
        return Path(service.split(":")[0]) / "compiled"
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user) / "strataflux" / "compiled"
    try:
        return Path.home() / ".cache" / "strataflux" / "compiled"
    except RuntimeError as error:
        raise CompiledCacheError(
            "no folder for compiled code: this user has no home folder; set STRATAFLUX_COMPILED_DIR to a private one"
        ) from error


def source_digest(package_root: Path) -> str:
    """32 hexadecimal digits over the sources that compiled code under ``package_root`` depends on."""
    sources = {_module_name(package_root, path): path.read_bytes() for path in _python_files(package_root)}
    imports = {name: _imported(text, sources) for name, text in sources.items()}
    decorator = "strataflux.proto.compiled"
    wanted = {name for name, targets in imports.items() if decorator in targets}
    pending = list(wanted)
    while pending:
        found = imports[pending.pop()] - wanted
        wanted |= found
        pending.extend(found)
    digest = hashlib.blake2b(digest_size=16)
    versions = f"{numba.__version__} {sys.implementation.cache_tag} {llvmlite.binding.get_host_cpu_name()}"
    digest.update(versions.encode())
    for name in sorted(wanted):
        digest.update(f"\0{name}\0{len(sources[name])}\0".encode())
        digest.update(sources[name])
    return digest.hexdigest()


def _python_files(package_root: Path) -> Iterator[Path]:
    for top in _FOLDERS:
        for folder, _, names in os.walk(package_root / top):
            yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _module_name(package_root: Path, path: Path) -> str:
    parts = path.relative_to(package_root).with_suffix("").parts
    return ".".join(("strataflux", *parts)).removesuffix(".__init__")


def _imported(text: bytes, sources: dict[str, bytes]) -> set[str]:
    """Modules of this package named by the import statements in ``text``."""
    found: set[str] = set()
    for match in _IMPORT.finditer(text):
        parent, names, plain = (group.decode() if group else "" for group in match.groups())
        candidates = {parent, plain} | {f"{parent}.{name}" for name in re.findall(r"\w+", names)}
        found |= candidates & sources.keys()
    return found


def _make_private(folder: Path, forbidden: int) -> None:
    """Make ``folder`` 0700, or check one that is there: ours, a real folder, none of the ``forbidden`` mode bits."""
    remedy = "remove it, or set STRATAFLUX_COMPILED_DIR to a folder that only this user can write to"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise CompiledCacheError(f"compiled code cannot be kept in {folder}: {error.strerror}; {remedy}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CompiledCacheError(f"{folder} for compiled code is a link, expected a folder; {remedy}")
    if status.st_uid != os.geteuid():
        raise CompiledCacheError(
            f"{folder} for compiled code belongs to uid {status.st_uid}, expected {os.geteuid()}; {remedy}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        allowed = 0o777 & ~forbidden
        raise CompiledCacheError(
            f"{folder} for compiled code has mode {mode:04o}, expected at most {allowed:04o}; {remedy}"
        )


def _prune(root: Path, keep: Path) -> None:
    """Remove folders of other digests whose last use is older than thirty days."""
    oldest = time.time() - _UNUSED_SECONDS
    for entry in os.scandir(root):
        if not _DIGEST_NAME.fullmatch(entry.name) or entry.name == keep.name:
            continue
        try:
            unused = entry.stat(follow_symlinks=False).st_mtime < oldest
        except FileNotFoundError:
            continue  # another process is pruning too
        if unused:
            # Two processes may remove the same folder; what one leaves the next start takes.
            shutil.rmtree(entry.path, ignore_errors=True)
