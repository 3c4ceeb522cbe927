"""The weight refiner against dense matrices, with records in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.weights import SetStatistics, WeightRefiner, record_bases, step_demand
from strataflux.kernels.refine import code_columns
from strataflux.kernels.select import select_reference
from strataflux.proto.store_format import open_store


class InMemory:
    """All records of a store in memory; those in ``absent`` are missed."""

    def __init__(self, store: Path, absent: frozenset[int] = frozenset()) -> None:
        manifest = open_store(store)
        self.raw = np.fromfile(manifest.records_path, np.uint8)
        self.sections = manifest.sections
        self.absent = absent
        self.asked: list[tuple[int, list[int], list[int]]] = []

    def lookup(
        self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]
    ) -> int:
        self.asked.append((table, oids.tolist(), scores.tolist()))
        for i, oid in enumerate(oids.tolist()):
            section = next(s for s in self.sections if s.first_oid <= oid < s.first_oid + s.count)
            offset = section.offset + (oid - section.first_oid) * section.stride
            addresses[i] = 0 if oid in self.absent else self.raw.ctypes.data + offset
        return int(np.count_nonzero(addresses))

    ask = lookup
    collect = lookup

    def present(self, table: int, oids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
        found = InMemory.lookup(self, table, oids, np.zeros(oids.size, np.uint8), addresses)
        self.asked.pop()
        return found


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "p", PrepareSettings())


def test_object_ids_are_those_of_the_store(prepared: PreparedModel) -> None:
    sections = open_store(prepared.store).sections
    bases = record_bases(prepared.config, prepared.sets)
    found = [bases[section.set][section.layer] for section in sections]
    assert found == [section.first_oid for section in sections]


@pytest.mark.parametrize("set_index", range(len(SETS)))
@pytest.mark.parametrize("missing", [False, True])
def test_selected_channels_are_added_and_missing_ones_skipped(
    prepared: PreparedModel, set_index: int, missing: bool
) -> None:
    name, layer, k = SETS[set_index], 1, 40
    outputs, inputs = prepared.config.set_shape(name)
    x = torch.randn(inputs, generator=torch.Generator().manual_seed(set_index))
    channels, scores = select_reference(x, k)
    base = int(record_bases(prepared.config, prepared.sets)[name][layer])
    absent = frozenset((channels[::2] + base).tolist()) if missing else frozenset()
    source = InMemory(prepared.store, absent)
    refiner = WeightRefiner(source, 3, prepared, k)
    y = torch.ones(outputs)
    refiner.refine(layer, set_index, x.numpy(), y.numpy())

    section = next(s for s in source.sections if (s.layer, s.set) == (layer, name))
    rows = source.raw[section.offset :][: section.count * section.stride].reshape(section.count, section.stride)
    codes = code_columns(torch.from_numpy(rows[:, : section.record_bytes].copy()), outputs)
    kept = channels[1::2] if missing else channels
    expected = 1 + prepared.refinement_scales(layer, name) * (codes[:, kept].float() @ x[kept])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert source.asked == [(3, (channels + base).tolist(), scores.tolist())]
    assert refiner.statistics()[name] == SetStatistics(channels.numel(), kept.numel())


def test_all_channels_nearly_give_back_the_model(prepared: PreparedModel, tiny_source: Any) -> None:
    exact, low = DecoderWeights.read(tiny_source), DecoderWeights.read(prepared)
    refiner = WeightRefiner(InMemory(prepared.store), 0, prepared, k=1024)
    decoders = [Decoder(exact, 4), Decoder(low, 4), Decoder(low, 4, refiner)]
    for token in (9, 33, 2, 250):
        reference, base, refined = (decoder.step(token) for decoder in decoders)
        assert float((refined - reference).norm()) < 0.2 * float((base - reference).norm())
    demand = step_demand(prepared, k=1024)
    assert demand.selections * 4 == sum(s.lookups for s in refiner.statistics().values())
    assert demand.largest_set_bytes == 1088 * 256  # down: more records than gate-up, each in the smallest slot


def test_sets_have_their_own_budgets_and_none_asks_for_nothing(prepared: PreparedModel) -> None:
    source = InMemory(prepared.store)
    refiner = WeightRefiner(source, 0, prepared, {"qkv": 0, "o": 16, "gate_up": 1024, "down": 32})
    decoder = Decoder(DecoderWeights.read(prepared), 1, refiner)
    decoder.step(1)
    lookups = {name: statistics.lookups for name, statistics in refiner.statistics().items()}
    assert lookups == {"qkv": 0, "o": 2 * 1, "gate_up": 2 * 64, "down": 2 * (32 + 2)}
    assert refiner.statistics()["qkv"].hit_rate == 0.0
    assert refiner.statistics()["down"].hit_rate == 1.0
    assert len(source.asked) == 3 * 2


def test_budgets_come_from_the_prepared_model(prepared: PreparedModel) -> None:
    refiner = WeightRefiner(InMemory(prepared.store), 0, prepared)
    Decoder(DecoderWeights.read(prepared), 1, refiner).step(1)
    asked = sum(statistics.lookups for statistics in refiner.statistics().values())
    assert asked == step_demand(prepared).selections == 2 * (2 + 2 + 2 + 34)


@pytest.mark.parametrize(("k", "message"), [(-1, "-1"), (1025, "1025"), ({"qkv": 1}, "one for each")])
def test_budgets_out_of_range(prepared: PreparedModel, k: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightRefiner(InMemory(prepared.store), 0, prepared, k)


class Filling(InMemory):
    """What is absent comes between the two halves of a look-up."""

    def collect(
        self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]
    ) -> int:
        self.absent = frozenset()
        return self.lookup(table, oids, scores, addresses)


def test_what_comes_between_selection_and_product_is_added_and_counted_as_the_miss_it_was(
    prepared: PreparedModel,
) -> None:
    layer, set_index, k = 1, 0, 200
    ranks, x = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    early = select_reference(ranks, k)[0]
    assert not torch.equal(early, select_reference(x, k)[0])
    base = int(record_bases(prepared.config, prepared.sets)[SETS[set_index]][layer])
    source = Filling(prepared.store, frozenset((early[:3] + base).tolist()))
    refiner = WeightRefiner(source, 0, prepared, k)
    y, expected = torch.zeros(128), torch.zeros(128)
    refiner.begin(layer, set_index, ranks.numpy())
    refiner.refine(layer, set_index, x.numpy(), y.numpy())

    only = torch.zeros(64).index_copy(0, early, x[early])
    WeightRefiner(InMemory(prepared.store), 0, prepared, 1024).refine(layer, set_index, only.numpy(), expected.numpy())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert refiner.statistics()["qkv"] == SetStatistics(early.numel(), early.numel() - 3)
    assert [asked[1] for asked in source.asked] == 2 * [(early + base).tolist()]
    # The selection is used once.
    refiner.refine(layer, set_index, x.numpy(), y.numpy())
    assert source.asked[-1][1] == (select_reference(x, k)[0] + base).tolist()


def test_sets_that_are_shifted_may_ask_twice(prepared: PreparedModel) -> None:
    still, moved = (step_demand(prepared, 32, dict.fromkeys(SETS, blocks)) for blocks in (0.0, 1.0))
    assert moved.selections == 2 * still.selections
    assert moved.largest_set_bytes == still.largest_set_bytes
