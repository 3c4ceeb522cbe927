"""Running ahead of misses: guesses name what would be selected, and a session asks for what of it is absent."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strataflux.client.bundles import BundleRefiner
from strataflux.client.errors import MisuseError
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.weights import WeightRefiner
from strataflux.kernels.kv_encode import KvFormat
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.records import LocalRecords

FORM = KvFormat(2, 2, 16, 4, 4, 4)


class Notes:
    """A source where nothing is there."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def lookup(self, table: int, oids: Any, scores: Any, addresses: Any) -> int:
        self.asked.append((oids.tolist(), scores.tolist()))
        addresses[:] = 0
        return 0

    ask = lookup
    collect = lookup

    def present(self, table: int, oids: Any, addresses: Any) -> int:
        addresses[:] = 0
        return 0


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "prepared", PrepareSettings())


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(prepared.store)], ring_log2=14) as fake:
        yield fake


@pytest.mark.parametrize("set_index", [0, 2])
def test_a_guess_by_the_true_input_names_what_is_selected_and_more(prepared: PreparedModel, set_index: int) -> None:
    notes = Notes()
    refiner = WeightRefiner(notes, 0, prepared, 200)
    outputs, inputs = prepared.config.set_shape(SETS[set_index])
    x = torch.randn(inputs, generator=torch.Generator().manual_seed(3)).numpy()
    guessed, scores = refiner.foresee(1, set_index, x)
    refiner.refine(1, set_index, x, np.zeros(outputs, np.float32))
    ((selected, of_selected),) = notes.asked
    assert len(selected) < guessed.size <= 1.25 * len(selected) + 2
    of_guessed = dict(zip(guessed.tolist(), scores.tolist(), strict=True))
    assert [of_guessed[oid] for oid in selected] == of_selected


def test_bundles_are_not_guessed(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source, tmp_path / "bundles", PrepareSettings(mlp="bundles"))
    refiner = BundleRefiner(Notes(), 0, prepared)
    x = np.ones(prepared.config.hidden, np.float32)
    assert refiner.foresee(0, 2, x)[0].size == 0
    assert refiner.foresee(0, 0, x)[0].size > 0


def test_a_guess_by_the_true_queries_names_the_groups_that_are_selected(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(context=600))
    records = LocalRecords(
        20, weights.config.layers * weights.config.kv_heads * FORM.groups_per_tile, FORM.record_bytes
    )
    blocks = KvBlocks(weights.config, FORM, 8, records)
    guesses: list[set[int]] = []

    class Guessing(RefinedKVCache):
        def attend(self, layer: int, queries: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            guesses.append(set(self.foresee(layer, queries)[0].tolist()))
            return super().attend(layer, queries, *rest)

    cache = Guessing(blocks, 600, Fraction(1, 8), records, 0)
    decoder = Decoder(weights, 0, cache=cache)
    assert cache.foresee(0, torch.ones(weights.config.heads, 16))[0].size == 0
    decoder.prefill(list(range(2, 202)) * 2)
    decoder.step(7)
    for guess, (selected, _) in zip(guesses, records.asked, strict=True):
        # All tokens but the newest have their share: 24 groups, of which 20 are guessed for 16.
        assert len(guess & set(selected.tolist())) >= 15
        assert len(guess) == 20
    cache.refining = False
    assert cache.foresee(0, torch.ones(weights.config.heads, 16))[0].size == 0


def attach(prepared: PreparedModel, daemon: FakeDaemon, **options: Any) -> RefinedModel:
    weights = DecoderWeights.read(prepared)
    return RefinedModel.attach(prepared, weights, context=400, runtime_dir=daemon.path.parent, **options)


def test_a_model_asks_ahead_for_what_is_absent(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with attach(prepared, daemon) as plain, attach(prepared, daemon, ahead=1.0) as ahead:
        for token in (5, 80, 3):
            assert torch.equal(plain.step(token), ahead.step(token))
        (first, second) = (model.stats() for model in (plain, ahead))
        asked = [request for request in daemon.take_requests() if request.prefetch]
    assert (first.weight_prefetches.asked, first.lookups) == (0, second.lookups)
    assert second.weight_prefetches.asked == len(asked) > 0


def test_what_is_there_is_not_asked_for(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    daemon.publish(0, *range(daemon.manifests[0].record_count))
    with attach(prepared, daemon, ahead=1.0) as model:
        model.step(5)
        assert model.stats().weight_prefetches.asked == 0
    assert daemon.take_requests() == []


def test_groups_are_asked_for_ahead_too(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    daemon.cache_puts = False
    kv = KvOptions(2, 2, fraction=Fraction(1, 8))
    with attach(prepared, daemon, ahead=1.0, kv=kv) as model:
        model.prefill(list(range(200)) + list(range(190)))
        daemon.take_puts()
        model.step(5)
        stats = model.stats()
        tables = {request.table for request in daemon.take_requests() if request.prefetch}
    assert stats.kv_prefetches.asked > 0
    assert tables == {0, 1}


def test_a_long_token_lets_go_of_slots_every_few_layers(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source.with_config(layers=9), tmp_path / "deep", PrepareSettings())
    with (
        FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14) as daemon,
        attach(prepared, daemon) as plain,
        attach(prepared, daemon, ahead=1.0) as ahead,
    ):
        assert torch.equal(plain.step(5), ahead.step(5))
        assert [daemon.word(session, "step_ended") for session in range(2)] == [1, 3]


def test_a_step_that_is_run_again_asks_for_nothing(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with attach(prepared, daemon, ahead=1.0) as model:
        model.step(5)
        daemon.take_requests()
        step = model._decoder.step

        def fenced(token: int) -> torch.Tensor:
            logits = step(token)
            daemon.fence()
            model._decoder.step = step  # type: ignore[method-assign]
            return logits

        model._decoder.step = fenced  # type: ignore[method-assign]
        model.step(80)
        assert model.stats().steps_invalid == 1


def test_it_rests_where_it_does_not_pay(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with attach(prepared, daemon, ahead=1.0) as model:
        for window in range(1, 6):
            daemon.sessions[0].count_prefetches({"fills": (100 * window, 0), "unused": (100 * window, 0)})
            for _ in range(16):
                model.step(5)
        before = model.stats().weight_prefetches.asked
        daemon.take_requests()
        model.step(7)
        assert model.stats().weight_prefetches.asked == before


def test_a_distance_out_of_range_is_refused(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with pytest.raises(MisuseError, match=r"3\.0 blocks"):
        attach(prepared, daemon, ahead=3.0)
