"""``strataflux trace record``: another command, while what it selects is recorded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strataflux.client.cli.output import print_note
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.recording import TraceRecorder

__all__ = ["register"]

_DECODING: Final = ("generate", "eval", "serve")
_EXTRA_WORDS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _record(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT.npz", help="The trace to write.")],
    command: Annotated[str, typer.Argument(metavar="COMMAND...", help="generate, eval or serve, and its arguments.")],
    steps: Annotated[int, typer.Option(min=1, help="The most steps to record, the first ones.")] = 512,
    max_mib: Annotated[int, typer.Option(min=1, help="The most memory to take for it.")] = 256,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Record so many layers, evenly spread.", show_default="all")
    ] = None,
) -> None:
    """Run a command that decodes through a daemon and record what it selects, for strataflux simulate.

    The command runs as it would alone, and leaves as it would; the trace is written when it ends, also by a signal. A
    sample is fewer layers or fewer steps, never steps left out in between, which would change how long a record waits
    for its next use.
    """
    from strataflux.client.recording import TraceRecorder, recording

    if command not in _DECODING:
        raise MisuseError(
            "COMMAND", repr(command), f"one of {', '.join(_DECODING)}", "options of trace record go before OUT.npz"
        )
    if out.suffix != ".npz":
        raise MisuseError("OUT.npz", out.name, "a name that ends in .npz", "strataflux simulate names traces by it")
    if not out.absolute().parent.is_dir():
        raise MisuseError("OUT.npz", f"no folder {out.absolute().parent}", "a folder that exists", "make it first")
    recorder = TraceRecorder(steps, max_mib << 20, layers)
    try:
        with recording(recorder):
            code = _run([command, *context.args])
    except BaseException:
        if recorder.steps:  # what was recorded before a signal or a failure is worth no less
            _save(recorder, out)
        raise
    _save(recorder, out)
    raise typer.Exit(code)


def _run(words: list[str]) -> int:
    from strataflux.client.cli.main import build_app

    code = build_app()(args=words, prog_name="strataflux", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _save(recorder: "TraceRecorder", out: Path) -> None:
    recorder.save(out)
    print_note(f"{recorder.steps} steps recorded in {out}; next: strataflux simulate {out}")


def register(app: typer.Typer) -> None:
    """Add ``trace`` and its sub-command."""
    trace = typer.Typer(no_args_is_help=True, help="Recorded selections.")
    trace.command("record", context_settings=dict(_EXTRA_WORDS))(_record)
    app.add_typer(trace, name="trace")
