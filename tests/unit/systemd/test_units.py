"""The units are what systemd takes, as closed as they can be, and no more closed than the service can bear."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from strataflux.client.service_files import Plan, plan_system, plan_user
from strataflux.daemon.config import Config, resolve_config

SYSTEMD = Path(__file__).parents[3] / "systemd"
PROGRAM = Path("/bin/true")
SYSTEM = (SYSTEMD / "stratafluxd.service").read_text()
USER = (SYSTEMD / "user/stratafluxd.service").read_text()

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def units(plan: Plan, folder: Path) -> list[Path]:
    """The units of a plan, laid out in one folder."""
    found = []
    for file in plan.files:
        if file.path.suffix in (".service", ".socket"):
            found.append(folder / file.path.name)
            found[-1].write_text(file.text)
    return found


def analyze(folder: Path, *arguments: str) -> str:
    """What systemd-analyze says, which has to succeed."""
    command = ["systemd-analyze", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
def test_system_units_are_clean(tmp_path: Path) -> None:
    paths = units(plan_system(PROGRAM), tmp_path)
    assert len(paths) == 2
    assert analyze(tmp_path, "verify", "--man=no", *map(str, paths)) == ""


@needs_systemd
def test_user_units_are_clean(tmp_path: Path) -> None:
    paths = units(plan_user(PROGRAM, {"HOME": str(tmp_path)}), tmp_path)
    assert len(paths) == 2
    assert analyze(tmp_path, "--user", "verify", "--man=no", *map(str, paths)) == ""


@needs_systemd
def test_exposure_of_the_system_service_is_at_most_two(tmp_path: Path) -> None:
    service = next(path for path in units(plan_system(PROGRAM), tmp_path) if path.suffix == ".service")
    said = analyze(tmp_path, "security", "--offline=true", "--threshold=20", "--no-pager", str(service))
    level = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert level, said
    assert float(level[1]) <= 2.0


@pytest.mark.parametrize("text", [SYSTEM, USER], ids=["system", "user"])
@pytest.mark.parametrize("forbidden", ["MemoryDenyWriteExecute", "PrivateUsers"])
def test_what_would_break_it_is_absent(text: str, forbidden: str) -> None:
    """Just-in-time compilation writes what it executes; peers are told apart by their real user ids."""
    assert forbidden not in text


@pytest.mark.parametrize("text", [SYSTEM, USER], ids=["system", "user"])
def test_the_service_is_run_as_its_life_expects(text: str) -> None:
    lines = text.splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=30",
        "ExecStartPre=/usr/bin/stratafluxd --compile",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "RestartPreventExitStatus=2",
        "RuntimeDirectoryPreserve=yes",
        "SystemCallFilter=@system-service io_uring_setup io_uring_enter io_uring_register",
    ):
        assert line in lines


def test_the_system_service_keeps_to_itself() -> None:
    lines = SYSTEM.splitlines()
    for line in ("User=strataflux", "PrivateDevices=yes", "IPAddressDeny=any", "IPAddressAllow=localhost"):
        assert line in lines
    assert "CapabilityBoundingSet=" in lines
    assert "LimitMEMLOCK=64M" in lines


def test_the_example_configuration_is_the_default() -> None:
    text = (SYSTEMD / "stratafluxd.toml").read_text()
    assert resolve_config(tomllib.loads(text), "example") == Config()
