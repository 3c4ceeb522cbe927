"""The ``strataflux`` command.

Each command is a module of this folder with a function ``register(app)``; a new one is added to ``COMMANDS``. Modules
import what is heavy (torch, the decoder, compiled code) inside their command, so that ``--help`` and ``--version``
answer at once.
"""

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from strataflux import __version__
from strataflux.client.cli.output import EXIT_ERROR, EXIT_FAILURE, print_error
from strataflux.client.errors import MisuseError, StrataFluxError
from strataflux.proto.errors import ContractError

__all__ = ["COMMANDS", "build_app", "main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CODES: Final = (
    "Exit codes: 0 it worked; 1 it failed, such as on a full disk, or found something off (doctor, store verify); "
    "2 it was refused, with an explanation; 128 + the signal's number, so 130 for Ctrl-C, when it was told to end. "
    "With --json stdout is one JSON object in each case but the last."
)

# Which library these come from depends on typer's version; older ones have them in click.
_UsageError: Final = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")

COMMANDS: tuple[str, ...] = (
    "demo",
    "explain",
    "prepare",
    "tune",
    "eval",
    "generate",
    "serve",
    "bench",
    "simulate",
    "trace",
    "install_service",
    "status",
    "top",
    "dashboard",
    "doctor",
    "store",
)
"""Modules of ``strataflux.client.cli`` that hold commands, in the order ``--help`` lists them."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strataflux {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Accuracy of low-bit language models, given back from refinement bits that a daemon serves."""


def build_app() -> typer.Typer:
    """The whole command: imports every module of ``COMMANDS`` and lets it register itself."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(epilog=_CODES)(_root)
    for name in COMMANDS:
        importlib.import_module(f"strataflux.client.cli.{name}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave the process.

    Exit codes are in its ``--help``. What it started is stopped in each case.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    told: list[int] = []

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        told.append(number)
        raise SystemExit(128 + number)  # unwinds, so that a command stops what it started

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        code = build_app()(args=words, prog_name="strataflux", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except Exception as error:
        # Some libraries turn what unwinds through them into an error of their own; the signal is what happened.
        code = 128 + told[0] if told else _exit_code(error)
        if code is None:
            raise
        if not told:
            _explain(error, as_json="--json" in words)
        sys.exit(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(error: Exception, *, as_json: bool) -> None:
    """Say what is wrong in one voice, words on the command line included."""
    context = getattr(error, "ctx", None)
    if isinstance(error, _UsageError) and context is not None:
        command, found = context.command_path, error.format_message().rstrip(".")  # type: ignore[attr-defined]
        if not found:  # a group without a command has shown its help
            return
        usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
        error = MisuseError(command, found, usage, f"see {command} --help")
    print_error(error, as_json=as_json)


def _exit_code(error: Exception) -> int | None:
    """What an error leaves with; None for those that are nobody's to explain but a bug's."""
    if isinstance(error, StrataFluxError | ContractError | _UsageError):
        return EXIT_ERROR
    return EXIT_FAILURE if isinstance(error, OSError) else None
