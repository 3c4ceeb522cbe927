"""Codes in two tiers through a real daemon: waiting for records gives what a daemon that held everything would give."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.evaluate.fsq_run import evaluate_tiers
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.fsq_refined import TieredModel, TierOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq_nested import FsqTier
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

OPTIONS = TierOptions(Fraction(1, 16), 4)
CONTEXT = 300


@pytest.fixture(scope="module")
def made() -> tuple[DecoderWeights, list[FsqTier], Reference]:
    source = tiny_source()
    weights = DecoderWeights.read(source)
    random = torch.Generator().manual_seed(5)
    given = torch.randint(0, 250, (48, 60), generator=random)
    codes = [one.layer for one in convert(InMemory(weights), given, FsqSettings(32, 0, "clamp"), given.device)]
    tiers = divide_codes(InMemory(weights), codes, given, 12, given.device)
    tokens = torch.randint(0, 250, (CONTEXT + 1,), generator=random).tolist()
    return weights, tiers, dense_reference(weights, tokens)


@pytest.fixture
def runtime(made: tuple[DecoderWeights, list[FsqTier], Reference]) -> Iterator[Path]:
    daemon = PrivateDaemon(
        [], weight_cache_bytes=0, kv_cache_bytes=OPTIONS.daemon_bytes(made[1], 1), grace_seconds=60.0
    )
    with daemon:
        yield daemon.runtime_dir


@pytest.mark.parametrize("miss", [Wait(60.0), Skip()], ids=str)
def test_waiting_is_as_good_as_a_daemon_that_holds_everything(
    made: tuple[DecoderWeights, list[FsqTier], Reference], runtime: Path, miss: MissPolicy
) -> None:
    weights, tiers, reference = made
    found = evaluate_tiers(weights, tiers, [reference], OPTIONS, runtime, miss=miss, on_token=lambda: None)
    right = evaluate_tiers(weights, tiers, [reference], OPTIONS, None, miss=miss, on_token=lambda: None)
    assert found.whole.kl < right.refined.kl < found.coarse.kl
    assert found.bytes_resident == CONTEXT * sum(tier.grid.resident.nbytes for tier in tiers)
    assert found.counts is not None
    assert (found.counts.session.steps_invalid, found.counts.session.puts_dropped) == (0, 0)
    assert found.counts.blocks_unrefined == 0
    assert found.counts.lookups > 0
    if isinstance(miss, Wait):
        assert found.refined.kl == pytest.approx(right.refined.kl, rel=0.01)
    else:
        assert found.whole.kl < found.refined.kl < found.coarse.kl


def test_steps_after_a_prompt_read_what_it_handed_over(
    made: tuple[DecoderWeights, list[FsqTier], Reference], runtime: Path
) -> None:
    weights, tiers, reference = made
    options = TierOptions(Fraction(1), OPTIONS.group_tokens)
    tokens = reference.tokens[:-1]
    expected = fsq_logits(weights, [tier.whole for tier in tiers], tokens)[270:]
    with TieredModel.attach(weights, tiers, options, context=CONTEXT, runtime_dir=runtime, miss=Wait(60.0)) as model:
        for _ in range(2):
            model.prefill(tokens[:270])
            found = torch.stack([model.step(token) for token in tokens[270:280]])
            assert torch.isclose(found, expected[:10], atol=5e-3, rtol=5e-3).all(-1).float().mean() > 0.7
            assert model.cache.statistics().lookups > 0
            model.reset()
        assert model.stats().steps_invalid == 0
