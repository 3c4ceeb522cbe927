"""The device's step runs through Triton's interpreter where there is no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if torch.cuda.is_available():
        pytest.skip("these tests are for Triton's interpreter; on a GPU tests/gpu and tests/kernels run")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models that the tests of this folder share: preparing one takes longer than decoding with it."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def prepared(folder: Path, tiny_source: Any) -> PreparedModel:
    """Three layers, so that records are fetched beyond the next one."""
    from strataflux.client.prepare.prepared import open_prepared

    if not (folder / "llama").exists():
        prepare(tiny_source.with_config(layers=3, intermediate=256), folder / "llama", PrepareSettings())
    return open_prepared(folder / "llama")
