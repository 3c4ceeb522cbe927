"""The low-bit cache in the library's terms: the decoder's numbers, padding, beams, going on, and running out."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, PreTrainedModel, StaticCache

from strataflux.client.errors import MisuseError, RefusedError
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import StrataFluxCache, detach
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.transformers.conftest import Load, connect, step_logits, tokens

PROMPT = 300
"""Tokens: the first 128 and the last 44 are exact, a tile of 128 is in low bits."""
SETTLE_SECONDS = 60.0
"""A watchdog: the fake daemon takes puts in a thread of its own."""
NEAR: dict[str, Any] = {"rtol": 0.0, "atol": 5e-3}
"""A key that is rounded the other way moves logits of about 3 by so much."""


@pytest.fixture
def model(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> PreTrainedModel:
    return connect(load, prepared, resident, kv="2/2", context=512, sequences=4)


def decoded(prepared: PreparedModel, daemon: FakeDaemon, ids: Tensor) -> Tensor:
    """Logits of the project's decoder for the tokens from ``PROMPT`` on."""
    weights, options = DecoderWeights.read(prepared), KvOptions(2, 2)
    runtime = daemon.path.parent
    with RefinedModel.attach(prepared, weights, context=512, runtime_dir=runtime, kv=options) as own:
        own.prefill(ids[0, :PROMPT].tolist())
        assert own.kv is not None
        own.kv._blocks.settle(SETTLE_SECONDS)
        return torch.stack([own.step(token) for token in ids[0, PROMPT:].tolist()])[None]


def start(model: Any, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **options).cache


def test_steps_are_those_of_the_decoder(model: Any, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(PROMPT + 8)
    cache = start(model, ids[:, :PROMPT])
    assert isinstance(cache, StrataFluxCache)
    model.strataflux.pool.blocks.settle(SETTLE_SECONDS)
    logits = step_logits(model, ids[:, PROMPT:], cache)
    assert model.strataflux.stats().kv_lookups > 0
    torch.testing.assert_close(logits, decoded(prepared, resident, ids), **NEAR)
    assert (cache.get_seq_length(), cache.get_max_length(), cache.batch_size) == (PROMPT + 8, 512, 1)


def test_padding_on_the_left_changes_nothing(model: Any) -> None:
    ids, short = tokens(PROMPT + 3), 170
    own = [step_logits(model, ids[:, PROMPT:], start(model, part)) for part in (ids[:, :PROMPT], ids[:, :short])]
    padded = torch.cat((torch.zeros(1, PROMPT - short, dtype=torch.int64), ids[:, :short]), 1)
    mask = torch.ones(2, PROMPT + 3, dtype=torch.int64)
    mask[1, : PROMPT - short] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    batch = torch.cat((ids[:, :PROMPT], padded))
    cache = start(model, batch, attention_mask=mask[:, :PROMPT], position_ids=places[:, :PROMPT])
    for at in range(3):
        now = PROMPT + at
        outputs = model(
            input_ids=ids[:, now : now + 1].expand(2, 1),
            attention_mask=mask[:, : now + 1],
            position_ids=places[:, now : now + 1],
            cache=cache,
        )
        for row in range(2):
            torch.testing.assert_close(outputs.logits[row, 0], own[row][0, at], **NEAR)


def test_several_tokens_after_others_are_as_one_by_one(model: Any) -> None:
    ids = tokens(PROMPT + 5)
    singly = step_logits(model, ids[:, PROMPT:], start(model, ids[:, :PROMPT]))
    cache = start(model, ids[:, :PROMPT])
    at_once = model(input_ids=ids[:, PROMPT:], attention_mask=torch.ones(1, PROMPT + 5), cache=cache)
    torch.testing.assert_close(at_once.logits, singly, **NEAR)
    assert cache.get_seq_length() == PROMPT + 5
    cache.crop(-2)
    (last,) = model(input_ids=ids[:, PROMPT + 3 :], cache=cache, logits_to_keep=1, return_dict=False)[:1]
    torch.testing.assert_close(last, singly[:, -1:], **NEAR)
    cache.crop(-2)
    wanted = torch.tensor([0])
    (first,) = model(input_ids=ids[:, PROMPT + 3 :], cache=cache, logits_to_keep=wanted, return_dict=False)[:1]
    torch.testing.assert_close(first, singly[:, -2:-1], **NEAR)
    with pytest.raises(MisuseError, match="labels for 2 tokens"):
        model(input_ids=ids[:, :2], labels=ids[:, :2], cache=cache)


def test_reordered_beams_go_on_with_what_they_were(model: Any) -> None:
    ids = tokens(PROMPT, batch=3)
    cache, following = start(model, ids), tokens(2, batch=3, seed=1)
    first = step_logits(model, following[:, :1], cache)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    moved = step_logits(model, following[[2, 0, 2], 1:], cache)
    expected = step_logits(model, following, start_fresh(model, cache, ids))
    torch.testing.assert_close(first, expected[:, :1], **NEAR)
    torch.testing.assert_close(moved[:, 0], expected[[2, 0, 2], 1], **NEAR)


def start_fresh(model: Any, cache: StrataFluxCache, ids: Tensor) -> StrataFluxCache:
    """The blocks of ``cache`` are needed for another."""
    cache.reset()
    return start(model, ids)  # type: ignore[no-any-return]


def test_repeated_and_selected_sequences(model: Any) -> None:
    ids = tokens(PROMPT, batch=2)
    cache = start(model, ids)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    token = tokens(1, seed=2).expand(4, 1)
    logits = step_logits(model, token, cache)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[1], logits[2])
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.batch_size == 1
    assert torch.isfinite(step_logits(model, token[:1], cache)).all()


