"""A low-bit KV cache through a real daemon: waiting for records gives what a cache that held everything would give."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.evaluate.kv import DenseKv, prefill, score_exact, score_low_bit
from strataflux.client.evaluate.scoring import score
from strataflux.client.kv_options import KvOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

OPTIONS = KvOptions(2, 2, 4, 4, 4, Fraction(1, 8))
PREFILLED, CONTEXT = 500, 560


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare(tiny_source(), tmp_path_factory.mktemp("m") / "prepared", PrepareSettings())


@pytest.fixture
def runtime(prepared: PreparedModel) -> Iterator[Path]:
    # Four pages of slots for three blocks of 16 KiB each: smaller than the records, so that some are read again.
    wanted = OPTIONS.daemon_bytes(prepared.config, 1)
    daemon = PrivateDaemon([prepared.store], weight_cache_bytes=0, kv_cache_bytes=wanted, grace_seconds=60.0)
    with daemon:
        yield daemon.runtime_dir


@pytest.mark.parametrize(
    ("miss", "kept_steps"), [(Wait(60.0), 0), (Skip(), 0), (Wait(60.0), 2), (Skip(), 2)], ids=str
)  # kept_steps other than 0: so many steps before select
def test_waiting_is_as_good_as_a_cache_that_holds_everything(
    prepared: PreparedModel, runtime: Path, miss: MissPolicy, kept_steps: int
) -> None:
    weights = DecoderWeights.read(prepared)
    tokens = torch.randint(0, 250, (CONTEXT + 1,), generator=torch.Generator().manual_seed(5)).tolist()
    prefilled = prefill(weights, tokens[:PREFILLED])
    reference = score_exact(weights, prefilled, tokens[PREFILLED:])
    dense = DenseKv(weights, prefilled, OPTIONS.form(prepared.config.head_dim))
    base = score_low_bit(dense, reference, Fraction(0), 4)
    right = score_low_bit(dense, reference, OPTIONS.fraction, 4, kept_steps)
    assert right.kl < 0.9 * base.kl
    kv = replace(OPTIONS, select_lag=1, kept_steps=kept_steps) if kept_steps else OPTIONS
    options: Any = {"context": CONTEXT, "runtime_dir": runtime, "k": 0, "miss": miss, "kv": kv}
    with RefinedModel.attach(prepared, weights, **options) as model:
        model.prefill(tokens[:PREFILLED])
        found = score(model.step, reference)
        stats = model.stats()
    assert (stats.steps_invalid, stats.deadlines_exceeded, stats.puts_dropped) == (0, 0, 0)
    assert stats.kv_lookups > 0
    assert (stats.kv_prefetches.asked > 0) == (kept_steps > 0)
    assert found.kl < base.kl
    if isinstance(miss, Wait):
        assert found.kl == pytest.approx(right.kl, rel=0.01)
