"""What clients may ask for: OpenAI's request bodies, checked field by field.

A field that would change the answer and is not supported is refused, never ignored. Fields without an effect on the
answer pass, and so do unsupported ones at the value that means "off".
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strataflux.client.runtime.generation import Sampling
from strataflux.client.serve.errors import RequestError

__all__ = ["ChatRequest", "CompletionRequest", "Message", "Settings", "read_chat_request", "read_completion_request"]

_MOST_STOPS: Final = 4
_LONGEST_STOP: Final = 256
_MOST_MESSAGES: Final = 4096
_LEAST_TOP_P: Final = 1e-9
"""What 0 means: the most probable token alone."""
_SEEDS: Final = (-(1 << 63), (1 << 63) - 1)

_WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_ONLY_OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True)
class Settings:
    """What both kinds of request have."""

    model: str
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    """Of a stream: end with a chunk that counts tokens."""


@dataclass(frozen=True)
class CompletionRequest:
    """``POST /v1/completions``. A prompt is text, or tokens."""

    settings: Settings
    prompt: str | tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatRequest:
    """``POST /v1/chat/completions``."""

    settings: Settings
    messages: tuple[Message, ...]


def read_completion_request(body: object) -> CompletionRequest:
    """The request in a parsed body.

    Raises:
        RequestError: naming the first field that is wrong.
    """
    fields = _Fields(body)
    prompt = _prompt(fields.take("prompt"))
    settings = _settings(fields, ("max_tokens",))
    fields.finish()
    return CompletionRequest(settings, prompt)


def read_chat_request(body: object) -> ChatRequest:
    """As :func:`read_completion_request`."""
    fields = _Fields(body)
    found = fields.take("messages")
    if not isinstance(found, list) or not 0 < len(found) <= _MOST_MESSAGES:
        raise _wrong("messages", found, f"a list of 1 to {_MOST_MESSAGES} messages")
    messages = tuple(_message(number, value) for number, value in enumerate(found))
    settings = _settings(fields, ("max_completion_tokens", "max_tokens"))
    fields.finish()
    return ChatRequest(settings, messages)


def _settings(fields: "_Fields", limits: tuple[str, ...]) -> Settings:
    model = fields.take("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", model, "the name of a model (see GET /v1/models)")
    given = [fields.integer(name, None, 1, 1 << 40) for name in limits]
    seed = fields.integer("seed", None, *_SEEDS)
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=max(fields.number("top_p", 1.0, 0.0, 1.0), _LEAST_TOP_P),
        seed=secrets.randbits(62) if seed is None else seed,
    )
    stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise _wrong("stream_options", options, 'an object, together with "stream": true')
    usage = (options or {}).get("include_usage", False)
    if not isinstance(usage, bool):
        raise _wrong("stream_options.include_usage", usage, "true or false")
    return Settings(model, next((n for n in given if n), None), sampling, _stops(fields.take("stop")), stream, usage)


def _prompt(found: object) -> str | tuple[int, ...]:
    """Text, or tokens; either may stand alone in a list."""
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]
    if isinstance(found, str):
        return _text("prompt", found)
    if isinstance(found, list) and found and all(type(token) is int and token >= 0 for token in found):
        return tuple(found)
    raise _wrong("prompt", found, "one text, or one list of tokens")


def _message(number: int, value: object) -> Message:
    name = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _wrong(name, value, "an object with role and content")
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{at}]", part) for at, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", content, "text")
    for key in value.keys() - {"role", "content", "name"}:
        if value[key]:
            raise _wrong(f"{name}.{key}", value[key], "only role and content")
    return Message(_text(f"{name}.role", value["role"]), _text(f"{name}.content", content))


def _text(name: str, found: str) -> str:
    """``found``, which JSON may have made of half a surrogate pair: that is no text, and no tokenizer takes it."""
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, found[error.start : error.end], "text that UTF-8 can hold") from error
    return found


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _wrong(name, part, 'parts of type "text" only')
    return str(part["text"])


def _stops(found: object) -> tuple[str, ...]:
    stops = [found] if isinstance(found, str) else [] if found is None else found
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops)
    ):
        raise _wrong("stop", found, f"up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters")
    return tuple(stops)


class _Fields:
    """A body whose fields are taken one by one; what is left at the end must be harmless."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise _wrong("body", body, "a JSON object")
        self._left: dict[str, Any] = dict(body)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise _wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise _wrong(name, value, "true or false")
        return bool(value)

    def finish(self) -> None:
        """Refuse what is left."""
        for name, value in self._left.items():
            if name in _WITHOUT_EFFECT or value is None:
                continue
            if name not in _ONLY_OFF:
                raise _wrong(name, value, "no such field", remedy="leave it out")
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in _ONLY_OFF[name]):
                raise _wrong(name, value, f"{_ONLY_OFF[name][0]!r}: nothing else is supported", remedy="leave it out")


def _wrong(name: str, found: object, expected: str, *, remedy: str = "change the request") -> RequestError:
    shown = repr(found)
    return RequestError(name, shown if len(shown) <= 80 else f"{shown[:77]}...", expected, remedy, parameter=name)