def test_blocks_are_free_when_a_cache_is_dropped(model: Any) -> None:
    free = model.strataflux.pool.blocks.free
    for _ in range(3):
        cache = start(model, tokens(PROMPT, batch=4))
        assert model.strataflux.pool.blocks.free == 0
        del cache
        assert model.strataflux.pool.blocks.free == free


def test_more_than_there_is_room_for_is_refused(model: Any) -> None:
    kept = start(model, tokens(PROMPT, batch=3))
    with pytest.raises(MisuseError, match="2 more sequences of 512 tokens; expected at most 1"):
        start(model, tokens(4, batch=2))
    with pytest.raises(MisuseError, match="a batch of 2; expected 3, as before"):
        step_logits(model, tokens(1, batch=2), kept)


def test_blocks_are_free_again_when_there_is_no_room_for_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = model.strataflux.pool
    free, take = pool.blocks.free, pool.blocks.take
    left = iter([True, True])

    def refuse_the_third(count: int, *, refined: bool = False) -> list[int]:
        if not next(left, False):
            raise RefusedError("kv_reserve", "3", "2", "ask for less")
        return take(count, refined=refined)  # type: ignore[no-any-return]

    monkeypatch.setattr(pool.blocks, "take", refuse_the_third)
    with pytest.raises(RefusedError):
        start(model, tokens(4, batch=3))
    assert pool.blocks.free == free
    monkeypatch.setattr(pool.blocks, "take", take)
    cache = start(model, tokens(PROMPT, batch=4))
    with pytest.raises(MisuseError, match="KV sequence"):
        cache.reorder_cache(torch.tensor([0, 1, 2, 3, 3]))
    assert (pool.blocks.free, cache.get_seq_length()) == (free, 0)


def test_a_full_cache_is_said_before_anything_changes(
    load: Load, prepared: PreparedModel, resident: FakeDaemon
) -> None:
    model = connect(load, prepared, resident, kv="2/2", context=6)
    cache = start(model, tokens(5))
    step_logits(model, tokens(1), cache)
    for _ in range(2):
        with pytest.raises(ContextFull, match="token 7; expected at most 6"):
            step_logits(model, tokens(1), cache)
    assert cache.get_seq_length() == 6


def test_an_exact_cache_stays_one(model: Any) -> None:
    ids = tokens(20)
    exact = DynamicCache(config=model.config)
    start(model, ids[:, :-1], cache=exact)
    logits = step_logits(model, ids[:, -1:], exact)
    assert exact.get_seq_length() == 20
    assert model.strataflux.stats().kv_lookups == 0
    assert torch.isfinite(logits).all()


def test_a_cache_that_cannot_go_back_is_not_refined_and_that_is_said_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    windows = StaticCache(config=MistralConfig(num_hidden_layers=2, sliding_window=8), max_cache_len=64)
    step_logits(model, tokens(4), windows)
    recording = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=8))
    recording.activate_past_recording()  # somebody else is going to take tokens back
    step_logits(model, tokens(4), recording)
    assert model.strataflux.stats().lookups == 0
    assert [record.message for record in caplog.records if record.message.startswith("not refined")] == [
        "not refined: a StaticCache, out of which no step can be taken back (told once)"
    ]


def test_another_attention_beside_the_cache_is_refused(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    with pytest.raises(MisuseError, match="another attention function"):
        start(model, tokens(4))


def test_a_cache_needs_an_attached_model(model: Any) -> None:
    with pytest.raises(MisuseError, match="a model without one in low bits"):
        StrataFluxCache(detach(model))
