"""The refined KV cache where each step refines what the one before it selected."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from strataflux.client.errors import MisuseError
from strataflux.client.kv_options import KvOptions
from strataflux.client.kv_selections import EarlierSelections
from strataflux.client.runtime.models import ModelConfig
from strataflux.client.weights import SetStatistics
from tests.unit.client.test_kv import Setup, make, some_tokens, steps


@pytest.fixture
def setup(tiny_source: Any) -> Setup:
    return make(tiny_source)


def test_a_step_looks_up_what_the_one_before_selected_and_asked_for(setup: Setup) -> None:
    tokens = some_tokens(400)
    cache = setup.cache(kept_steps=1)
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    setup.records.asked.clear()
    decoder.step(tokens[390])
    assert not setup.records.asked
    assert [early.size for early in setup.records.early] == [16, 16]
    assert cache.statistics() == SetStatistics(0, 0)
    for token in tokens[391:]:
        expected = [set(early.tolist()) for early in setup.records.early]
        setup.records.early.clear()
        setup.records.asked.clear()
        decoder.step(token)
        assert [set(oids.tolist()) for oids, _ in setup.records.asked] == expected
    assert cache.statistics() == SetStatistics(9 * 32, 9 * 32)


def test_nothing_selected_outlives_its_sequence(setup: Setup) -> None:
    tokens = some_tokens(400)
    cache = setup.cache(kept_steps=1)
    decoder = setup.decoder(cache)
    decoder.prefill(tokens)
    steps(decoder, [1, 2])
    decoder.reset()
    decoder.prefill(tokens)
    setup.records.asked.clear()
    first = decoder.step(3)
    assert not setup.records.asked
    other = setup.decoder(setup.cache(fraction=Fraction(0)))
    other.prefill(tokens)
    torch.testing.assert_close(first, other.step(3))


def test_a_fork_goes_on_with_what_was_selected(setup: Setup) -> None:
    cache = setup.cache(390, kept_steps=1)
    decoder = setup.decoder(cache)
    decoder.prefill(some_tokens(385))
    decoder.step(1)
    fork = cache.fork()
    found = setup.decoder(fork).step(2)
    torch.testing.assert_close(found, decoder.step(2))
    assert fork.statistics().lookups == 32
    fork.close()


def test_a_session_is_told_of_requests_that_come_twice(setup: Setup) -> None:
    config: ModelConfig = setup.weights.config
    now, before = (KvOptions(2, 2, select_lag=lag).demand(config, 600) for lag in (0, 1))
    assert before.selections == 2 * now.selections > 0
    assert before.largest_set_bytes == now.largest_set_bytes


def test_what_cannot_be_selected_before_is_refused() -> None:
    with pytest.raises(MisuseError, match="0 or 1"):
        KvOptions(2, 2, select_lag=2)
    with pytest.raises(MisuseError, match="1 to 64"):
        KvOptions(2, 2, select_lag=1, kept_steps=65)


def test_selections_of_some_steps_name_each_group_once() -> None:
    selections = EarlierSelections(2)
    steps = [[[5, 1, 9], [2, 3, 4]], [[1, 7, 5], [2, 3, 4]], [[8, 0, 6], [1, 2, -1]]]
    found = []
    for number, step in enumerate(steps):
        groups = torch.tensor([step])
        found.append(selections.replace(0, groups, groups + 100.0 * number))
    none, first, both = found
    assert none[0].shape == (1, 2, 0)
    assert first[0].tolist() == [steps[0]]
    assert both[0].tolist() == [[[1, 7, 5, 9], [2, 3, 4, -1]]]
    assert both[1].tolist() == [[[101, 107, 105, 9], [102, 103, 104, 0]]]
    copy = selections.copy()
    selections.clear()
    assert copy.replace(0, groups, groups)[0].tolist() == [[[8, 0, 6, 1, 7, 5], [1, 2, 3, 4, -1, -1]]]
    assert selections.replace(0, groups, groups)[0].shape[2] == 0
