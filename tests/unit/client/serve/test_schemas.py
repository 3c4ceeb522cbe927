"""Request bodies: what is taken, and what is refused by the name of its field."""

from typing import Any

import pytest

from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.schemas import Message, read_chat_request, read_completion_request

BASE = {"model": "m", "prompt": "text"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_defaults_are_those_of_openai() -> None:
    asked = read_completion_request(BASE)
    settings = asked.settings
    assert (asked.prompt, settings.model, settings.max_tokens, settings.stop) == ("text", "m", None, ())
    assert (settings.sampling.temperature, settings.sampling.top_p, settings.stream) == (1.0, 1.0, False)
    assert settings.sampling.seed != read_completion_request(BASE).settings.sampling.seed


def test_every_field_is_read() -> None:
    more = {"max_tokens": 5, "temperature": 0, "top_p": 0, "seed": -7, "stop": ["a", "bc"], "stream": True}
    settings = read_completion_request(BASE | more | {"stream_options": {"include_usage": True}}).settings
    assert (settings.max_tokens, settings.stop, settings.stream, settings.include_usage) == (5, ("a", "bc"), True, True)
    assert (settings.sampling.temperature, settings.sampling.seed) == (0.0, -7)
    assert 0 < settings.sampling.top_p < 1e-6
    assert read_completion_request(BASE | {"stop": "end"}).settings.stop == ("end",)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_a_prompt_is_text_or_tokens(prompt: object, expected: object) -> None:
    assert read_completion_request(BASE | {"prompt": prompt}).prompt == expected


def test_chat_messages_and_their_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = CHAT | {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "x"}]}
    asked = read_chat_request(body | {"max_completion_tokens": 4, "max_tokens": 9})
    assert asked.messages == (Message("system", "s"), Message("user", "ab"))
    assert asked.settings.max_tokens == 4


def test_what_has_no_effect_or_is_off_passes() -> None:
    off: dict[str, Any] = {"n": 1, "logprobs": False, "frequency_penalty": 0.0, "tools": [], "logit_bias": {}}
    read_chat_request(CHAT | off | {"user": "me", "response_format": {"type": "text"}, "suffix": None})


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"prompt": "half a pair: \ud83d"}, "prompt"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"invented": 1}, "invented"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_completion_request(BASE | change)
    assert (refused.value.status, refused.value.parameter) == (400, parameter)
    error = refused.value.to_json()["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["param"]) == ("invalid_request_error", parameter)


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content"),
        ([{"role": "\udc00", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: object, parameter: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_chat_request(CHAT | {"messages": messages})
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(RequestError, match="a JSON object"):
        read_completion_request(body)
