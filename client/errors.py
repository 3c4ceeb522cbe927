"""Errors of the model's side.

    StrataFluxError                  base: names its subject, what was found, what was expected, the remedy
    ├── MisuseError (ValueError)     the caller's to change: an argument, a setting, the order of calls
    └── FailureError                 the world's: nothing the caller wrote is wrong
        ├── InputError               a file or folder that is missing, damaged or of another kind
        ├── DaemonUnavailableError   no daemon answers, or it went away
        └── RefusedError             the daemon answered and said no
            └── BusyError            what it has is taken just now

Contracts between processes raise ``strataflux.proto.errors.ContractError`` with the same four parts, and the command
line speaks of both in one voice (``client/cli/output.py``). No decode step raises any of these for a daemon that is
gone: a session fails open, its look-ups miss.
"""

__all__ = [
    "BusyError",
    "DaemonUnavailableError",
    "FailureError",
    "InputError",
    "MisuseError",
    "RefusedError",
    "StrataFluxError",
]


class StrataFluxError(Exception):
    """Base of this tree.

    Attributes:
        subject: the file, setting, argument or call it is about.
        found: what was asked or found, with its number.
        expected: what would have been right: the limit, the range, the kind.
        remedy: what to do about it, or the setting to change.
    """

    def __init__(self, subject: object, found: str, expected: str, remedy: str) -> None:
        self.subject = str(subject)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{subject}: found {found}; expected {expected}; {remedy}")


class MisuseError(StrataFluxError, ValueError):
    """The caller asked for what cannot be: a bad argument or setting, or calls in the wrong order."""


class FailureError(StrataFluxError):
    """Something outside this program stands in the way."""


class InputError(FailureError):
    """A file or folder that is missing, unreadable, damaged, or of a kind that is not supported."""


class DaemonUnavailableError(FailureError):
    """No daemon listens where one was expected, or it went away during a control call."""


class RefusedError(FailureError):
    """The daemon refused an attachment or a command; ``found`` and ``expected`` carry its numbers."""


class BusyError(RefusedError):
    """The daemon refused because others, who may be leaving, have all there is of something."""
