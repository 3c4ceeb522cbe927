"""Errors of the service.

    DaemonError                      base: names its subject, what was found, what was expected, the remedy
    ├── MisuseError                  the operator's to change; nothing was started, exit code 2
    │   ├── ConfigError              an unknown key, a value of another kind or out of bounds, an unreadable file
    │   ├── CacheTooLarge            budgets beyond the memory there is
    │   ├── AlreadyServed            a store that is served, or a name that is taken
    │   ├── NotServed                no such store
    │   ├── SocketInUse              a live daemon holds the runtime folder
    │   └── RuntimeFolderError       the runtime folder cannot be made, trusted or bound in
    └── FailureError                 the world's: nothing the operator wrote is wrong
        ├── EngineUnavailable        the kernel or container forbids the I/O engine that was asked for
        ├── DirectIoUnavailable      ``require`` was asked for and the file system refuses direct reads
        ├── ReaderFailed             the reader thread could not start, or died
        └── Refusal                  an attach request that cannot be met; goes to the client, not to the operator

Contracts between processes raise ``strataflux.proto.errors.ContractError`` with the same four parts. Errno and gRPC
errors become ours at one boundary each: ``runtime_dir.py`` and ``rpc_errors.py``.
"""

__all__ = [
    "AlreadyServed",
    "CacheTooLarge",
    "ConfigError",
    "DaemonError",
    "DirectIoUnavailable",
    "EngineUnavailable",
    "FailureError",
    "MisuseError",
    "NotServed",
    "ReaderFailed",
    "Refusal",
    "RuntimeFolderError",
    "SocketInUse",
    "start_error",
]


class DaemonError(Exception):
    """Base of this tree.

    Attributes:
        subject: the file, setting, socket or request it is about.
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


class MisuseError(DaemonError):
    """The operator asked for what cannot be."""


class ConfigError(MisuseError):
    """A configuration that cannot be followed; ``subject`` is ``file:key`` or the flag."""


class CacheTooLarge(MisuseError):
    """The cache budgets exceed the memory that is free for this process."""


class AlreadyServed(MisuseError):
    """The store is served already, or another has its name."""


class NotServed(MisuseError):
    """No such store is served, or lies in the folder of imports."""


class SocketInUse(MisuseError):
    """Another daemon that is alive holds the runtime folder."""


class RuntimeFolderError(MisuseError):
    """The runtime folder cannot be made, belongs to others, or a socket cannot be bound in it."""


class FailureError(DaemonError):
    """Something outside this program stands in the way."""


class EngineUnavailable(FailureError):
    """The I/O engine that was asked for does not work on this kernel or in this container."""


class DirectIoUnavailable(FailureError):
    """Direct I/O is required and a store's file system refuses it."""


class ReaderFailed(FailureError):
    """The reader thread could not start, or ended by itself."""


class Refusal(FailureError):
    """An attach request that cannot be met. ``code`` is one of the attach protocol's refusal codes."""

    def __init__(self, code: str, subject: object, found: str, expected: str, remedy: str) -> None:
        super().__init__(subject, found, expected, remedy)
        self.code = code


def start_error(error: Exception) -> DaemonError:
    """What a start raises for whatever stopped the reader thread before it ran."""
    if isinstance(error, DaemonError):
        return error
    failed = ReaderFailed("reader thread", f"{type(error).__name__}: {error}", "a start", "see the log; report this")
    failed.__cause__ = error
    return failed
