"""``strataflux doctor``: what is off, one line each with its remedy."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strataflux.client.cli.options import JsonOption, RuntimeDirOption
from strataflux.client.cli.output import EXIT_FAILURE, Output
from strataflux.client.errors import StrataFluxError

if TYPE_CHECKING:
    from strataflux.client.doctor import Finding

__all__ = ["doctor", "register"]

_CONFIGS: Final = ("/etc/strataflux/stratafluxd.toml", "~/.config/strataflux/stratafluxd.toml")


def doctor(
    prove: Annotated[bool, typer.Option("--round-trip", help="Prove it: miss a record, have it filled, hit it.")] = (
        False
    ),
    config: Annotated[
        Path | None, typer.Option(help="The daemon's configuration.", show_default="where services have theirs")
    ] = None,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at a daemon and the machine under it; exit code 1 if anything is off."""
    from strataflux.client import doctor as checks
    from strataflux.client.control import Control
    from strataflux.proto.runtime import runtime_folder

    output = Output(as_json)
    folder = runtime_folder(runtime_dir, os.environ)
    findings = [*_config_findings(config), *checks.check_access(folder)]
    proof: checks.RoundTrip | None = None
    if any(finding.name in ("daemon", "group") for finding in findings):
        findings += checks.check_machine()
    else:
        with Control(folder) as control:
            try:
                findings += checks.check_daemon(control.info(), control.stats())
                findings += checks.check_stores(control.stores())
                proof = checks.round_trip(folder, control) if prove else None
            except StrataFluxError as error:
                findings.append(checks.Finding("daemon", f"{error.subject}: {error.found}", error.remedy))
    for finding in findings:
        output.print(f"[bold red]✗[/] {finding.name}: {finding.found} → {finding.remedy}")
    if proof is not None:
        how = (
            f"missed, filled and hit in {proof.fill_seconds * 1e3:.2f} ms" if proof.missed else "hit; all are resident"
        )
        output.print(f"[bold green]✓[/] record {proof.record} of {proof.store[:12]}: {how}")
    if not findings:
        output.print(f"[bold green]✓[/] nothing is off in {folder}")
    found = [asdict(finding) for finding in findings]
    output.result({"ok": not found, "findings": found, "round_trip": None if proof is None else asdict(proof)})
    if findings:
        raise typer.Exit(EXIT_FAILURE)


def _config_findings(config: Path | None) -> "Iterator[Finding]":
    from strataflux.client import doctor as checks

    paths = [config] if config is not None else [Path(path).expanduser() for path in _CONFIGS]
    for path in paths:
        if config is not None or path.exists():
            yield from checks.check_config(path)


def register(app: typer.Typer) -> None:
    """Add ``doctor``."""
    app.command()(doctor)
