"""How to get what an optional part of this package needs. It is on no package index: extras come with its sources."""

import shlex
import sys
from pathlib import Path

__all__ = ["install_command"]

_ROOT = Path(__file__).resolve().parents[1]


def install_command(extra: str, root: Path = _ROOT) -> str:
    """What to run, as a remedy says it, to add ``extra`` (of pyproject.toml) to this Python.

    Args:
        extra: its name.
        root: where the package's folders lie: a checkout, or what was installed from one.
    """
    if (root / "pyproject.toml").is_file():
        return f"{sys.executable} -m pip install -e {shlex.quote(f'{root}[{extra}]')}"
    return f"in a checkout: {sys.executable} -m pip install {shlex.quote(f'.[{extra}]')}"
