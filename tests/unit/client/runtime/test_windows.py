"""Layers that attend to a window: as Transformers has them, in every way that this runtime has of running a text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.block import attend_newest
from strataflux.client.runtime.cache import ExactCache, ExactLayer, require_all_seen
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights, ModelConfig, ModelConfigError

WINDOW, LENGTH = 7, 40
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "ministral": {"layer_types": MIXED},
    "qwen2": {"use_sliding_window": True, "layer_types": MIXED},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
}


def read_saved(folder: Path, kind: str) -> tuple[Any, DecoderWeights]:
    """A random model of Transformers, and the same as this package reads it."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SHAPE, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model, DecoderWeights.read(open_source(folder))


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 90, (LENGTH,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, text: Tensor) -> None:
    model, weights = read_saved(tmp_path, kind)
    with torch.inference_mode():
        expected = model(text[None]).logits[0]
    tokens = text.tolist()
    torch.testing.assert_close(forward_text(weights, tokens), expected, atol=1e-5, rtol=1e-4)
    stepped, prompted = Decoder(weights, LENGTH), Decoder(weights, LENGTH)
    torch.testing.assert_close(torch.stack([stepped.step(token) for token in tokens]), expected, atol=1e-5, rtol=1e-4)
    # A prompt longer than the window, and steps whose windows begin within it.
    after = [prompted.prefill(tokens[:21]), *(prompted.step(token) for token in tokens[21:])]
    torch.testing.assert_close(torch.stack(after), expected[20:], atol=1e-5, rtol=1e-4)
    # That the window matters here: without it the same text ends otherwise.
    whole = replace(weights, layers=[replace(layer, window=0) for layer in weights.layers])
    assert float((forward_text(whole, tokens)[-1] - expected[-1]).abs().max()) > 1e-3


@pytest.mark.parametrize(("context", "rows"), [(40, WINDOW), (5, 5)])
def test_a_layer_with_a_window_holds_no_more_than_that(tiny_source: Any, context: int, rows: int) -> None:
    config = tiny_source.with_config(windows=(0, WINDOW)).config
    a_position = 2 * config.kv_heads * config.head_dim * 4
    assert ExactCache(config, context).nbytes == (context + rows) * a_position


def test_a_step_is_taken_back_while_its_window_is_held(tiny_source: Any) -> None:
    source = tiny_source.with_config(windows=(0, WINDOW))
    weights = DecoderWeights.read(source)
    decoder = Decoder(weights, 40)
    tokens = [7 * n % source.config.vocabulary for n in range(20)]
    expected = [decoder.step(token) for token in tokens[: WINDOW + 3]]
    decoder.reset(WINDOW + 2)
    assert torch.equal(decoder.step(tokens[WINDOW + 2]), expected[-1])
    with pytest.raises(MisuseError, match=r"position 8, which attends to 2 .* 0, or 9 and on: 3 is held"):
        decoder.reset(WINDOW + 1)
    assert decoder.position == WINDOW + 3  # refused, and nothing changed
    decoder.reset()
    for position in (2, 4):
        for token in tokens[decoder.position : 6]:
            decoder.step(token)
        decoder.reset(position)  # no row was taken twice yet
        assert torch.equal(decoder.step(tokens[position]), expected[position])


def test_going_back_twice_does_not_forget_what_was_overwritten(tiny_source: Any) -> None:
    config = tiny_source.config
    layer = ExactLayer(config, 40, WINDOW)
    heads = torch.zeros(config.kv_heads, WINDOW + 1, config.head_dim)
    layer.fill(0, heads, heads)
    layer.truncate(WINDOW)  # position 0 is gone all the same
    with pytest.raises(MisuseError, match="1 is held"):
        layer.truncate(WINDOW - 1)
    layer.truncate(0)
    layer.fill(0, heads[:, :3], heads[:, :3])
    layer.truncate(1)


def test_what_keeps_no_windows_takes_contexts_within_them(tiny_source: Any) -> None:
    config = tiny_source.with_config(windows=(24, 16)).config
    require_all_seen(config, 16, "--kv 2/2")
    require_all_seen(tiny_source.config, 1 << 20, "--kv 2/2")
    with pytest.raises(
        MisuseError, match=r"--kv 2/2: found layer 1, which attends to 16 positions; expected .* all 17"
    ):
        require_all_seen(config, 17, "--kv 2/2")


def test_configurations_with_windows_survive_json(tiny_source: Any) -> None:
    config = tiny_source.with_config(windows=(0, 9)).config
    assert ModelConfig.from_json(config.to_json()) == config
    assert (config.sliding, config.window(0), config.window(1)) == ((1,), 0, 9)
    assert "windows" not in tiny_source.config.to_json()
    assert ModelConfig.from_json(tiny_source.config.to_json()).window(1) == 0
    for wrong in ((1,), (0, 0), (4, -1)):
        with pytest.raises(ModelConfigError, match="windows"):
            tiny_source.with_config(windows=wrong)


@settings(deadline=None)
@given(
    window=st.integers(1, 6),
    words=st.lists(st.tuples(st.sampled_from(["step", "chunk", "back"]), st.integers(1, 9)), max_size=12),
)
def test_a_layer_sees_what_the_whole_history_says(window: int, words: list[tuple[str, int]]) -> None:
    config = ModelConfig(9, 8, 8, 1, 4, 2, 4, 200, 1e4, 1e-5, True)
    layer, random = ExactLayer(config, 200, window), torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(heads, 200, 4, generator=random) for heads in (4, 2, 2))
    whole = attend_newest(queries[None], keys[None], values[None], window)[0]
    held, advanced = 0, False
    for word, count in words:
        new = slice(held, held + (1 if word == "step" else count))
        if word == "step":
            found = layer.attend(held, queries[:, held], keys[:, held], values[:, held])
            torch.testing.assert_close(found.view(4, 4), whole[:, held])
        elif word == "chunk":
            mixed = layer.extend(held, *(part[None, :, new] for part in (queries, keys, values)))
            torch.testing.assert_close(mixed[0], whole[:, new])
        else:
            new = slice(0, max(0, held - count))
            try:
                layer.truncate(new.stop)
            except MisuseError:
                assert count > 1 or not advanced  # the newest step can be taken back
                continue
        held, advanced = new.stop, word != "back"
