"""``strataflux generate --kv`` on a CPU: with a daemon that takes records, and without one."""

from pathlib import Path
from typing import Any

import pytest

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run

PROMPT = "he said " * 60
"""So long that a tile is encoded and looked up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


@pytest.fixture
def long_prepared(folder: Path, tiny_source: Any) -> PreparedModel:
    """A model that was made for as many positions."""
    return prepare(tiny_source.with_config(context=1024, intermediate=64), folder / "long", PrepareSettings())


def test_groups_are_refined_by_a_daemon_and_not_without_one(
    folder: Path, long_prepared: PreparedModel, run: Run
) -> None:
    options = ("--max-tokens", 2, "--kv", "2/2", "--fraction", "1", "--k", 0, "--runtime-dir", folder, "--json")
    with FakeDaemon(folder, [open_store(long_prepared.store)], ring_log2=14):
        refined = run("generate", long_prepared.folder, PROMPT, *options).json()
    assert refined["weight_hit_rate"] is None
    assert refined["kv_hit_rate"] > 0
    alone = run("generate", long_prepared.folder, PROMPT, *options)
    assert alone.json()["kv_hit_rate"] is None
    assert alone.err.count("not refined") == 1
