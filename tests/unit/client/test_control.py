from pathlib import Path

import pytest

from strataflux.client.control import Control
from strataflux.client.errors import DaemonUnavailableError


def test_nobody_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("c")
    with Control(folder) as control, pytest.raises(DaemonUnavailableError, match=r"control\.sock") as caught:
        control.stats()
    assert caught.value.found == "No such file or directory"
    assert "start stratafluxd" in caught.value.remedy
