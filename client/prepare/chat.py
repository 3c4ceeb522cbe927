"""The chat template of a model: how it wants the turns of a conversation written, as its publisher says.

Templates are Jinja programs. Here they are only carried from the published model into the prepared one; who renders
them does so in a sandbox (:mod:`strataflux.client.serve.chat`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strataflux.client.errors import InputError

__all__ = ["CHAT", "ChatTemplate", "chat_from_gguf", "chat_from_hf", "read_chat"]

CHAT = "chat.json"
"""In a prepared folder; absent where the model has no template."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the two tokens that templates write themselves; empty where the model names none."""

    template: str
    bos_token: str = ""
    eos_token: str = ""

    def save(self, path: Path) -> None:
        """Write it as JSON, for :func:`read_chat`."""
        path.write_text(json.dumps(asdict(self), indent=2))


def read_chat(folder: Path) -> ChatTemplate | None:
    """The template in a prepared folder; None if its model has none.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / CHAT
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
        parts = {name: value[name] for name in ("template", "bos_token", "eos_token")}
        if not all(isinstance(part, str) for part in parts.values()):
            raise TypeError("parts that are no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(path, f"{type(error).__name__}: {error}", "a chat template", "prepare the model again") from (
            error
        )
    return ChatTemplate(**parts)


def chat_from_gguf(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in GGUF metadata (keys ``tokenizer.…``), if there is one."""
    template = metadata.get("tokenizer.chat_template")
    if not template:
        return None
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())

    def named(key: str) -> str:
        number = metadata.get(key)
        return tokens[int(number)] if number is not None and int(number) < len(tokens) else ""

    return ChatTemplate(str(template), named("tokenizer.ggml.bos_token_id"), named("tokenizer.ggml.eos_token_id"))


def chat_from_hf(folder: Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder: ``chat_template.jinja``, else what ``tokenizer_config.json`` holds."""
    settings = folder / "tokenizer_config.json"
    value: Mapping[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
    alone = folder / "chat_template.jinja"
    template = alone.read_text() if alone.is_file() else _default(value.get("chat_template"))
    return ChatTemplate(template, _text(value.get("bos_token")), _text(value.get("eos_token"))) if template else None


def _default(found: Any) -> str:
    """Of several templates by name: the default one."""
    if isinstance(found, list):
        return next((str(entry["template"]) for entry in found if entry.get("name") == "default"), "")
    return str(found or "")


def _text(token: Any) -> str:
    """Tokens are written as text, or as an object with flags."""
    return str(token.get("content", "") if isinstance(token, Mapping) else token or "")
