"""Training of codes in two tiers: both get better and stay nested, and what is whole follows attention."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.fsq_tune import TuneSettings
from strataflux.client.prepare.fsq_tune_model import FrozenModel
from strataflux.client.prepare.fsq_tune_text import random_sequences
from strataflux.client.prepare.fsq_tune_tiers import TierTuning, draw_whole
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq_nested import FsqTier

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tiers(tiny_source: Any) -> list[FsqTier]:
    codes = [one.layer for one in convert(tiny_source, TOKENS, FsqSettings(6, 0, "clamp"), CPU)]
    return divide_codes(tiny_source, codes, TOKENS, 3, CPU)


def test_training_helps_both_tiers_and_leaves_them_nested(tiny_source: Any, tiers: list[FsqTier]) -> None:
    weights = DecoderWeights.read(tiny_source)
    tuning = TierTuning(weights, tiers, TuneSettings(steps=30, rate=2e-3, check_every=5), held_out=[TOKENS[:4]])
    tuning.run(random_sequences(TOKENS[4:].flatten(), 4, 32, seed=0))
    trained = tuning.result()
    assert tuning.held_out_loss < tuning.held_out_before

    def kl(made: list[Any]) -> float:
        references = [dense_reference(weights, row.tolist()) for row in TOKENS[:4]]
        return sum(score_logits(fsq_logits(weights, made, one.tokens[:-1]), one).kl for one in references)

    assert kl([one.coarse for one in trained]) < kl([one.coarse for one in tiers])
    assert kl([one.whole for one in trained]) < 1.05 * kl([one.whole for one in tiers])
    x = torch.randn(50, weights.config.hidden, generator=torch.Generator().manual_seed(2))
    for before, after in zip(tiers, trained, strict=True):
        assert after.grid == before.grid
        assert torch.equal(after.grid.split(after.whole.encode(x))[0], after.coarse.encode(x))


@pytest.mark.parametrize("recompute", [True, False])
def test_an_interrupted_run_ends_where_a_whole_one_does(
    tiny_source: Any, tiers: list[FsqTier], tmp_path: Path, *, recompute: bool
) -> None:
    weights, settings = DecoderWeights.read(tiny_source), TuneSettings(steps=6, recompute=recompute)
    text, state = TOKENS.flatten(), tmp_path / "state"
    whole = TierTuning(weights, tiers, TuneSettings(steps=6))
    whole.run(random_sequences(text, 4, 32, seed=0))
    TierTuning(weights, tiers, settings, state).run(islice(random_sequences(text, 4, 32, seed=0), 2))
    second = TierTuning(weights, tiers, settings, state)
    second.run(random_sequences(text, 4, 32, seed=0, first=2))
    for one, other in zip(whole.result(), second.result(), strict=True):
        assert torch.allclose(one.whole.encoder, other.whole.encoder, atol=1e-6)
        assert torch.allclose(one.coarse_decoder, other.coarse_decoder, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_positions_attend_to_is_the_largest_share_of_any_head(tiny_source: Any, architecture: str) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(architecture=architecture))
    config, model, seen = weights.config, FrozenModel(weights), []

    def replaced(index: int, x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        kv = x @ weights.layers[index].projections["qkv"][queries.shape[-1] :].T
        if index == 0:
            seen.append(model.attended(0, queries, kv, torch.tensor([0, 30, 59])))
            seen.append(model.attended(0, queries, kv, torch.tensor([0])))
        return kv

    model.states(TOKENS[:2], replaced)
    three, first = seen
    assert torch.allclose(first, torch.eye(60)[0].expand(2, 60))
    assert (three[:, 31:] > 0).all()
    # Each position's shares are 1 a head; the largest of any head sum to no more than there are heads.
    assert (three.sum(1) > 3 - 1e-3).all()
    assert (three.sum(1) < 1 + 2 * config.heads).all()


def test_a_draw_has_its_shares_and_follows_attention() -> None:
    random = torch.Generator().manual_seed(3)
    attended = torch.ones(3, 40)
    attended[:, 7] = 200
    chosen = draw_whole(attended, torch.tensor([1 / 32, 0.5, 1.0]), random)
    assert chosen.sum(1).tolist() == [math.ceil(40 / 32), 20, 40]
    draws = torch.stack([draw_whole(attended[:1], torch.tensor([1 / 40]), random)[0] for _ in range(300)])
    assert float(draws[:, 7].float().mean()) == pytest.approx(200 / 239, abs=0.1)
