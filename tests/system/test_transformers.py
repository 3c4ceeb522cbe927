"""Transformers models through a real daemon: what a user does with them, with and without StrataFlux."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

from strataflux.cache_policy.miss import Wait
from strataflux.client.evaluate.compare import reference_of
from strataflux.client.evaluate.scoring import score
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import StrataFluxCache, StrataFluxConfig, attach, detach
from tests.system.test_demo import tiny_source
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

pytestmark = pytest.mark.system

TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}he: {% endif %}"""
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tiny_source().with_config(context=512)
    folder = tmp_path_factory.mktemp("m") / "checkpoint"
    write_hf(folder, source, hf_tensors(source), model_type="llama")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=source.tokenizer(), eos_token="<|end|>", pad_token="<|end|>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(checkpoint: Path) -> PreparedModel:
    return prepare(open_source(checkpoint), checkpoint.parent / "prepared", PrepareSettings())


@pytest.fixture(scope="module")
def runtime(prepared: PreparedModel) -> Iterator[Path]:
    daemon = PrivateDaemon([prepared.store], weight_cache_bytes=64 << 20, kv_cache_bytes=64 << 20, grace_seconds=60.0)
    with daemon:
        yield daemon.runtime_dir


@pytest.fixture
def tokenizer(checkpoint: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


@pytest.fixture
def model(checkpoint: Path, prepared: PreparedModel, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Attached, waiting for what is absent: what it says does not depend on how fast the daemon is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    yield attach(model, prepared.folder, runtime_dir=runtime, miss="wait:60000")
    detach(model)


def own_tokens(prepared: PreparedModel, runtime: Path, prompt: list[int], count: int) -> list[int]:
    """What the project's decoder goes on with, greedily."""
    weights, tokens = DecoderWeights.read(prepared), list[int]()
    with RefinedModel.attach(prepared, weights, context=128, runtime_dir=runtime, miss=Wait(60.0)) as own:
        logits = own.prefill(prompt)
        while len(tokens) < count:
            tokens.append(int(logits.argmax()))
            logits = own.step(tokens[-1])
    return tokens


def test_it_diverges_from_the_exact_model_as_much_as_the_decoder_does(
    model: Any, checkpoint: Path, prepared: PreparedModel, runtime: Path
) -> None:
    tokens = torch.randint(0, 250, (49,), generator=torch.Generator().manual_seed(3)).tolist()
    reference = reference_of(DecoderWeights.read(open_source(checkpoint)), tokens)
    weights = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, weights, context=64, runtime_dir=runtime, miss=Wait(60.0)) as own:
        right = score(own.step, reference)
    cache = DynamicCache(config=model.config)
    found = score(lambda token: model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, -1], reference)
    assert found.kl == pytest.approx(right.kl, rel=0.02)
    assert model.strataflux.stats().deadlines_exceeded == 0


def test_generation_gives_the_tokens_of_the_decoder(
    model: Any, prepared: PreparedModel, runtime: Path, tokenizer: Any
) -> None:
    given = tokenizer("he said that", return_tensors="pt")
    prompt = given.input_ids[0].tolist()
    generated = model.generate(**given, **GREEDY, eos_token_id=None)[0, len(prompt) :].tolist()
    assert generated == own_tokens(prepared, runtime, prompt, 12)
    assert model.strataflux.stats().lookups > 0


def test_a_padded_batch_gives_what_each_prompt_gives_alone(model: Any, tokenizer: Any) -> None:
    prompts = ["he said that", "once", "a longer one than the others, he said"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    together = model.generate(**batch, **GREEDY, eos_token_id=None)[:, batch.input_ids.shape[1] :]
    for row, prompt in enumerate(prompts):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), **GREEDY, eos_token_id=None)[0, -12:]
        assert alone.tolist() == together[row].tolist()


def test_a_pipeline_chats(model: Any, tokenizer: Any) -> None:
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "he?"}]
    (answer,) = chat(messages, max_new_tokens=8, do_sample=False)
    assert [turn["role"] for turn in answer["generated_text"]] == ["user", "assistant"]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :],
        skip_special_tokens=True,
    )
    assert answer["generated_text"][-1]["content"] == text


def test_text_streams_as_it_comes(model: Any, tokenizer: Any) -> None:
    given = tokenizer("he said that", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=model.generate, kwargs={**given, **GREEDY, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    whole = tokenizer.decode(model.generate(**given, **GREEDY)[0, given.input_ids.shape[1] :])
    assert "".join(pieces) == whole


def test_sampling_and_beams_over_a_low_bit_cache(checkpoint: Path, prepared: PreparedModel, runtime: Path) -> None:
    settings = StrataFluxConfig(prepared.folder, runtime_dir=runtime, kv="2/2", sequences=3, miss="wait:60000")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=settings)
    prompt = torch.randint(0, 250, (1, 300), generator=torch.Generator().manual_seed(5))
    free = model.strataflux.pool.blocks.free
    beams = model.generate(prompt, max_new_tokens=6, num_beams=3, do_sample=False)
    torch.manual_seed(1)
    sampled = model.generate(prompt, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert beams.shape[0] == 1
    assert sampled.shape[0] == 3
    stats = model.strataflux.stats()
    assert (stats.steps_invalid, stats.deadlines_exceeded, stats.puts_dropped) == (0, 0, 0)
    assert stats.kv_lookups > 0
    assert model.strataflux.pool.blocks.free == free
    detach(model)


def test_a_conversation_goes_on_in_one_low_bit_cache(checkpoint: Path, prepared: PreparedModel, runtime: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    attach(model, prepared.folder, runtime_dir=runtime, kv="4/4", miss="wait:60000")
    generator = torch.Generator().manual_seed(6)
    first, second = (torch.randint(0, 250, (1, count), generator=generator) for count in (40, 9))
    cache = StrataFluxCache(model)
    said = model.generate(first, **GREEDY, eos_token_id=None, cache=cache)
    assert cache.get_seq_length() == 40 + 11
    both = torch.cat((said, second), 1)
    answer = model.generate(both, **GREEDY, eos_token_id=None, cache=cache)
    assert answer.shape == (1, 40 + 12 + 9 + 12)
    assert torch.equal(answer[:, : both.shape[1]], both)
    assert cache.get_seq_length() == answer.shape[1] - 1
    detach(model)


def test_generation_goes_on_when_the_daemon_is_gone(checkpoint: Path, prepared: PreparedModel, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    given = tokenizer("he said that", return_tensors="pt")
    with PrivateDaemon([prepared.store], weight_cache_bytes=64 << 20, grace_seconds=60.0) as daemon:
        attach(model, prepared.folder, runtime_dir=daemon.runtime_dir, miss="wait:60000")
        refined = model.generate(**given, **GREEDY, eos_token_id=None)
        os.kill(daemon.pid, signal.SIGKILL)
        # All that this text needs was waited for, and stays where it is.
        assert torch.equal(model.generate(**given, **GREEDY, eos_token_id=None), refined)
        other = model.generate(**tokenizer("once upon", return_tensors="pt"), **GREEDY, eos_token_id=None)
    assert other.shape[1] == 9 + 12
    detach(model)
