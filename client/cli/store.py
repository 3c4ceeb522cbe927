"""``strataflux store``: verify and repair stores as they lie; import, add and remove those that a daemon serves."""

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.options import JsonOption, RuntimeDirOption
from strataflux.client.cli.output import EXIT_FAILURE, Output, progress
from strataflux.client.errors import InputError
from strataflux.proto.runtime import runtime_folder

if TYPE_CHECKING:
    from strataflux.client.control import Control
    from strataflux.proto.control_pb2 import StoreSettings

__all__ = [
    "FolderArgument",
    "PreloadOption",
    "RateOption",
    "ShareOption",
    "ThreadsOption",
    "Throttle",
    "UserOption",
    "add",
    "import_",
    "register",
    "remove",
    "repair",
    "verify",
]

_SHOWN = 20

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a store.")]
ThreadsOption = Annotated[int, typer.Option(min=1, max=64, help="Reads at a time.")]
RateOption = Annotated[float, typer.Option("--mib-per-second", min=0, help="Read no faster; 0: as fast as it goes.")]

ShareOption = Annotated[str, typer.Option(help="Who may use it at the same time: all, uid or session.")]
PreloadOption = Annotated[bool, typer.Option(help="Read it ahead, as far as the cache holds it.")]
UserOption = Annotated[
    list[int] | None, typer.Option("--allow-uid", help="A user who may use it; again for more.", show_default="all")
]


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


def import_(
    folder: FolderArgument,
    name: Annotated[str, typer.Option(help="Of its folder at the daemon's.", show_default="the folder's")] = "",
    share: ShareOption = "all",
    preload: PreloadOption = False,
    allow_uid: UserOption = None,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a store to a daemon, which keeps a verified copy and serves it from now on; for administrators."""
    from strataflux.proto.store_format import open_store

    output = Output(as_json)
    source, called = open_store(folder), name or folder.absolute().name
    size = source.records_bytes + 4 * source.record_count
    with _control(runtime_dir) as control, progress("sending", size) as advance:
        answer = control.import_store(source, called, _settings(share, preload, allow_uid), advance)
    output.print(f"{called}: {answer.records:,} records verified; served as {answer.digest[:12]}")
    output.result({"name": called, "digest": answer.digest, "records": answer.records})


def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a folder in the daemon's folder of imports.")],
    share: ShareOption = "all",
    preload: PreloadOption = False,
    allow_uid: UserOption = None,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a store served that lies in the daemon's folder of imports, now and after a restart; for administrators."""
    output = Output(as_json)
    with _control(runtime_dir) as control:
        digest = control.add_store(name, _settings(share, preload, allow_uid))
    output.print(f"{name} is served as {digest[:12]}")
    output.result({"name": name, "digest": digest})


def remove(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="Its digest, the beginning of it, or its folder's name.")
    ],
    delete: Annotated[bool, typer.Option(help="Remove its files, too, if they lie in the folder of imports.")] = False,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a store served no more: its sessions go on without refinement; for administrators."""
    output = Output(as_json)
    with _control(runtime_dir) as control:
        answer = control.remove_store(store, delete)
    if answer.digest:
        output.print(f"{answer.digest[:12]} is served no more; {answer.sessions} sessions used it")
    else:
        output.print(f"{store} was not there, and is not looked for any more")
    output.result({"digest": answer.digest, "sessions": answer.sessions, "deleted": delete})


def _settings(share: str, preload: bool, allow_uid: list[int] | None) -> "StoreSettings":
    from strataflux.proto.control_pb2 import Access, StoreSettings

    allow = Access(uids=allow_uid) if allow_uid else None
    return StoreSettings(share=share, preload=preload, allow=allow)


def _control(runtime_dir: Path | None) -> "Control":
    from strataflux.client.control import Control

    return Control(runtime_folder(runtime_dir, os.environ))


def register(app: typer.Typer) -> None:
    """Add ``store`` and its sub-commands."""
    store = typer.Typer(no_args_is_help=True, help="Check and mend stores; import, add and remove a daemon's.")
    store.command()(verify)
    store.command()(repair)
    store.command("import")(import_)
    store.command()(add)
    store.command()(remove)
    app.add_typer(store, name="store")
