"""``strataflux tune`` with real steps through a daemon of its own; what it finds is this machine's own affair."""

from pathlib import Path

import pytest

from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.models import SETS
from tests.system.test_demo import Place, place, tiny_source
from tests.unit.client.prepare.test_sources import gguf_tensors, write_gguf

__all__ = ["place"]

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_what_is_found_is_kept(place: Place, tmp_path: Path) -> None:
    source = tiny_source()
    exact, folder = tmp_path / "tiny.gguf", tmp_path / "prepared"
    write_gguf(exact, source, gguf_tensors(source))
    prepare(source, folder, PrepareSettings(origin=str(exact)))
    found = place.run("tune", folder, "--slowdown", "50%", "--tokens", 8, "--windows", 1)
    assert place.leftovers() == []
    assert found["candidates"]
    for trial in found["candidates"]:
        assert trial["fits"] == (trial["slowdown"] <= 0.5)
        assert trial["seconds"] > 0
        assert trial["base_seconds"] > 0
    kept = open_prepared(folder).manifest
    assert dict(kept.k) == found["k"]
    assert dict(kept.shift) == found["shift"] == dict.fromkeys(SETS, 0.0)
    assert kept.mlp_scheme == found["mlp_scheme"] == "channels"
