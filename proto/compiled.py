"""The decorator for compiled functions, and the folders their machine code is cached in.

Compiling the reader's loop takes many seconds, so its machine code is kept on disk. Numba's own cache looks only at
the file that holds a function: when a function *called* from another file changes, or a constant imported from
one, the old machine code is used without a word. So each module's code lies in a folder named by a digest of all it can
depend on: the module's source, and that of each module of this package it imports, followed to the end. The digest also
covers the versions of Numba and Python and the CPU's name. An edit so costs the compilation of what depends on it,
and nothing else. Functions that can reach more than their module imports (those of tests and benchmarks, and closures,
which call what they were made with) stand under the digest of all compiled code. A type of an argument can choose
what is called (a state its replacement policy): code for a type of a module that the function's own does not import
lies in a folder for both.
Folders of digests that nobody used for thirty days are removed.

Numba's cache is pickle: whoever can write to it runs code as us. The folders are therefore created 0700, and one that
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
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numba.core.config
from numba.core.caching import FunctionCache

__all__ = [
    "PACKAGE_ROOT",
    "CompiledCacheError",
    "Sources",
    "borrowing",
    "cache_folder",
    "cache_root",
    "compiled",
]

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
    return _compile(fn, counting=True)


def borrowing(fn: F) -> F:
    """As :func:`compiled`, for a function that makes and returns no arrays: it only uses those it was given.

    Numba otherwise counts references to the arrays of an argument that is a tuple of them, with two locked
    instructions an array and call: most of the time of a short function. Making an array in such a function is an
    error when it is compiled.
    """
    return _compile(fn, counting=False)


def _compile(fn: F, *, counting: bool) -> F:
    apart = fn.__closure__ is not None or fn.__module__ not in _sources()
    options: dict[str, Any] = {"boundscheck": False, "error_model": "numpy", "_nrt": counting}
    dispatcher = numba.njit(nogil=True, **options)(fn)
    dispatcher._cache = _CodeCache(fn, "" if apart else fn.__module__)
    return cast(F, dispatcher)


class _CodeCache:
    """Where Numba keeps and finds the machine code of one function: by the modules that the types of its arguments are
    of. It stands in the place of a dispatcher's own :class:`FunctionCache`, and has what is called of that.
    """

    def __init__(self, fn: Callable[..., Any], module: str) -> None:
        self._fn = fn
        self._module = module
        self._caches: dict[tuple[str, ...], Any] = {}
        self._cache_of(())

    @property
    def cache_path(self) -> str:
        """Of what depends on no type."""
        return str(self._cache_of(()).cache_path)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code for a signature; None if there is none."""
        return self._cache_of(self._modules(signature)).load_overload(signature, target)

    def save_overload(self, signature: Any, code: Any) -> None:
        """Keep it."""
        self._cache_of(self._modules(signature)).save_overload(signature, code)

    def flush(self) -> None:
        """Forget all of it."""
        for kept in self._caches.values():
            kept.flush()

    def _modules(self, signature: Any) -> tuple[str, ...]:
        """Modules that code for ``signature`` can depend on beside those of the function itself."""
        named = {module for module in _modules_of(getattr(signature, "args", signature)) if module in _sources()}
        if named and self._module:
            named -= _sources().closure([self._module])
        return tuple(sorted(named))

    def _cache_of(self, modules: tuple[str, ...]) -> Any:
        # Numba reads its setting when it makes a cache. It is put back at once: other users of Numba in this process
        # keep their own cache folder.
        with _decorating:
            if modules not in self._caches:
                previous = _numba_config.CACHE_DIR
                _numba_config.CACHE_DIR = str(cache_folder(self._module, *modules))
                try:
                    self._caches[modules] = FunctionCache(self._fn)  # type: ignore[no-untyped-call]
                finally:
                    _numba_config.CACHE_DIR = previous
            return self._caches[modules]


