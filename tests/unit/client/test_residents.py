"""What is resident refines, too: beside the selected channels the next largest that are present."""

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
from strataflux.client.residents import Residents
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.weights import SetStatistics, WeightRefiner, record_bases
from strataflux.kernels.select import select_reference
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.test_weights import InMemory


class Some:
    """A source in which some records are present; a record's address is its number and one."""

    def __init__(self, present: set[int]) -> None:
        self._present = present

    def present(self, table: int, oids: Any, addresses: Any) -> int:
        addresses[:] = [oid + 1 if oid in self._present else 0 for oid in oids.tolist()]
        return int(np.count_nonzero(addresses))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    width=st.sampled_from([1, 40, 1024, 1500]),
    k=st.integers(1, 300),
    more=st.integers(1, 1024),
    share=st.floats(0, 1),
)
def test_all_that_is_present_of_what_is_considered_is_joined(
    seed: int, width: int, k: int, more: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal(width).astype(np.float32)
    resident = set((np.flatnonzero(random.random(width) < share) + 7).tolist())
    selected = select_reference(torch.from_numpy(x), k)[0].tolist()
    considered = select_reference(torch.from_numpy(x), min(1024, k + more))[0].tolist()
    addresses = [one + 8 if one + 7 in resident else 0 for one in selected]
    others = Residents(Some(resident), 0, k, more, width)
    for _ in range(2):
        joined = others.join(x, np.int64(7), np.array(selected, np.int64), np.array(addresses, np.uint64))
    channels, found = (one.tolist() for one in joined)

    assert channels == selected + sorted(set(considered) - set(selected))
    assert found == [one + 8 if one + 7 in resident else 0 for one in channels]
    assert others.used == 2 * np.count_nonzero(found[len(selected) :])


@pytest.mark.parametrize(("k", "more"), [(0, 5), (5, 0)])
def test_nothing_is_considered_beside_nothing(k: int, more: int) -> None:
    channels, addresses = np.arange(k), np.ones(k, np.uint64)
    others = Residents(Some(set(range(64))), 0, k, more, 64)
    joined = others.join(np.ones(64, np.float32), np.int64(0), channels, addresses)
    assert joined[0] is channels
    assert joined[1] is addresses


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
    selected, considered = (select_reference(x, count)[0] for count in (k, 400))
    base = int(record_bases(prepared.config, prepared.sets)[name][layer])
    there = considered[::2]
    absent = frozenset(range(base, base + inputs)) - set((there + base).tolist())
    refiner = WeightRefiner(source := InMemory(prepared.store, absent), 0, prepared, k, residents=300)
    y, expected = torch.zeros(outputs), torch.zeros(outputs)
    if halves:
        refiner.begin(layer, set_index, x.numpy())
    refiner.refine(layer, set_index, x.numpy(), y.numpy())

    only = torch.zeros(inputs).index_copy(0, there, x[there])
    WeightRefiner(InMemory(prepared.store), 0, prepared, 1024).refine(layer, set_index, only.numpy(), expected.numpy())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    hits = len(set(there.tolist()) & set(selected.tolist()))
    assert refiner.residents == there.numel() - hits > 0
    assert refiner.statistics()[name] == SetStatistics(selected.numel(), hits)
    assert {oid - base for asked in source.asked for oid in asked[1]} == set(selected.tolist())


def test_neurons_that_are_there_refine_too(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "bundles", PrepareSettings(mlp="bundles"))
    config, random = prepared.config, torch.Generator().manual_seed(1)
    x, gate_up = torch.randn(config.hidden, generator=random), torch.randn(2 * config.intermediate, generator=random)
    h = torch.randn(config.intermediate, generator=random)

    def refined(neurons: int, residents: int) -> tuple[torch.Tensor, int]:
        budgets = {"qkv": 0, "o": 0, "gate_up": 0, "down": neurons}
        refiner = BundleRefiner(InMemory(prepared.store), 0, prepared, budgets, residents)
        refiner.refine(0, 2, x.numpy(), gate_up.clone().numpy())
        refiner.refine(0, 3, h.numpy(), (y := torch.zeros(config.hidden)).numpy())
        return y, refiner.residents

    (few, joined), (some, none) = refined(50, 150), refined(200, 0)
    torch.testing.assert_close(few, some)
    assert (joined, none) == (select_reference(h, 200)[0].numel() - select_reference(h, 50)[0].numel(), 0)


def test_a_model_uses_what_is_resident_and_asks_for_what_it_selects(
    prepared: PreparedModel, daemon: FakeDaemon
) -> None:
    weights, path = DecoderWeights.read(prepared), daemon.path.parent
    daemon.publish(0, *range(0, daemon.manifests[0].record_count, 2))
    with (
        RefinedModel.attach(prepared, weights, context=40, runtime_dir=path, k=100) as plain,
        RefinedModel.attach(prepared, weights, context=40, runtime_dir=path, k=100, residents=1024) as using,
        RefinedModel.attach(prepared, weights, context=40, runtime_dir=path, k=1024) as selecting,
    ):
        logits = [model.step(5) for model in (plain, using, selecting)]
        # All that is there refines, whether it was selected or not.
        torch.testing.assert_close(logits[1], logits[2])
        assert not torch.equal(logits[0], logits[1])
        counts = [model.stats() for model in (plain, using, selecting)]
        assert (plain.residents, using.residents) == (0, counts[2].hits - counts[1].hits)
        assert counts[0].lookups == counts[1].lookups
        daemon.take_requests()
        before = using.stats()
        using.step(80)
        after = using.stats()
        missed = after.lookups - before.lookups - (after.hits - before.hits)
        assert len(daemon.take_requests()) == missed > 0


def test_a_long_token_lets_go_of_slots_every_few_layers(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source.with_config(layers=9), tmp_path / "deep", PrepareSettings())
    weights = DecoderWeights.read(prepared)
    with (
        FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14) as daemon,
        RefinedModel.attach(prepared, weights, context=40, runtime_dir=daemon.path.parent, residents=8) as model,
    ):
        model.step(5)
        assert daemon.word(0, "step_ended") == 3
        assert model.stats().weight_prefetches.asked == 0


@pytest.mark.parametrize("more", [-1, 1025])
def test_numbers_out_of_range_are_refused(prepared: PreparedModel, more: int) -> None:
    with pytest.raises(MisuseError, match=f"residents.*{more}"):
        WeightRefiner(InMemory(prepared.store), 0, prepared, 32, more)
