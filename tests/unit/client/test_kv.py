"""The refined KV cache: against many positions at once, through forks, failing puts and another attachment."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strataflux.client.errors import MisuseError, RefusedError
from strataflux.client.evaluate.kv import DenseKv, prefill
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.runtime.decoder import ContextFull, Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels import kv_attention_cpu
from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_encode import KEY_ROWS, KvFormat, decode_half
from strataflux.proto import layout
from tests.fakes.records import LocalRecords

FORM = KvFormat(2, 2, 16, 4, 4, 4)
FRACTION = Fraction(1, 8)
CONTEXT = 600


@dataclass
class Setup:
    """A tiny model over a cache of its own."""

    weights: DecoderWeights
    records: LocalRecords
    blocks: KvBlocks

    def cache(self, context: int = CONTEXT, fraction: Fraction = FRACTION, *, kept_steps: int = 0) -> RefinedKVCache:
        early = self.records if kept_steps else None
        return RefinedKVCache(self.blocks, context, fraction, self.records, 0, 0.0, early, max(1, kept_steps))

    def decoder(self, cache: RefinedKVCache | None = None) -> Decoder:
        return Decoder(self.weights, 0, cache=cache or self.cache())


def make(source: Any, capacity: int = 8, form: KvFormat = FORM, quota: int = 20) -> Setup:
    weights = DecoderWeights.read(source.with_config(context=CONTEXT))
    config = weights.config
    records = LocalRecords(quota, config.layers * config.kv_heads * form.groups_per_tile, form.record_bytes)
    return Setup(weights, records, KvBlocks(weights.config, form, capacity, records))


@pytest.fixture
def setup(tiny_source: Any) -> Setup:
    return make(tiny_source)


def some_tokens(count: int, seed: int = 5) -> list[int]:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def steps(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    return torch.stack([decoder.step(token) for token in tokens])


def test_blocks_of_a_context() -> None:
    assert [blocks_for(n) for n in (1, 256, 257, 384, 385, 8192)] == [0, 0, 1, 1, 2, 62]


@pytest.mark.parametrize(
    ("fraction", "kept_steps"), [(Fraction(0), 0), (FRACTION, 0), (FRACTION, 1), (FRACTION, 3), (Fraction(1), 0)]
)
def test_token_by_token_is_many_positions_at_once(setup: Setup, fraction: Fraction, kept_steps: int) -> None:
    tokens = some_tokens(540)
    dense = DenseKv(setup.weights, prefill(setup.weights, tokens[:400]), FORM)
    decoder = setup.decoder(setup.cache(fraction=fraction, kept_steps=kept_steps))
    decoder.prefill(tokens[:400])
    right = torch.stack(list(dense.rows(tokens[400:], fraction, 4, kept_steps)))
    torch.testing.assert_close(steps(decoder, tokens[400:]), right, rtol=2e-2, atol=2e-2)


def test_prefill_ends_where_steps_would_have_begun(setup: Setup) -> None:
    tokens = some_tokens(300)
    decoder, exact = setup.decoder(), Decoder(setup.weights, CONTEXT)
    torch.testing.assert_close(decoder.prefill(tokens), steps(exact, tokens)[-1], rtol=1e-3, atol=1e-3)
    assert decoder.position == 300
    other = Decoder(setup.weights, CONTEXT)
    torch.testing.assert_close(other.prefill(tokens), exact_logits(exact, tokens), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(other.step(7), exact.step(7), rtol=1e-3, atol=1e-3)


def exact_logits(exact: Decoder, tokens: Sequence[int]) -> Tensor:
    exact.reset(len(tokens) - 1)
    return exact.step(tokens[-1])


def test_what_is_stored_was_turned_once(setup: Setup) -> None:
    cache = setup.cache()
    # One strong channel: turned it is in all of them, turned twice it would be alone again.
    keys = torch.zeros(2, 300, 16)
    keys[..., 3] = 4 * torch.randn(300).sign()
    for layer in range(2):
        cache.fill(layer, keys, keys)
    cache.end_fill(300)
    place = int(cache._places[0])
    found = decode_half(setup.blocks.keys[0, place], 2, KEY_ROWS)
    torch.testing.assert_close(found, turn(keys[:, 128:256]), rtol=0.01, atol=0.01)
    torch.testing.assert_close(cache._tail.keys[0, :, :44].float(), turn(keys[:, 256:]), rtol=0.01, atol=0.01)


def test_object_ids_and_scores(setup: Setup) -> None:
    tokens = some_tokens(390)
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(tokens)
    setup.records.asked.clear()
    decoder.step(1)
    assert len(setup.records.asked) == 2
    per_head, per_layer = FORM.groups_per_tile, 2 * FORM.groups_per_tile
    bases = set(setup.blocks.bases[cache._places[:2].numpy()].tolist())
    for layer, (oids, scores) in enumerate(setup.records.asked):
        assert oids.size == 2 * 8  # KV heads · floor(64 / 8)
        assert {oid // (2 * per_layer) * 2 * per_layer for oid in oids.tolist()} <= bases
        assert {oid // per_layer % 2 for oid in oids.tolist()} == {layer}
        assert [oid // per_head % 2 for oid in oids.tolist()] == [0] * 8 + [1] * 8
        assert scores.min() >= 1
        assert all(half.tolist() == sorted(half.tolist(), reverse=True) for half in (scores[:8], scores[8:]))


def test_absent_records_are_skipped_and_counted(setup: Setup) -> None:
    tokens = some_tokens(400)
    base = steps_after_prefill(setup, tokens, Fraction(0))
    full = steps_after_prefill(setup, tokens, FRACTION)
    setup.records.absent = set(range(20 * setup.blocks.records_a_block))
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    torch.testing.assert_close(steps(decoder, tokens[390:]), base, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(full, base, rtol=1e-2, atol=1e-2)
    statistics = cache.statistics()
    assert (statistics.lookups, statistics.hits) == (10 * 2 * 2 * 8, 0)


def steps_after_prefill(setup: Setup, tokens: Sequence[int], fraction: Fraction) -> Tensor:
    cache = setup.cache(fraction=fraction)
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    found = steps(decoder, tokens[390:])
    cache.close()
    return found


def test_sizes_are_what_is_allocated(setup: Setup) -> None:
    cache = setup.cache()
    tile = 2 * 128 * 16 * 2 // 8 + 2 * (3 * 16 + 3 * 128)  # codes; A, Z, B of keys and of values
    assert FORM.tile_bytes == tile
    assert setup.blocks.nbytes == 8 * 2 * 2 * tile
    setup.decoder(cache).prefill(some_tokens(520))
    assert cache.nbytes == 3 * 2 * 2 * tile + 2 * 2 * 256 * 16 * 2 * 2


def test_a_tile_is_put_at_the_step_after_it_filled_up(setup: Setup) -> None:
    decoder = setup.decoder()
    steps(decoder, some_tokens(256))
    assert not setup.records.blocks
    decoder.step(1)
    assert len(setup.records.blocks) == 1


def test_a_put_that_finds_no_room_is_tried_again_and_given_up_when_the_next_tile_is_full(setup: Setup) -> None:
    decoder = setup.decoder()
    setup.records.full = True
    steps(decoder, some_tokens(260))
    setup.records.full = False
    decoder.step(1)
    assert len(setup.records.blocks) == 1
    setup.records.full = True
    steps(decoder, some_tokens(250))
    assert (len(setup.records.blocks), setup.records.dropped) == (1, 0)
    steps(decoder, some_tokens(10))
    assert (len(setup.records.blocks), setup.records.dropped, setup.blocks.unrefined) == (1, 1, 1)


@pytest.mark.parametrize("result", [layout.PUT_REFUSED_QUOTA, layout.PUT_REFUSED_SPACE, 77])
def test_a_refused_put_leaves_its_tokens_unrefined_and_is_told_once(
    setup: Setup, result: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = some_tokens(540)
    base = steps_after_prefill(setup, tokens[:400], Fraction(0))
    setup.records.result = result
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    torch.testing.assert_close(steps(decoder, tokens[390:400]), base, rtol=1e-4, atol=1e-4)
    assert setup.blocks.refused == 2
    assert sum("unrefined" in record.message for record in caplog.records) == 1
    assert cache.statistics().hits == 0
    setup.records.result = layout.PUT_ACCEPTED
    steps(decoder, tokens[400:])
    assert cache.statistics().hits > 0


def test_a_fork_shares_what_is_encoded_and_diverges_right(setup: Setup) -> None:
    tokens = some_tokens(300)
    cache = setup.cache(context=520)
    decoder = setup.decoder(cache)
    decoder.prefill(tokens)
    stored, free = len(setup.records.blocks), setup.blocks.free
    fork = cache.fork()
    # Nothing was put again; the fork took places for the blocks it may still fill.
    assert (stored, len(setup.records.blocks)) == (1, 1)
    assert setup.blocks.free == free - (blocks_for(520) - 1)
    assert len(setup.records.granted) == 2 * blocks_for(520) - 1
    left, right = some_tokens(100, 1), some_tokens(100, 2)
    mine = steps(decoder, left)
    theirs = steps(setup.decoder(fork), right)
    assert len(setup.records.blocks) == 3
    for found, suffix in ((mine, left), (theirs, right)):
        alone = make_alone(setup, tokens)
        torch.testing.assert_close(found, steps(alone, suffix), rtol=1e-4, atol=1e-4)
    cache.close()
    torch.testing.assert_close(setup.decoder(fork).step(9), steps(make_alone(setup, tokens), [*right, 9])[-1])
    assert len(setup.records.granted) == blocks_for(520)
    fork.close()
    assert (setup.blocks.free, len(setup.records.granted)) == (8, 0)


def make_alone(setup: Setup, tokens: Sequence[int]) -> Decoder:
    records = LocalRecords(4, setup.blocks.records_a_block, FORM.record_bytes)
    blocks = KvBlocks(setup.weights.config, FORM, 4, records)
    decoder = Decoder(setup.weights, 0, cache=RefinedKVCache(blocks, 520, FRACTION, records, 0))
    decoder.prefill(tokens)
    return decoder


def test_a_fork_within_the_sink_is_its_own(setup: Setup) -> None:
    cache = setup.cache(context=200)
    decoder = setup.decoder(cache)
    steps(decoder, some_tokens(50))
    fork = setup.decoder(cache.fork())
    mine, theirs = steps(decoder, [1, 2, 3]), steps(fork, [4, 5, 6])
    assert not torch.allclose(mine, theirs)
    decoder.reset(50)
    assert torch.equal(steps(decoder, [4, 5, 6]), theirs)


def test_a_released_place_gets_another_id(setup: Setup) -> None:
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(some_tokens(520))
    before = set(setup.records.blocks)
    decoder.reset()
    assert set(setup.records.released) == before
    decoder.prefill(some_tokens(520))
    assert len(setup.records.blocks) == 3
    assert len(setup.records.granted) == blocks_for(CONTEXT)


def test_a_sequence_goes_on_over_another_attachment(setup: Setup) -> None:
    tokens = some_tokens(540)
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    decoder.step(tokens[390])
    hits = cache.statistics().hits
    assert hits > 0
    setup.records.reattach()
    steps(decoder, tokens[391:512])
    assert cache.statistics().hits == hits
    # What fills up from now on is refined again.
    steps(decoder, tokens[512:530])
    assert cache.statistics().hits > hits
    assert len(setup.records.blocks) == 1


def test_going_back(setup: Setup) -> None:
    tokens = some_tokens(400)
    decoder = setup.decoder()
    decoder.prefill(tokens[:384])
    first = steps(decoder, tokens[384:400])
    decoder.reset(384)
    assert torch.equal(steps(decoder, tokens[384:400]), first)
    decoder.reset(384)
    with pytest.raises(MisuseError, match="start over"):
        decoder.reset(383)
    with pytest.raises(MisuseError, match="position 385"):
        decoder.reset(385)
    decoder.reset()
    decoder.prefill(tokens[:384])
    torch.testing.assert_close(steps(decoder, tokens[384:400]), first)


def test_limits_are_named(setup: Setup, tiny_source: Any) -> None:
    decoder = setup.decoder(setup.cache(context=300))
    with pytest.raises(ContextFull, match="301 tokens"):
        decoder.prefill(some_tokens(301))
    decoder.prefill(some_tokens(300))
    with pytest.raises(ContextFull):
        decoder.step(1)
    with pytest.raises(MisuseError, match="at position 300"):
        decoder.prefill([1])
    with pytest.raises(MisuseError, match="9 blocks"):
        setup.cache(context=1300)
    with pytest.raises(RefusedError, match="at most 2"):
        make(tiny_source, quota=2).cache()
    with pytest.raises(ValueError, match="heads of 16"):
        KvBlocks(setup.weights.config, KvFormat(2, 2, 32), 1)


def test_without_refinement_nothing_is_asked(setup: Setup) -> None:
    blocks = KvBlocks(setup.weights.config, KvFormat(2, 2, 16), 8, setup.records)
    decoder = Decoder(setup.weights, 0, cache=RefinedKVCache(blocks, CONTEXT, FRACTION, setup.records, 0))
    decoder.prefill(some_tokens(400))
    decoder.step(1)
    assert not setup.records.asked
    assert blocks.payload_bytes == 0


def test_rms_is_told_once_a_layer(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "strataflux.client.kv")
    decoder = setup.decoder()
    decoder.prefill(some_tokens(400))
    decoder.reset()
    decoder.prefill(some_tokens(400))
    told = [record.message for record in caplog.records if "RMS of keys" in record.message]
    assert [text.split(":")[0] for text in told] == ["layer 0", "layer 1"]


def test_what_a_session_is_told(setup: Setup) -> None:
    config = setup.weights.config
    options = KvOptions(2, 2, 4, 4, 4, Fraction(1, 8))
    geometry = options.geometry(config, 3)
    assert geometry is not None
    assert (geometry.groups_per_block, geometry.record_bytes, geometry.max_blocks) == (2 * 2 * 32, 64, 3)
    assert (geometry.block_tokens, geometry.group_tokens) == (128, 4)
    demand = options.demand(config, 600)
    assert (demand.selections, demand.largest_set_bytes) == (2 * 2 * 12, 2 * 12 * 256)
    assert KvOptions(2, 2, 0, 0).geometry(config, 3) is None
    assert KvOptions(2, 2, 0, 0).demand(config, 600).selections == 0
    with pytest.raises(MisuseError, match="head_dim is 80"):
        options.form(80)


def test_progress_of_a_prefill(setup: Setup) -> None:
    told = list[int]()
    cache = setup.cache()
    cache.on_block = lambda: told.append(1)
    setup.decoder(cache).prefill(some_tokens(520))
    assert len(told) == 3


def test_payloads_reach_their_block_whole(setup: Setup) -> None:
    cache = setup.cache()
    decoder = setup.decoder(cache)
    tokens = some_tokens(390)
    decoder.prefill(tokens)
    filled = {block: data.copy() for block, data in setup.records.blocks.items()}
    ids = [int(base) // setup.blocks.records_a_block for base in setup.blocks.bases[cache._places[:2].numpy()]]
    assert set(ids) == set(filled)
    assert all(np.count_nonzero(data) > data.size / 2 for data in filled.values())


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_sequence_that_waits_looks_up_what_it_has_just_put(setup: Setup, seconds: float) -> None:
    setup.records.late = True
    cache = RefinedKVCache(setup.blocks, CONTEXT, FRACTION, setup.records, 0, seconds)
    decoder = setup.decoder(cache)
    steps(decoder, some_tokens(256))
    decoder.step(1)
    assert (cache.statistics().hits > 0) == bool(seconds)
    decoder.step(1)
    assert cache.statistics().hits > 0


def test_no_step_compiles(setup: Setup) -> None:
    cache = setup.cache()
    called = (kv_attention_cpu._key_logits, kv_attention_cpu._mix_values, kv_attention_cpu._refine)
    functions: list[Any] = list(called)  # the others are compiled into these
    before = [len(f.signatures) for f in functions]
    steps(setup.decoder(cache), some_tokens(260))
    assert cache.statistics().hits > 0
    assert [len(f.signatures) for f in functions] == before


def test_blocks_that_nobody_grants_an_id_for_are_counted(setup: Setup) -> None:
    tokens = some_tokens(530)
    cache = setup.cache()
    decoder = setup.decoder(cache)
    decoder.prefill(tokens[:390])
    setup.records.reattach()
    setup.records.refuse = True
    steps(decoder, tokens[390:])
    assert setup.blocks.unrefined == setup.records.dropped == 1
    assert not setup.records.blocks
    setup.records.refuse = False
    decoder.reset()
    decoder.prefill(tokens[:390])
    assert len(setup.records.blocks) == 2
