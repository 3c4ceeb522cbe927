"""Both sides find the runtime folder by one order."""

from pathlib import Path

import pytest

from strataflux.proto.runtime import runtime_folder


@pytest.mark.parametrize(
    ("explicit", "environment", "expected"),
    [
        (None, {}, "/run/stratafluxd"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/5"}, "/run/user/5/stratafluxd"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/5", "STRATAFLUX_RUNTIME_DIR": "/r"}, "/r"),
        ("/e", {"XDG_RUNTIME_DIR": "/run/user/5", "STRATAFLUX_RUNTIME_DIR": "/r"}, "/e"),
        (None, {"XDG_RUNTIME_DIR": "", "STRATAFLUX_RUNTIME_DIR": ""}, "/run/stratafluxd"),
    ],
)
def test_order(explicit: str | None, environment: dict[str, str], expected: str) -> None:
    assert runtime_folder(Path(explicit) if explicit else None, environment) == Path(expected)
