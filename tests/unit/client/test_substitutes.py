"""Substitutes: of the channels that are present, the largest refine in place of those that are absent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.client.bundles import BundleRefiner
from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.substitutes import Substitutes
from strataflux.client.weights import WeightRefiner, record_bases
from strataflux.kernels.select import select_reference
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.test_weights import InMemory


class Some:
    """A source in which some records are present; a record's address is its number and one."""

    def __init__(self, present: set[int]) -> None:
        self._present = present

    def present(self, table: int, oids: Any, addresses: Any, most: int) -> int:
        found = [oid for oid in oids.tolist() if oid in self._present][:most]
        addresses[:] = [oid + 1 if oid in found else 0 for oid in oids.tolist()]
        return len(found)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    width=st.sampled_from([1, 40, 1024, 1500]),
    k=st.integers(1, 300),
    more=st.integers(0, 1024),
    share=st.floats(0, 1),
)
def test_the_largest_that_are_present_take_the_places_of_the_absent(
    seed: int, width: int, k: int, more: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal(width).astype(np.float32)
    resident = set((np.flatnonzero(random.random(width) < share) + 7).tolist())
    selected = select_reference(torch.from_numpy(x), k)[0].tolist()
    considered = select_reference(torch.from_numpy(x), min(1024, k + more))[0].tolist()
    channels = np.array(selected, np.int64)
    addresses = np.array([one + 8 if one + 7 in resident else 0 for one in selected], np.uint64)
    others = Substitutes(Some(resident), 0, k, more, width)
    others.fill(x, np.int64(7), channels, addresses)

    kept = {one for one in selected if one + 7 in resident}
    spare = sorted(set(considered) - set(selected), key=lambda one: -abs(x[one]))
    stand_in = [one for one in spare if one + 7 in resident][: len(selected) - len(kept)]
    used = {int(channel): int(address) for channel, address in zip(channels, addresses, strict=True) if address}
    assert used == {one: one + 8 for one in (*kept, *stand_in)}
    assert others.placed == len(stand_in)


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "p", PrepareSettings())


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(prepared.store)], ring_log2=14) as fake:
        yield fake


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_a_product_is_that_of_the_channels_which_are_present(prepared: PreparedModel, name: str, halves: bool) -> None:
    layer, set_index, k = 1, SETS.index(name), 100
    outputs, inputs = prepared.config.set_shape(name)
    x = torch.randn(inputs, generator=torch.Generator().manual_seed(set_index))
    selected, considered = (select_reference(x, count)[0] for count in (k, 1024))
    base = int(record_bases(prepared.config, prepared.sets)[name][layer])
    absent = frozenset((selected[::2] + base).tolist())
    refiner = WeightRefiner(source := InMemory(prepared.store, absent), 0, prepared, k, substitutes=1024)
    y, expected = torch.zeros(outputs), torch.zeros(outputs)
    if halves:
        refiner.begin(layer, set_index, x.numpy())
    refiner.refine(layer, set_index, x.numpy(), y.numpy())

    left = sorted(set(considered.tolist()) - set(selected.tolist()), key=lambda one: -abs(float(x[one])))
    chosen = torch.tensor([*selected[1::2].tolist(), *left[: len(absent)]])
    only = torch.zeros(inputs).index_copy(0, chosen, x[chosen])
    WeightRefiner(InMemory(prepared.store), 0, prepared, 1024).refine(layer, set_index, only.numpy(), expected.numpy())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert refiner.substitutes == len(absent)
    assert {oid - base for asked in source.asked for oid in asked[1]} == set(selected.tolist())
    assert refiner.statistics()[name].hits == selected.numel() - len(absent)


def test_neurons_stand_in_for_neurons(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "bundles", PrepareSettings(mlp="bundles"))
    config, random = prepared.config, torch.Generator().manual_seed(1)
    x, gate_up = torch.randn(config.hidden, generator=random), torch.randn(2 * config.intermediate, generator=random)
    h = torch.randn(config.intermediate, generator=random)
    budgets = {"qkv": 0, "o": 0, "gate_up": 0, "down": 50}
    selected = select_reference(h, 50)[0]
    base = int(record_bases(config, prepared.sets)["mlp"][0])

    def refined(absent: frozenset[int], substitutes: int, output: torch.Tensor) -> torch.Tensor:
        refiner = BundleRefiner(InMemory(prepared.store, absent), 0, prepared, budgets, substitutes)
        refiner.refine(0, 2, x.numpy(), gate_up.clone().numpy())
        refiner.refine(0, 3, output.numpy(), (y := torch.zeros(config.hidden)).numpy())
        assert refiner.substitutes == (len(absent) if substitutes else 0)
        return y

    # With the selected ones gone from the input, too, the next largest are selected outright.
    without = h.clone()
    without[selected] = 0
    absent = frozenset((selected + base).tolist())
    torch.testing.assert_close(refined(absent, 1024, h), refined(frozenset(), 0, without))
    assert not refined(absent, 0, h).any()


def test_a_model_uses_what_is_resident_and_asks_for_what_it_selected(
    prepared: PreparedModel, daemon: FakeDaemon
) -> None:
    weights = DecoderWeights.read(prepared)
    daemon.publish(0, *range(0, daemon.manifests[0].record_count, 2))

    def attach(substitutes: int) -> RefinedModel:
        return RefinedModel.attach(
            prepared, weights, context=40, runtime_dir=daemon.path.parent, k=100, substitutes=substitutes
        )

    with attach(0) as plain, attach(1024) as standing_in:
        first, second = plain.step(5), standing_in.step(5)
        assert not torch.equal(first, second)
        stats = standing_in.stats()
        # Half of all records are there: nobody who is absent lacks a substitute, and none of those is a look-up.
        assert (plain.substitutes, standing_in.substitutes) == (0, stats.lookups - stats.hits)
        assert stats.lookups == plain.stats().lookups
        assert 0 < stats.hits < stats.lookups
        daemon.take_requests()
        standing_in.step(80)
        assert len(daemon.take_requests()) == standing_in.substitutes - (stats.lookups - stats.hits)


@pytest.mark.parametrize("more", [-1, 1025])
def test_numbers_out_of_range_are_refused(prepared: PreparedModel, more: int) -> None:
    with pytest.raises(MisuseError, match=f"substitutes.*{more}"):
        WeightRefiner(InMemory(prepared.store), 0, prepared, 32, more)
