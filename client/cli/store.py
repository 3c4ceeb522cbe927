"""``strataflux store verify`` and ``store repair``: damage that was found, and a generation without it."""

import os
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import EXIT_FAILURE, Output, progress
from strataflux.client.errors import InputError

__all__ = ["FolderArgument", "RateOption", "ThreadsOption", "Throttle", "register", "repair", "verify"]

_SHOWN = 20

FolderArgument = Annotated[Path, typer.Argument(help="Folder of a store.")]
ThreadsOption = Annotated[int, typer.Option(min=1, max=64, help="Reads at a time.")]
RateOption = Annotated[float, typer.Option("--mib-per-second", min=0, help="Read no faster; 0: as fast as it goes.")]


class Throttle:
    """Waits so that no more than a rate is read. ``bytes_per_second`` 0 never waits."""

    def __init__(self, bytes_per_second: float) -> None:
        # fixed after construction
        self._rate = bytes_per_second
        self._begun = time.monotonic()
        # one thread only
        self._bytes = 0

    def __call__(self, count: int) -> None:
        """Before ``count`` bytes are read."""
        if self._rate:
            due = self._begun + self._bytes / self._rate
            threading.Event().wait(max(0.0, due - time.monotonic()))
            self._bytes += count


def verify(
    folder: FolderArgument, threads: ThreadsOption = 4, rate: RateOption = 0, as_json: JsonOption = False
) -> None:
    """Read every record of a store and compare it with its checksum; exit code 1 if one is bad."""
    from strataflux.proto.store_format import open_store
    from strataflux.proto.verify import verify_store

    output = Output(as_json)
    manifest = open_store(folder)
    with progress("verifying", manifest.record_count) as advance:
        bad = verify_store(manifest, threads, Throttle(rate * 2**20), advance)
    output.print(f"{folder}: {manifest.record_count:,} records, {len(bad):,} bad")
    if bad:
        more = "" if len(bad) <= _SHOWN else f" and {len(bad) - _SHOWN:,} more"
        output.print(f"  bad: {', '.join(map(str, bad[:_SHOWN]))}{more}")
        output.print(f"  repair with: strataflux store repair {folder} --from GOOD_COPY")
    output.result({"records": manifest.record_count, "bad": bad, "generation": manifest.generation})
    if bad:
        raise typer.Exit(EXIT_FAILURE)


def repair(
    folder: FolderArgument,
    source: Annotated[Path, typer.Option("--from", help="Another copy of the same store.")],
    threads: ThreadsOption = 4,
    as_json: JsonOption = False,
) -> None:
    """Publish a new generation of a store whose bad records come from another copy; a daemon takes it on reload."""
    from strataflux.proto.store_format import open_store
    from strataflux.proto.verify import repair_store, verify_store

    output = Output(as_json)
    if os.path.realpath(folder) == os.path.realpath(source):
        raise InputError(source, "the damaged store itself", "another copy of it", "name a good copy with --from")
    manifest = open_store(folder)
    with progress("verifying", manifest.record_count) as advance:
        bad = verify_store(manifest, threads, Throttle(0), advance)
    if bad:
        with progress("writing", manifest.record_count) as advance:
            manifest = repair_store(manifest, open_store(source), bad, advance)
        output.print(f"{folder}: {len(bad):,} records replaced; generation {manifest.generation}")
        output.print("  a running daemon takes it with: systemctl reload stratafluxd")
    else:
        output.print(f"{folder}: nothing to repair")
    output.result({"replaced": bad, "generation": manifest.generation})


def register(app: typer.Typer) -> None:
    """Add ``store`` and its sub-commands."""
    store = typer.Typer(no_args_is_help=True, help="Check and mend stores.")
    store.command()(verify)
    store.command()(repair)
    app.add_typer(store, name="store")
