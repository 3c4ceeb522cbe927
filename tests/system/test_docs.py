"""The commands of the documentation that are marked ``test``, run as they stand: a tiny model, a real daemon."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from tests.fakes.pages import READERS_PAGES, ROOT, Page
from tests.system.test_demo import PROGRAM, WATCHDOG_SECONDS, tiny_source
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

pytestmark = pytest.mark.system

PROGRAMS = {
    "strataflux": PROGRAM,
    # A daemon that fails ends the whole page, which would wait for it in vain.
    "stratafluxd": """
import os, signal, traceback
from strataflux.daemon.__main__ import main
try:
    code = main()
except Exception:
    traceback.print_exc()
    code = 1
if code:
    os.killpg(0, signal.SIGTERM)
""",
}


def script_of(page: Page) -> str:
    """All of a page's blocks that are run, one after the other in one shell."""
    return "".join(block.text for block in page.blocks if (block.language, block.mark) == ("sh", "test"))


PAGES = [page for path in READERS_PAGES if script_of(page := Page(path))]


def make_home(home: Path) -> Path:
    """A home folder with the programs on its path."""
    (home / "bin").mkdir()
    for name, program in PROGRAMS.items():
        path = home / "bin" / name
        path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -P -c '{program}' \"$@\"\n")
        path.chmod(0o755)
    return home


def make_place(place: Path, page: Page) -> Path:
    """Where a reader would work: a model, and a prepared one unless the page prepares it."""
    write_gguf(place / "model.gguf", tiny_source(), gguf_tensors(tiny_source()))
    if "strataflux prepare" not in script_of(page):
        prepare(tiny_source(), place / "prepared", PrepareSettings())
    return place


@dataclass(frozen=True)
class Shell:
    """Bash that runs a page, and the file of all that it and its background jobs say."""

    process: "subprocess.Popen[bytes]"
    said: Path


def start_shell(home: Path, place: Path, script: str) -> Shell:
    """Bash in a process group of its own, that ends with the first command that fails."""
    (place / "script.sh").write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    environment = kept | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".importroot"),
    }
    said = place / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-euxo", "pipefail", "script.sh"],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    return Shell(process, said)


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shell]]:
    """All pages at once, each in folders of its own; what is left of them is ended."""
    started = {}
    for page in PAGES:
        place = make_place(tmp_path_factory.mktemp("place"), page)
        started[str(page)] = start_shell(make_home(tmp_path_factory.mktemp("h")), place, script_of(page))
    yield started
    for shell in started.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.process.pid, signal.SIGKILL)
        shell.process.wait()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_of(page: Page, shells: dict[str, Shell]) -> None:
    shell = shells[str(page)]
    code = shell.process.wait(WATCHDOG_SECONDS)
    said = shell.said.read_text()
    assert code == 0, said
    assert "Traceback" not in said


def test_some_pages_have_commands_to_run() -> None:
    assert {"README.md", "QUICKSTART-UNIFIED.md", "HOWTO.md"} <= {page.path.name for page in PAGES}
