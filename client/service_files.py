"""Files of the system service: which there are, where they go, and the program they name.

They lie in the package's folder ``systemd``, as they do in the repository. Nothing here asks the service manager
anything; ``strataflux install-service`` does.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from strataflux.client.errors import MisuseError

__all__ = ["Plan", "ServiceFile", "daemon_program", "fate_of", "plan_system", "plan_user", "write_file"]

_PROGRAM: Final = "/usr/bin/stratafluxd"
_MASK: Final = Path("/dev/null")
_HIDDEN: Final = ("/home", "/root", "/run/user")
"""Folders that ``ProtectHome=yes`` of the system unit hides from the service."""


@dataclass(frozen=True)
class ServiceFile:
    """One file to write. ``keep``: what is there already is the operator's and stays."""

    path: Path
    text: str
    keep: bool = False


@dataclass(frozen=True)
class Plan:
    """Files, and the commands that make the manager see them; ``next_steps`` is left to the operator."""

    files: tuple[ServiceFile, ...]
    commands: tuple[tuple[str, ...], ...]
    next_steps: tuple[str, ...]


def daemon_program() -> Path:
    """The ``stratafluxd`` that belongs to the running interpreter, else the one on ``PATH``.

    Raises:
        MisuseError: there is none.
    """
    beside = Path(sys.executable).with_name("stratafluxd")
    if os.access(beside, os.X_OK):
        return beside
    if found := shutil.which("stratafluxd"):
        return Path(found).absolute()
    raise MisuseError("stratafluxd", "no such program", f"{beside} or one on PATH", "install the strataflux package")


def plan_system(program: Path, root: Path = Path("/")) -> Plan:
    """A service of the machine. ``root`` is where its files are laid out, ``/`` but for packagers.

    Raises:
        MisuseError: its sandbox would not see the program.
    """
    hidden = [folder for folder in _HIDDEN if program.is_relative_to(folder)]
    if hidden:
        raise MisuseError(
            program,
            f"a program below {hidden[0]}",
            "one that the service's own user can reach and its sandbox shows",
            "install strataflux elsewhere, such as in /opt/strataflux, or use --user",
        )
    units = root / "etc/systemd/system"
    config = root / "etc/strataflux/stratafluxd.toml"
    return Plan(
        files=(
            ServiceFile(units / "stratafluxd.service", _unit("stratafluxd.service", program)),
            ServiceFile(units / "stratafluxd.socket", _text("stratafluxd.socket")),
            ServiceFile(root / "etc/sysusers.d/stratafluxd.conf", _text("sysusers.d/stratafluxd.conf")),
            ServiceFile(root / "etc/tmpfiles.d/stratafluxd.conf", _text("tmpfiles.d/stratafluxd.conf")),
            ServiceFile(config, _text("stratafluxd.toml"), keep=True),
        ),
        commands=(
            ("systemd-sysusers", "stratafluxd.conf"),
            ("systemd-tmpfiles", "--create", "stratafluxd.conf"),
            ("systemctl", "daemon-reload"),
        ),
        next_steps=(
            f"add a [[store]] to {config}",
            "systemctl enable --now stratafluxd.socket stratafluxd.service",
            "usermod --append --groups strataflux USER, for each USER who may attach",
        ),
    )


def plan_user(program: Path, environment: Mapping[str, str]) -> Plan:
    """A service of this user alone, below ``$XDG_CONFIG_HOME``."""
    home = Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "~"), ".config")).expanduser()
    units, config = home / "systemd/user", home / "strataflux/stratafluxd.toml"
    return Plan(
        files=(
            ServiceFile(units / "stratafluxd.service", _unit("user/stratafluxd.service", program)),
            ServiceFile(units / "stratafluxd.socket", _text("user/stratafluxd.socket")),
            ServiceFile(config, _text("stratafluxd.toml"), keep=True),
        ),
        commands=(("systemctl", "--user", "daemon-reload"),),
        next_steps=(
            f"add a [[store]] to {config}",
            "systemctl --user enable --now stratafluxd.socket stratafluxd.service",
        ),
    )


def fate_of(file: ServiceFile) -> str:
    """What :func:`write_file` would do now: ``written``, or what is there stays: ``unchanged``, ``kept``, or ``masked``
    by the operator's ``systemctl mask``.

    Raises:
        OSError: what is there cannot be read.
    """
    if not os.path.lexists(file.path):
        return "written"
    if file.keep:  # a link that leads nowhere now is the operator's, too
        return "unchanged" if file.path.is_file() and file.path.read_bytes() == file.text.encode() else "kept"
    if file.path.is_symlink() and file.path.readlink() == _MASK:
        return "masked"
    return "unchanged" if file.path.exists() and file.path.read_bytes() == file.text.encode() else "written"


def write_file(file: ServiceFile) -> str:
    """Write one file whole or not at all; its fate.

    Raises:
        OSError: it cannot be written.
    """
    if (fate := fate_of(file)) != "written":
        return fate
    file.path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{file.path.name}.", dir=file.path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(file.text)
            os.fchmod(out.fileno(), 0o644)
            out.flush()
            os.fsync(out.fileno())
        Path(name).rename(file.path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return fate


def _text(name: str) -> str:
    return files("strataflux").joinpath("systemd", name).read_text(encoding="utf-8")


def _unit(name: str, program: Path) -> str:
    """The unit with ``program`` in its Exec lines, escaped as systemd.service(5) wants it."""
    quoted = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return _text(name).replace(_PROGRAM, f'"{quoted}"' if " " in quoted else quoted)
