"""Conversations as the text that a model was trained on, by the model's own template.

Templates come with models and are programs: they run in Jinja's sandbox, which lets them read what they are given and
nothing else. The environment is the one that Transformers documents for chat templates.
"""

import datetime
import json
from collections.abc import Sequence
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strataflux.client.errors import InputError
from strataflux.client.prepare.chat import CHAT, ChatTemplate
from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.schemas import Message

__all__ = ["ChatRenderer"]


class ChatRenderer:
    """Writes conversations as one model's template says. Safe to use from any thread."""

    def __init__(self, chat: ChatTemplate) -> None:
        """Compile the template.

        Raises:
            InputError: it does not compile.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(chat.template)
        except TemplateError as error:
            raise InputError(CHAT, f"{error}", "a Jinja template", "see the model's publisher") from error
        self._tokens = {"bos_token": chat.bos_token, "eos_token": chat.eos_token}

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the model's answer begins.

        Raises:
            RequestError: the template does not take these messages, and says why.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, tools=None, **self._tokens)
        except Exception as error:  # whatever a program of strangers raises is about the request it was given
            found = f"{type(error).__name__}: {error}"
            raise RequestError(
                "messages", found, "messages that the model's chat template takes", "change them", parameter="messages"
            ) from error


def _tojson(value: object, indent: int | None = None) -> str:
    """Jinja's own escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
