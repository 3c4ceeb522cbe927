"""Which versions of the ``transformers`` package this integration was tested with; others are refused."""

from typing import Final

from packaging.version import Version

from strataflux.client.errors import MisuseError
from strataflux.proto.extras import install_command

__all__ = ["FIRST", "FIRST_UNTESTED", "check_version"]

FIRST: Final = "5.24.0"
"""The oldest version that is accepted: before it, a model's ``forward`` calls its cache by another name."""
FIRST_UNTESTED: Final = "5.25"
"""The oldest one that is too new."""


def check_version(found: str) -> None:
    """Refuse a version outside the tested range.

    The integration replaces modules, and stands behind the cache and the attention of a model. What it relies on has no
    promise of stability, and a change there could give wrong text without an error.

    Raises:
        MisuseError: ``found`` is outside the range, which the message names.
    """
    if not Version(FIRST) <= Version(found) < Version(FIRST_UNTESTED):
        tested = f"{FIRST} or newer, below {FIRST_UNTESTED}"
        raise MisuseError("package transformers", found, tested, install_command("transformers"))