def _modules_of(kinds: Iterable[Any]) -> Iterator[str]:
    """The modules of all named tuples among Numba types, nested ones included."""
    for kind in kinds:
        if isinstance(kind, numba.types.BaseTuple):
            if hasattr(kind, "instance_class"):
                yield kind.instance_class.__module__
            yield from _modules_of(cast(Iterable[Any], kind))


@cache
def cache_folder(module: str, *others: str) -> Path:
    """The checked folder for the code of ``module`` ("": what may depend on all of it) and of ``others`` that types
    bring in, below :func:`cache_root`; made if need be, chosen once a process.

    Raises:
        CompiledCacheError: as :func:`compiled`.
    """
    root = cache_root()
    first = not cache_folder.cache_info().currsize
    if first:
        _make_private(root, forbidden=0o022)
    folder = root / _sources().digest(module, *others)
    # Numba makes folders below this one with the caller's umask, so this one must keep everybody else out.
    _make_private(folder, forbidden=0o077)
    os.utime(folder)
    if first:
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


class Sources:
    """The modules under one package root, each read when it is first asked for and then kept as it was."""

    def __init__(self, package_root: Path) -> None:
        self._root = package_root
        self._texts: dict[str, bytes | None] = {}
        self._digests: dict[str, bytes] = {}
        self._imports: dict[str, set[str]] = {}

    def __contains__(self, module: str) -> bool:
        return self._text(module) is not None

    def digest(self, module: str, *others: str) -> str:
        """32 hexadecimal digits over all that compiled code of ``module`` and ``others`` can depend on; "" stands for
        every module that has compiled code.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{numba.__version__} {sys.implementation.cache_tag} {_host_cpu()}".encode())
        for name in sorted(self.closure([module, *others] if module else {*self.compiling(), *others})):
            digest.update(f"\0{name}\0".encode() + self._text_digest(name))
        return digest.hexdigest()

    def closure(self, modules: Iterable[str]) -> set[str]:
        """``modules`` and what they import of this package, directly or not."""
        found = set(modules)
        pending = list(found)
        while pending:
            new = self._imported(pending.pop()) - found
            found |= new
            pending.extend(new)
        return found

    def compiling(self) -> set[str]:
        """Every module that imports one of this module's decorators."""
        names = set()
        for top in _FOLDERS:
            for folder, _, files in os.walk(self._root / top):
                parts = Path(folder).relative_to(self._root).parts
                names |= {".".join(("strataflux", *parts, name[:-3])) for name in files if name.endswith(".py")}
        names = {name.removesuffix(".__init__") for name in names}
        return {name for name in names if __name__ in self._imported(name)}

    def _text_digest(self, module: str) -> bytes:
        if module not in self._digests:
            self._digests[module] = hashlib.blake2b(self._text(module) or b"").digest()
        return self._digests[module]

    def _imported(self, module: str) -> set[str]:
        """Modules of this package named by the import statements of one of them."""
        if module not in self._imports:
            candidates: set[str] = set()
            for match in _IMPORT.finditer(self._text(module) or b""):
                parent, names, plain = (group.decode() if group else "" for group in match.groups())
                candidates |= {parent, plain} | {f"{parent}.{name}" for name in re.findall(r"\w+", names)}
            self._imports[module] = {name for name in candidates if name in self}
        return self._imports[module]

    def _text(self, module: str) -> bytes | None:
        """The source of a module; None if this package has none of that name."""
        if module not in self._texts:
            top, _, rest = module.partition(".")
            self._texts[module] = self._read(rest.replace(".", "/")) if top == "strataflux" and rest else None
        return self._texts[module]

    def _read(self, path: str) -> bytes | None:
        for name in (f"{self._root}/{path}.py", f"{self._root}/{path}/__init__.py"):
            if os.path.isfile(name):
                with open(name, "rb") as file:
                    return file.read()
        return None


@cache
def _sources() -> Sources:
    """The sources this process runs."""
    return Sources(PACKAGE_ROOT)


@cache
def _host_cpu() -> str:
    return str(llvmlite.binding.get_host_cpu_name())


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
