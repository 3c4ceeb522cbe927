"""Whether the caches fit, asked before anything is allocated.

Shared memory is charged to the machine and to every cgroup above this process, whichever is tighter: a cache that does
not fit would show itself as a SIGBUS or an out-of-memory kill much later.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strataflux.daemon.errors import CacheTooLarge
from strataflux.daemon.values import size_text

__all__ = ["Available", "available_memory", "require_memory"]

_CGROUP_LINE: Final = re.compile(r"^0::(/.*)$", re.MULTILINE)
_RECLAIMABLE: Final = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
"""Of v1 the last such line is meant, which counts groups below it as well."""
_V1_LINE: Final = re.compile(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Available:
    """``size`` bytes are free according to ``source``, a file."""

    size: int
    source: str


def available_memory(root: Path = Path("/")) -> Available | None:
    """The tightest of MemAvailable and the limits of this process' cgroups (v2, or v1's memory controller).

    None where the system says nothing at all. ``root`` is for tests.
    """
    found = [limit for limit in (_meminfo(root), *_cgroups(root)) if limit is not None]
    return min(found, key=lambda limit: limit.size, default=None)


def require_memory(weight_bytes: int, kv_bytes: int, available: Available | None) -> None:
    """Refuse budgets that do not fit.

    Raises:
        CacheTooLarge: with what is needed, what there is, and the settings to change.
    """
    need = weight_bytes + kv_bytes
    if available is None or need <= available.size:
        return
    raise CacheTooLarge(
        "cache.weight_bytes + cache.kv_bytes",
        f"{size_text(weight_bytes)} + {size_text(kv_bytes)} = {need} bytes",
        f"at most the {available.size} bytes that are free ({available.source})",
        "lower --weight-cache or --kv-cache, or give the service more memory",
    )


def _meminfo(root: Path) -> Available | None:
    text = _text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return Available(int(match[1]) * 1024, "MemAvailable of /proc/meminfo") if match else None


def _cgroups(root: Path) -> list[Available]:
    """One entry for each cgroup from this process' own up to the root that has a limit.

    File pages that were not used lately count as free: the kernel takes them when it needs them, and without that
    a store that is read through the page cache would look like memory that is short.
    """
    own = _text(root / "proc/self/cgroup")
    if match := _V1_LINE.search(own):
        base, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
    elif match := _CGROUP_LINE.search(own):
        base, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
    else:
        return []
    folder = Path(match[1].lstrip("/"))
    found = []
    for group in (folder, *folder.parents) if folder.parts else (folder,):
        maximum, current = (_text(root / base / group / name).strip() for name in (limit, usage))
        if maximum.isdecimal() and current.isdecimal():
            used = int(current) - _reclaimable(_text(root / base / group / "memory.stat"))
            found.append(Available(max(0, int(maximum) - used), f"/{base}/{group}/{limit}"))
    return found


def _reclaimable(stat: str) -> int:
    """Bytes of inactive file pages by a group's memory.stat."""
    found = _RECLAIMABLE.findall(stat)
    return int(found[-1]) if found else 0


def _text(path: Path) -> str:
    """Contents, or nothing where the system does not have the file."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
