"""Answers in OpenAI's shapes: whole objects and the chunks of a stream."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from strataflux.client.serve.engine import Finished

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer"]

_Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the objects and chunks of one answer have in common; a subclass for each endpoint."""

    model: str
    fingerprint: str
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    kind = chunk_kind = prefix = ""

    def whole(self, text: str, end: Finished) -> _Json:
        """The answer in one object."""
        choice = self._choice(self._content(text), end.reason)
        return self._object(self.kind, [choice]) | {"usage": self._usage(end), "strataflux": _refinement(end)}

    def first(self) -> list[_Json]:
        """Chunks before any text."""
        return []

    def piece(self, text: str) -> _Json:
        """A chunk with more text."""
        return self._object(self.chunk_kind, [self._choice(self._delta(text), None)])

    def last(self, end: Finished, *, include_usage: bool) -> list[_Json]:
        """The chunks that end a stream."""
        chunk = self._object(self.chunk_kind, [self._choice(self._delta(""), end.reason)])
        chunks = [chunk | {"strataflux": _refinement(end)}]
        if include_usage:
            chunks.append(self._object(self.chunk_kind, []) | {"usage": self._usage(end)})
        return chunks

    def _content(self, text: str) -> _Json:
        return {"text": text}

    def _delta(self, text: str) -> _Json:
        return {"text": text}

    def _choice(self, content: _Json, reason: str | None) -> _Json:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _object(self, kind: str, choices: list[_Json]) -> _Json:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _usage(self, end: Finished) -> _Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": end.tokens,
            "total_tokens": self.prompt_tokens + end.tokens,
        }


class CompletionAnswer(Answer):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self) -> list[_Json]:
        """Whose turn it is."""
        return [self._object(self.chunk_kind, [self._choice({"delta": {"role": "assistant", "content": ""}}, None)])]

    def _content(self, text: str) -> _Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> _Json:
        return {"delta": {"content": text} if text else {}}


def _refinement(end: Finished) -> _Json:
    """What is ours: whether the answer was refined, and how much of what it looked up was there."""
    return {"refined": end.refined, "hit_rate": end.hits / end.lookups if end.lookups else None}
