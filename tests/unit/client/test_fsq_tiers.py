"""Codes in two tiers: against whole windows, misses, late and failing puts, another attachment, going back."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client import fsq_tiers
from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.fsq import FsqTiers, fsq_logits, recall_of_tiers
from strataflux.client.fsq_blocks import FsqBlocks
from strataflux.client.fsq_refined import TierOptions
from strataflux.client.fsq_tiers import TieredFsqCache
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.runtime.fsq_decoder import FsqDecoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq_nested import FsqTier
from strataflux.proto import layout
from tests.fakes.records import LocalRecords

CONTEXT = 300
FRACTION = Fraction(1, 8)
GIVEN = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))
TEXT = torch.randint(0, 258, (CONTEXT,), generator=torch.Generator().manual_seed(5)).tolist()


@dataclass
class Setup:
    """A tiny model, its codes of 16 bytes, 6 of them resident, and records of two sequences at most."""

    weights: DecoderWeights
    tiers: list[FsqTier]
    records: LocalRecords

    def decoder(self, group: int = 4, fraction: Fraction = FRACTION) -> FsqDecoder:
        options = TierOptions(fraction, group)
        self.records = LocalRecords(4, options.records_a_block(self.tiers), options.record_bytes(self.tiers))
        blocks = FsqBlocks([t.grid.refinement.nbytes for t in self.tiers], group, CONTEXT, self.records)
        cache = TieredFsqCache(self.weights, self.tiers, CONTEXT, fraction, blocks, self.records)
        return FsqDecoder(self.weights, cache, CONTEXT)

    def dense(self, tokens: Sequence[int], group: int = 4, fraction: Fraction = FRACTION) -> Tensor:
        tiers = [FsqTiers(one.coarse, one.whole, fraction, group, 128) for one in self.tiers]
        return fsq_logits(self.weights, tiers, tokens)


@pytest.fixture
def setup(tiny_source: Any) -> Setup:
    return make(tiny_source.with_config(context=CONTEXT))


def make(source: Any) -> Setup:
    codes = [one.layer for one in convert(source, GIVEN, FsqSettings(16, 0, "clamp"), GIVEN.device)]
    tiers = divide_codes(source, codes, GIVEN, 6, GIVEN.device)
    return Setup(DecoderWeights.read(source), tiers, LocalRecords(0, 1, 1))


def steps(decoder: FsqDecoder, tokens: Sequence[int]) -> Tensor:
    return torch.stack([decoder.step(token) for token in tokens])


def cache_of(decoder: FsqDecoder) -> TieredFsqCache:
    assert isinstance(decoder.codes, TieredFsqCache)
    return decoder.codes


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_steps_say_what_whole_windows_say_if_nothing_misses(
    tiny_source: Any, architecture: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsq_tiers, "_TILE", 100)
    setup = make(tiny_source.with_config(architecture=architecture, context=CONTEXT))
    text = TEXT[:170]
    decoder, right = setup.decoder(group), setup.dense(text, group)
    found = steps(decoder, text)
    # Sums in another order may move a coordinate over the edge of a cell, or a group into another's place.
    close = torch.isclose(found, right, atol=2e-3, rtol=2e-3).all(-1)
    assert close.float().mean() > 0.95
    counted = cache_of(decoder).statistics()
    assert counted.hits == counted.lookups > 0
    whole = fsq_logits(setup.weights, [tier.whole for tier in setup.tiers], text)
    assert float((whole - right)[128:].abs().max()) > 0.02


def test_what_is_absent_stays_coarse(setup: Setup) -> None:
    decoder = setup.decoder()
    setup.records.absent = set(range(4 * setup.records._shape[0]))
    decoder.prefill(TEXT[:130])
    found = steps(decoder, TEXT[130:140])
    counted = cache_of(decoder).statistics()
    assert (counted.hits, counted.lookups > 0) == (0, True)
    unrefined = setup.decoder(fraction=Fraction(0))
    unrefined.prefill(TEXT[:130])
    assert torch.equal(found, steps(unrefined, TEXT[130:140]))
    assert setup.records.asked == []
    refined = setup.decoder()
    refined.prefill(TEXT[:130])
    assert float((steps(refined, TEXT[130:140]) - found).abs().max()) > 0.02


def test_what_is_at_hand_is_fine(setup: Setup) -> None:
    whole = FsqDecoder(setup.weights, [tier.whole for tier in setup.tiers], CONTEXT)
    assert torch.allclose(steps(setup.decoder(), TEXT[:20]), steps(whole, TEXT[:20]), atol=1e-3)


def test_all_of_it_is_the_whole_code(setup: Setup) -> None:
    whole = FsqDecoder(setup.weights, [tier.whole for tier in setup.tiers], CONTEXT)
    decoder = setup.decoder(fraction=Fraction(1))
    for one in (whole, decoder):
        one.prefill(TEXT[:270])
    assert torch.allclose(steps(decoder, TEXT[270:280]), steps(whole, TEXT[270:280]), atol=2e-3)


def test_bytes_are_those_of_the_formula(setup: Setup) -> None:
    decoder = setup.decoder()
    decoder.prefill(TEXT[:138])
    steps(decoder, TEXT[138:140])
    size = sum(tier.grid.resident.nbytes for tier in setup.tiers)
    assert size == 2 * 6
    assert cache_of(decoder).buffer.nbytes == CONTEXT * size
    assert cache_of(decoder).nbytes == 140 * size
    blocks = cache_of(decoder).blocks
    assert blocks.start == 128
    assert sum(pieces.nbytes for pieces in blocks._pieces) == 128 * sum(t.grid.refinement.nbytes for t in setup.tiers)


def test_a_record_has_what_the_resident_part_lacks(setup: Setup) -> None:
    decoder = setup.decoder()
    decoder.prefill(TEXT[:129])
    decoder.step(TEXT[129])
    (block,) = setup.records.blocks.values()
    x = setup.weights.embedding[TEXT[:128]]
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], setup.weights.layers[0].attention_norm)
    tier = setup.tiers[0]
    size = tier.grid.refinement.nbytes
    pieces = torch.from_numpy(block[:32, : 4 * size]).reshape(128, size)
    resident = tier.grid.resident.unpack(cache_of(decoder).buffer.layers[0][:128])
    joined = tier.grid.join(resident, tier.grid.refinement.unpack(pieces))
    assert (joined != tier.whole.encode(x)).float().mean() < 0.01


@pytest.mark.parametrize("chunk", [50, 512])
def test_a_prompt_attends_to_whole_codes_and_is_handed_over_after_it(setup: Setup, chunk: int) -> None:
    decoder = setup.decoder()
    whole = FsqDecoder(setup.weights, [tier.whole for tier in setup.tiers], CONTEXT)
    assert torch.allclose(decoder.prefill(TEXT[:270], chunk), whole.prefill(TEXT[:270], chunk), atol=2e-3)
    assert setup.records.blocks == {}
    decoder.step(TEXT[270])
    assert len(setup.records.blocks) == 2
    assert cache_of(decoder).blocks.start == 256


def test_a_put_under_way_leaves_its_block_at_hand(setup: Setup) -> None:
    decoder = setup.decoder()
    setup.records.late = True
    decoder.prefill(TEXT[:128])
    cache = cache_of(decoder)
    cache.blocks.hand_over(128)
    assert cache.blocks.start == 0
    cache.blocks.settle()
    assert cache.blocks.start == 0
    cache.blocks.settle()
    assert cache.blocks.start == 128


def test_a_block_that_nobody_takes_is_lost_when_the_next_is_full(setup: Setup) -> None:
    decoder = setup.decoder()
    setup.records.full = True
    decoder.prefill(TEXT[:254])
    steps(decoder, TEXT[254:256])
    blocks = cache_of(decoder).blocks
    assert (blocks.start, blocks.unrefined) == (0, 0)
    steps(decoder, TEXT[256:260])
    assert (blocks.start, blocks.unrefined, setup.records.dropped) == (128, 1, 1)
    setup.records.full = False
    steps(decoder, TEXT[260:262])
    assert (blocks.start, blocks.unrefined) == (256, 1)
    assert (blocks.bases >= 0).tolist() == [False, True]


def test_a_refused_block_stays_coarse_and_is_told(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    decoder = setup.decoder()
    setup.records.result = layout.PUT_REFUSED_SPACE
    decoder.prefill(TEXT[:260])
    decoder.step(TEXT[260])
    assert cache_of(decoder).blocks.unrefined == 2
    assert [record.getMessage() for record in caplog.records] == [
        "block 0 of codes stays coarse: refused: no space on the file system (told once)"
    ]


def test_another_attachment_loses_what_was_put_alone(setup: Setup) -> None:
    decoder = setup.decoder()
    decoder.prefill(TEXT[:250])
    decoder.step(TEXT[250])
    setup.records.reattach()
    steps(decoder, TEXT[251:260])
    blocks = cache_of(decoder).blocks
    assert blocks.unrefined == 1
    assert (blocks.bases >= 0).tolist() == [False, True]


def test_without_ids_blocks_are_lost_and_decoding_goes_on(setup: Setup) -> None:
    decoder = setup.decoder()
    decoder.prefill(TEXT[:120])
    setup.records.refuse = True
    setup.records.reattach()
    steps(decoder, TEXT[120:130])
    assert (cache_of(decoder).blocks.unrefined, setup.records.dropped) == (1, 1)


def test_going_back(setup: Setup) -> None:
    decoder = setup.decoder()
    decoder.prefill(TEXT[:135])
    first = steps(decoder, TEXT[135:150])
    with pytest.raises(MisuseError, match=r"position 100.*128 and later"):
        decoder.reset(100)
    decoder.reset(140)
    assert torch.equal(steps(decoder, TEXT[140:150]), first[5:])
    decoder.reset()
    assert len(setup.records.released) == 1
    decoder.prefill(TEXT[:135])
    assert torch.equal(steps(decoder, TEXT[135:150]), first)
    assert len(setup.records.granted) == 2


def test_recall_is_that_of_what_coarse_keys_select(setup: Setup) -> None:
    same = [FsqTiers(one.whole, one.whole, FRACTION, 4, 128) for one in setup.tiers]
    assert recall_of_tiers(setup.weights, same, TEXT) == [1.0, 1.0]
    tiers = [FsqTiers(one.coarse, one.whole, FRACTION, 4, 128) for one in setup.tiers]
    assert all(0.125 < recall < 1 for recall in recall_of_tiers(setup.weights, tiers, TEXT))


def test_groups_divide_a_block() -> None:
    with pytest.raises(MisuseError, match="3 tokens"):
        FsqBlocks([4], 3, 300, LocalRecords(4, 1, 1))
    with pytest.raises(MisuseError, match="3 tokens"):
        TierOptions(group_tokens=3)
