"""Tokenizers built from GGUF metadata."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strataflux.client.errors import InputError
from strataflux.client.prepare.tokenizer import tokenizer_from_gguf


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tiny_source: Any, text: str) -> None:
    tokenizer = tiny_source.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_merges_apply(tiny_source: Any) -> None:
    assert tiny_source.tokenizer().encode("he 42").tokens == ["he", "Ġ", "4", "2"]


def test_qwen_composes_letters_and_takes_digits_one_by_one(tiny_source: Any) -> None:
    qwen = tokenizer_from_gguf("m", tiny_source.tokenizer_metadata() | {"tokenizer.ggml.pre": "qwen2"})
    assert qwen.encode("he 42").tokens == ["he", "Ġ", "4", "2"]
    assert qwen.encode("e\u0301").ids == qwen.encode("\u00e9").ids


def test_control_tokens_are_one_token_and_leave_the_text(tiny_source: Any) -> None:
    tokenizer = tiny_source.tokenizer()
    encoded = tokenizer.encode("a<|end|>")
    assert encoded.tokens == ["a", "<|end|>"]
    assert tokenizer.decode(encoded.ids) == "a"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_a_first_token_is_added_only_where_the_file_says_so(tiny_source: Any, pre: str) -> None:
    metadata = tiny_source.tokenizer_metadata() | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 257}
    del metadata["tokenizer.ggml.add_bos_token"]
    first = tokenizer_from_gguf("m", metadata).encode("a").tokens[0]
    assert first == ("<|end|>" if pre == "llama-bpe" else "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
        ({"tokenizer.ggml.tokens": []}, "no tokens"),
    ],
)
def test_unknown_kinds_are_refused(tiny_source: Any, change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tokenizer_from_gguf("m", tiny_source.tokenizer_metadata() | change)
