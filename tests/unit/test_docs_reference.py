"""The reference pages say what the program says."""

import importlib.util
from importlib.metadata import version
from types import ModuleType

import pytest

from strataflux.daemon.config import Config
from strataflux.daemon.metrics import METRICS
from tests.fakes.pages import ROOT
from tests.unit.test_packaging import pins


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["REFERENCE-CLI.md", "REFERENCE-CONFIG.md", "REFERENCE-METRICS.md"])
def test_pages_are_current(reference: ModuleType, name: str) -> None:
    if name == "REFERENCE-CLI.md" and version("typer") != pins()["typer"]:
        pytest.skip(f"typer {version('typer')} describes options in another way than the pinned {pins()['typer']}")
    assert (ROOT / "docs" / name).read_text() == reference.PAGES[name](), "run make reference"


def test_every_key_and_metric_has_words(reference: ModuleType) -> None:
    """A key without a comment in the example file would be a KeyError, one without text an empty cell."""
    config, metrics = reference.config_page(), reference.metrics_page()
    assert not [line for line in config.splitlines() if line.startswith("| `") and line.endswith("| |")]
    assert config.count("\n## ") == len(Config.__dataclass_fields__)
    assert "| live |" in config
    for declared in METRICS:
        assert f"`{declared.name}" in metrics
