"""Kinds of configuration values: what each accepts, said once, for the file and the flags alike."""

import grp
import importlib
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

__all__ = [
    "Address",
    "Kind",
    "address",
    "boolean",
    "choice",
    "folder",
    "group_list",
    "key",
    "label",
    "number",
    "optional_folder",
    "percent",
    "policy",
    "seconds",
    "size",
    "size_text",
    "user_list",
]

T = TypeVar("T")

_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LABEL: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_SIZE: Final = re.compile(r"([0-9]{1,15}) ?(B|KiB|MiB|GiB|TiB)?")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """``parse`` turns a TOML value or a flag's text into a value; ValueError for what is not ``expected``."""

    expected: str
    parse: Callable[[object], T]


def key(kind: Kind[T], default: T) -> T:
    """A dataclass field that is a configuration key of this kind."""
    return field(default=default, metadata={"kind": kind})


def size_text(value: int) -> str:
    """Bytes as people write them, exact: 134217728 is ``128 MiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]} {unit}"
    return f"{value} bytes"


def size(minimum: int, maximum: int) -> Kind[int]:
    """Bytes, as an integer or as text with a binary unit."""

    def parse(value: object) -> int:
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            value = int(match[1]) * _UNITS[match[2] or ""]
        return _bounded(value, minimum, maximum)

    return Kind(f'a size of {size_text(minimum)} … {size_text(maximum)}, such as 67108864 or "64MiB"', parse)


def number(minimum: int, maximum: int) -> Kind[int]:
    """An integer within bounds."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        return _bounded(value, minimum, maximum)

    return Kind(f"an integer of {minimum} … {maximum}", parse)


def seconds(minimum: float, maximum: float) -> Kind[float]:
    """Seconds, fractions allowed."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not minimum <= value <= maximum:  # true of what is not a number, too
            raise ValueError
        return float(value)

    return Kind(f"seconds, {minimum:g} … {maximum:g}", parse)


def percent(minimum: float, maximum: float) -> Kind[float]:
    """A share in percent, fractions allowed."""
    return Kind(f"a share of {minimum:g} … {maximum:g} %", seconds(minimum, maximum).parse)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


boolean: Final = Kind("true or false", _boolean)


def choice(*names: str) -> Kind[str]:
    """One of a few words."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind("one of " + ", ".join(f'"{name}"' for name in names), parse)


def _policy(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    if value != "lru":  # which needs no look into the others' compiled modules
        try:
            policies = importlib.import_module("strataflux.cache_policy.policies")
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if value not in policies.POLICIES:
            raise ValueError(f"{value!r}; there are {', '.join(policies.POLICIES)}")
    return value


policy: Final = Kind('"lru", or another replacement policy that `strataflux simulate` knows', _policy)


def _label(value: object) -> str:
    if not isinstance(value, str) or not _LABEL.fullmatch(value) or value == "others":
        raise ValueError
    return value


label: Final = Kind('a name of 1 … 32 small letters, digits, "-" and "_", and not "others"', _label)


def _folder(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError
    return Path(value).expanduser().absolute()


folder: Final = Kind("the path of a folder", _folder)


def _optional_folder(value: object) -> Path | None:
    return None if value == "" else _folder(value)


optional_folder: Final = Kind('"" or the path of a folder', _optional_folder)


@dataclass(frozen=True)
class Address:
    """Where to listen: a host that is a numeric address, and a port (0: the system picks one)."""

    host: str
    port: int


def _address(value: object) -> Address | None:
    if value == "":
        return None
    if not isinstance(value, str) or not (match := re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})", value)):
        raise ValueError
    if int(match[2]) > 65_535:
        raise ValueError
    return Address(match[1].strip("[]"), int(match[2]))


address: Final = Kind('"" or "ADDRESS:PORT" with a numeric address, such as "127.0.0.1:9464"', _address)


def _ids(value: object, by_name: Callable[[str], int]) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        raise ValueError
    return tuple(_id(item, by_name) for item in value)


def _id(item: Any, by_name: Callable[[str], int]) -> int:
    if isinstance(item, str):
        try:
            return by_name(item)
        except KeyError as error:
            raise ValueError(f"{item!r}, which this system does not know") from error
    return _bounded(item, 0, (1 << 32) - 2)


user_list: Final = Kind("a list of users, by number or name", lambda v: _ids(v, lambda n: pwd.getpwnam(n).pw_uid))
group_list: Final = Kind("a list of groups, by number or name", lambda v: _ids(v, lambda n: grp.getgrnam(n).gr_gid))


def _bounded(value: object, minimum: int, maximum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ValueError
    return value
