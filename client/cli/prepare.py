"""``strataflux prepare``: quantize a model and store what quantization took away."""

import time
from pathlib import Path
from typing import Annotated

import typer

from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import InputError, MisuseError

__all__ = ["register"]


def _command(
    source: Annotated[Path, typer.Argument(help="A .gguf file, or a Hugging Face folder with safetensors.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where the prepared model shall lie.")],
    bits: Annotated[int, typer.Option(help="Bits of the resident weights: 2, 3 or 4.")] = 3,
    group: Annotated[int, typer.Option(help="Weights that share a scale: 64 or 128.")] = 64,
    base: Annotated[str, typer.Option(help="How weights are quantized: rtn.")] = "rtn",
    k: Annotated[int, typer.Option(min=0, max=1024, help="Default of --k when decoding.")] = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace a prepared model that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prepare a model: low-bit weights to keep in memory, and a store of refinement bits.

    Nothing is at OUT before it is whole; with --force the old model is there until the new one takes its place.
    """
    from strataflux.client.prepare.bases.rtn import RtnSettings
    from strataflux.client.prepare.settings import PrepareSettings
    from strataflux.client.prepare.source import open_source
    from strataflux.client.prepare.write import prepare, prepare_steps

    output = Output(as_json)
    started = time.monotonic()
    if base != "rtn":
        raise MisuseError("--base", repr(base), "rtn", "choose it")
    settings = PrepareSettings(RtnSettings(bits, group), k)
    _check_target(folder, force)
    with progress("reading the model"):
        model = open_source(source)
    with progress("preparing layers, in two passes", prepare_steps(model.config, settings)) as advance:
        prepared = prepare(model, folder, settings, advance)
    seconds = time.monotonic() - started
    store_bytes = sum(file.stat().st_size for file in prepared.store.iterdir())
    output.print(
        f"{folder}: {bits} bits in groups of {group}, {prepared.resident_bytes / 1e6:.1f} MB resident, "
        f"{store_bytes / 1e6:.1f} MB of refinement bits, in {seconds:.1f} s"
    )
    output.result(
        {
            "prepared": folder,
            "base": base,
            "bits": bits,
            "group": group,
            "resident_bytes": prepared.resident_bytes,
            "store_bytes": store_bytes,
            "identity_digest": prepared.manifest.digest,
            "seconds": seconds,
        }
    )


def _check_target(folder: Path, force: bool) -> None:
    """Before the minutes of work, not after. What is no prepared model is never replaced."""
    from strataflux.client.prepare.prepared import MANIFEST

    if (folder / MANIFEST).is_file() and not force:
        raise InputError(folder, "a prepared model", "a new folder", "pass --force to replace it")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise InputError(folder, "files that are no prepared model", "a new folder", "choose another folder")


def register(app: typer.Typer) -> None:
    """Add ``prepare``."""
    app.command("prepare")(_command)
