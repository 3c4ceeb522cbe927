"""Chat templates travel from a published model into the prepared one."""

import json
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.errors import InputError
from strataflux.client.prepare.chat import CHAT, ChatTemplate, chat_from_gguf, chat_from_hf, read_chat
from strataflux.client.prepare.hf_source import HfSource
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

TEMPLATE = ChatTemplate("{{ bos_token }}{{ messages }}", "<s>", "</s>")


def test_gguf_names_its_tokens_by_number() -> None:
    metadata = {
        "tokenizer.chat_template": TEMPLATE.template,
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert chat_from_gguf(metadata) == TEMPLATE
    assert chat_from_gguf(metadata | {"tokenizer.ggml.eos_token_id": 7}) == ChatTemplate(TEMPLATE.template, "<s>", "")
    assert chat_from_gguf({"tokenizer.ggml.tokens": ["<s>"]}) is None


@pytest.mark.parametrize(
    "found",
    [
        {"chat_template": TEMPLATE.template, "bos_token": "<s>", "eos_token": "</s>"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": TEMPLATE.template},
            ],
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": {"content": "</s>"},
        },
    ],
)
def test_hugging_face_folders_hold_it_in_two_ways(found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found))
    assert chat_from_hf(tmp_path) == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert chat_from_hf(tmp_path) == ChatTemplate("newer", "<s>", "</s>")


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    assert chat_from_hf(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "chat_template": None}))
    assert chat_from_hf(tmp_path) is None


def test_damage_is_told_with_the_folder(tmp_path: Path, tiny_source: TinySource) -> None:
    write_hf(tmp_path / "model", tiny_source, hf_tensors(tiny_source))
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="chat template that cannot be read"):
        HfSource(tmp_path / "model").chat_template()


@pytest.mark.parametrize("chat", [TEMPLATE, None])
def test_preparing_keeps_it(chat: ChatTemplate | None, tiny_source: TinySource, tmp_path: Path) -> None:
    source = TinySource(tiny_source.config, chat=chat)
    prepare(source, tmp_path / "prepared", PrepareSettings())
    assert read_chat(tmp_path / "prepared") == chat


@pytest.mark.parametrize("text", ["{", "[]", '{"template": 1, "bos_token": "", "eos_token": ""}', '{"template": ""}'])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / CHAT).write_text(text)
    with pytest.raises(InputError, match="chat template"):
        read_chat(tmp_path)
