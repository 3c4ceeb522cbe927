"""What is told about a model before it is prepared is what its files turn out to be."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strataflux.client.disk import DiskSpeed
from strataflux.client.explain import (
    Explanation,
    Machine,
    expected_hit_rate,
    explain_model,
    explain_prepared,
    judge,
    size_text,
)
from strataflux.client.prepare.settings import PrepareSettings, base_settings
from strataflux.client.prepare.write import prepare
from strataflux.client.schemes import store_slot_bytes
from strataflux.client.weights import step_demand
from strataflux.proto.store_format import open_store
from tests.unit.client.conftest import TinySource

NO_TEXT = torch.empty((0, 0), dtype=torch.int64)


@pytest.mark.parametrize("mlp", ["channels", "bundles", "both"])
def test_a_plan_comes_true(mlp: str, tiny_source: TinySource, tmp_path: Path) -> None:
    settings = PrepareSettings(base_settings("rtn", 3, 64), 48, mlp=mlp)
    planned = explain_model(tiny_source.config, settings, None)
    prepared = prepare(tiny_source, tmp_path / "prepared", settings)
    assert explain_prepared(prepared, None, None) == planned
    manifest = open_store(prepared.store)
    on_disk = sum(path.stat().st_size for path in (manifest.records_path, manifest.checksums_path))
    assert planned.store_bytes == pytest.approx(on_disk, abs=64)
    with prepared.folder.joinpath("resident.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert sum(planned.fast_bytes.values()) == prepared.resident_bytes - header
    assert planned.bits_per_weight == pytest.approx(prepared.bits_per_weight)
    assert planned.token.records == step_demand(prepared).selections
    assert (planned.base, planned.bits, planned.group) == ("rtn", 3, 64)
    assert planned.cache_bytes == store_slot_bytes(prepared.config, prepared.sets) // 4


@pytest.mark.parametrize(("base", "bits", "group"), [("awq", 3, 64), ("sqllm", 3, 0), ("lnq", 3, 0), ("nf4", 4, 64)])
def test_other_bases_can_be_told_without_text(base: str, bits: int, group: int, tiny_source: TinySource) -> None:
    told = explain_model(tiny_source.config, PrepareSettings(base_settings(base, bits, 64), tokens=NO_TEXT), None)
    assert (told.base, told.bits, told.group) == (base, bits, group)
    if base == "nf4":
        assert told.bits_per_weight == 4.25  # no zero-points
    assert told.fast_bytes["codes"] == told.weights * bits // 8


def test_layers_with_windows_keep_no_more_than_those(tiny_source: TinySource) -> None:
    told = [
        explain_model(one.config, PrepareSettings(), None)
        for one in (tiny_source, tiny_source.with_config(windows=(0, 9)))
    ]
    assert (told[0].kv_bytes_a_token, told[0].kv_window_bytes) == (2 * 128, 0)
    assert (told[1].kv_bytes_a_token, told[1].kv_window_bytes) == (128, 9 * 128)


def test_budgets_and_cache_change_what_a_token_asks(tiny_source: TinySource) -> None:
    told = [explain_model(tiny_source.config, PrepareSettings(k=k), 1 << 16) for k in (16, 32)]
    assert told[1].token.records > told[0].token.records
    assert told[0].token.record_bytes < told[0].token.disk_bytes
    assert told[0].token.disk_bytes == 4096 * told[0].token.records  # small records: a block around each
    whole = explain_model(tiny_source.config, PrepareSettings(), 1 << 40)
    assert (whole.cache_share, whole.expected_hit_rate, whole.misses_a_token) == (1.0, 1.0, 0.0)
    assert whole.to_json()["misses_a_token"] == 0.0


def test_expected_hit_rates_are_the_recorded_ones_and_grow() -> None:
    assert expected_hit_rate(0.25) == pytest.approx(0.718)
    assert expected_hit_rate(0.10) == pytest.approx(0.492)
    rates = [expected_hit_rate(n / 50) for n in range(51)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)


def machine(told: Explanation, reads: float) -> Machine:
    """One that suits just so, with a disk of this speed."""
    need = told.store_bytes + sum(told.fast_bytes.values())
    disk = DiskSpeed(4096, reads, 1e-4, 1e-3, True, 1 << 28)
    return Machine(1 << 40, told.cpu_bytes + told.cache_bytes, need, disk)


def test_verdicts_turn_where_need_and_supply_meet(tiny_source: TinySource) -> None:
    told = explain_model(tiny_source.config, PrepareSettings(), None)
    enough = machine(told, told.misses_a_token * 7)

    def unsuited(found: Machine, speed: float = 7.0, *, prepared: bool = False) -> list[str]:
        return [v.name for v in judge(told, found, speed, prepared=prepared) if not v.suits]

    assert unsuited(enough) == []
    assert unsuited(enough, 7.1) == ["disk speed"]
    assert unsuited(replace(enough, available_bytes=enough.available_bytes - 1)) == ["memory"]
    smaller = replace(enough, disk_free_bytes=enough.disk_free_bytes - 1)
    assert unsuited(smaller) == ["disk space"]
    assert unsuited(smaller, prepared=True) == []
    assert [v.name for v in judge(told, replace(enough, disk=None), 1e9, prepared=True)] == ["memory"]


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 1_250_000, 98_300_000_000)] == ["0.0 KB", "1.0 KB", "1.2 MB", "98.3 GB"]
