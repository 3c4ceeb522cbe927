"""``strataflux install-service``: units, users and folders of the service, for the machine or for one user."""

import os
import subprocess
from pathlib import Path
from typing import Annotated, Final

import typer

from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import Output, print_note
from strataflux.client.errors import MisuseError
from strataflux.client.service_files import Plan, daemon_program, fate_of, plan_system, plan_user, write_file

__all__ = ["install_service", "register"]

_MANAGER: Final = Path("/run/systemd/system")
"""systemd runs the machine if this folder exists (sd_booted(3))."""


def install_service(
    system: Annotated[
        bool, typer.Option("--system/--user", help="For the machine, as root; or for this user alone.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written and run; do nothing.")] = False,
    root: Annotated[Path, typer.Option(help="Lay the files out below this folder and run nothing.")] = Path("/"),
    program: Annotated[
        Path | None, typer.Option(help="The stratafluxd to start.", show_default="this installation's")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install stratafluxd as a systemd service. A configuration that exists is kept; nothing is started."""
    output = Output(as_json)
    staged = root != Path("/")
    started = program.absolute() if program is not None else daemon_program()
    plan = plan_system(started, root.absolute()) if system else plan_user(started, os.environ)
    _refuse_without_root(system and not staged and not dry_run)
    done = {}
    for file in plan.files:
        done[str(file.path)] = _would(fate_of(file)) if dry_run else write_file(file)
        output.print(f"{done[str(file.path)]:<10} {file.path}")
        if dry_run:
            output.print("\n".join(f"    {line}" for line in file.text.splitlines()))
    commands = [" ".join(command) for command in plan.commands]
    if dry_run:
        output.print("\n".join(f"would run  {command}" for command in commands))
    elif staged or not _MANAGER.is_dir():
        print_note(f"not run, because no systemd runs here or --root was given: {'; '.join(commands)}")
    else:
        _run(plan)
    if "masked" in done.values():
        print_note("a masked unit stays so and cannot be started: systemctl unmask it, then install again")
    output.print("next:\n" + "\n".join(f"  {step}" for step in plan.next_steps))
    output.result({"program": started, "files": done, "commands": commands, "dry_run": dry_run})


def _would(fate: str) -> str:
    return "would be written" if fate == "written" else f"would stay {fate}"


def _refuse_without_root(needed: bool) -> None:
    if needed and os.geteuid() != 0:
        found = f"uid {os.geteuid()}"
        raise MisuseError("install-service --system", found, "root", "run it as root, or with --user or --dry-run")


def _run(plan: Plan) -> None:
    """Run the plan's commands, in order.

    Raises:
        OSError: one is missing, or failed; those after it were not run.
    """
    for command in plan.commands:
        code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
        if code:
            raise OSError(f"{' '.join(command)}: exit code {code}; the files are in place, run it again by hand")


def register(app: typer.Typer) -> None:
    """Add ``install-service``."""
    app.command("install-service")(install_service)
