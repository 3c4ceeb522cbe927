"""Remedies name a command that works where the package lies."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

from strataflux.proto.extras import install_command

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_a_checkout_is_named() -> None:
    words = shlex.split(install_command("serve"))
    assert words[:5] == [sys.executable, "-m", "pip", "install", "-e"]
    path, _, extra = words[5].partition("[")
    assert Path(path).samefile(ROOT)
    assert extra == "serve]"


def test_a_path_with_spaces_stays_one_word(tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    assert shlex.split(install_command("gpu", folder))[-1] == f"{folder}[gpu]"


def test_an_installed_package_does_not_know_its_sources(tmp_path: Path) -> None:
    assert install_command("gpu", tmp_path).endswith(" -m pip install '.[gpu]'")
    assert install_command("gpu", tmp_path).startswith("in a checkout: ")


def test_nobody_is_sent_to_a_package_index() -> None:
    texts = [*ROOT.glob("[!.]*/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    assert len(texts) > 100
    assert [path for path in texts if re.search(r"install [\"']?strataflux\[", path.read_text())] == []


def test_extras_that_are_named_exist() -> None:
    """Those of the calls in the sources."""
    sources = [path.read_text() for path in ROOT.glob("[!.t]*/**/*.py")]
    named = {extra for text in sources for extra in re.findall(r'install_command\("(\w+)"\)', text)}
    assert {"serve", "gpu"} <= named <= EXTRAS.keys()
