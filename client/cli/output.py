"""How every command speaks: results on stdout, everything else on stderr, errors in one voice.

With ``--json`` stdout is exactly one JSON object: the result, or ``{"error": {...}}`` together with exit code 2.
"""

import errno
import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = [
    "EXIT_ERROR",
    "EXIT_FAILURE",
    "Advance",
    "Explained",
    "Output",
    "emit_json",
    "print_error",
    "print_note",
    "progress",
]

EXIT_ERROR = 2
"""Exit code of every refusal: bad input, bad usage, or no daemon where one is needed."""

EXIT_FAILURE = 1
"""Exit code of a command that was right and failed all the same."""

_PATIENCE_SECONDS = 2.0

_ROOM: Final = ("room for what is written", "make room on that disk, and run this again")
_RIGHT: Final = ("a path that this user may use", "name another path, or mend its mode")
_SYSTEM: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EROFS: _RIGHT,
    errno.ENOENT: ("a path that exists", "check the path"),
}
"""What was expected, and the remedy, where the system says no."""
_ELSE: Final = ("no error of the system", "mend what it names, and run this again")


@runtime_checkable
class Explained(Protocol):
    """An error with the four parts that all trees of this package share."""

    subject: str
    found: str
    expected: str
    remedy: str


class Advance(Protocol):
    """Moves a progress display on."""

    def __call__(self, steps: int = 1) -> None:
        """Count ``steps`` more as done."""


class Output:
    """Where one command writes: made from its ``--json`` flag."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(stderr=as_json, soft_wrap=True)

    def print(self, *parts: RenderableType) -> None:
        """Show text or a rich table to a person: on stdout, or on stderr when stdout is for the JSON object."""
        self._console.print(*parts)

    def result(self, value: Mapping[str, object]) -> None:
        """Write the command's result when ``--json`` was given. Call it once, last."""
        if self.as_json:
            emit_json(value)


def emit_json(value: Mapping[str, object]) -> None:
    """Write one JSON object and a newline to stdout; numbers that are not finite become null, as JSON has none."""
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(error: Exception, as_json: bool = False) -> None:
    """Say on stderr what stands in the way: subject, found, expected, remedy, one line each.

    With ``as_json`` the same parts go to stdout as ``{"error": {...}}``. An error of the system gets them here; any
    other without them is told by its message alone.
    """
    if isinstance(error, Explained):
        headline = error.subject
        parts = {"found": error.found, "expected": error.expected, "remedy": error.remedy}
    elif isinstance(error, OSError) and error.strerror:
        headline, parts = _told_by_the_system(error)
    else:
        headline, parts = str(error), {}
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(headline)}")
    for name, text in parts.items():
        console.print(f"  {name + ':':<10}{escape(text)}")
    if as_json:
        emit_json({"error": {"kind": type(error).__name__, "subject": headline, **parts}})


def _told_by_the_system(error: OSError) -> tuple[str, dict[str, str]]:
    """Subject and the other parts of what the system refused."""
    expected, remedy = _SYSTEM.get(error.errno or 0, _ELSE)
    subject = "the system" if error.filename is None else str(error.filename)
    return subject, {"found": error.strerror or str(error), "expected": expected, "remedy": remedy}


def print_note(text: str) -> None:
    """Say on stderr what a person should know about the result; once."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]note:[/] {escape(text)}")


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Advance]:
    """Show on stderr how far a piece of work is, once it has taken longer than two seconds.

    Where stderr is no terminal, one line with the label appears instead of a bar.

    Args:
        label: what is being done, as in "preparing layers".
        total: how many steps there are; None when unknown.

    Yields:
        A function to call with the number of steps just done.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    display = Progress(*columns, console=console, transient=True)
    task = display.add_task(label, total=total)

    def appear() -> None:
        if console.is_terminal:
            display.start()
        else:
            console.print(f"{label} ...")

    # A timer and not the caller's advances: a wait without any steps shows itself too.
    timer = threading.Timer(_PATIENCE_SECONDS, appear)
    timer.daemon = True
    timer.start()
    try:
        yield lambda steps=1: display.advance(task, steps)
    finally:
        timer.cancel()
        timer.join()
        if display.live.is_started:
            display.stop()


def _plain(value: object) -> object:
    """``value`` as JSON's own types: NumPy scalars and paths included, anything else refused by ``json``."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    scalar = getattr(value, "item", None)
    if callable(scalar):
        value = scalar()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
