"""``strataflux eval --kv METHOD --tasks``: both scores of each task, and what is refused."""

import re
import string
from pathlib import Path
from random import Random

import pytest

from strataflux.client.prepare.chat import CHAT, ChatTemplate
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.proto.extras import install_command
from tests.unit.client.cli.conftest import Run

SIZES = ("--task-tokens", 800, "--task-count", 2)


def test_both_scores_of_each_task_are_told(tiny_gguf: Path, run: Run) -> None:
    said = run("eval", tiny_gguf, "--kv", "kivi:2", "--tasks", "retrieval:qa_1,niah_single_1", *SIZES, "--json")
    assert said.code == 0, said.err
    found = said.json()
    assert list(found["tasks"]) == ["qa_1", "niah_single_1"]
    assert found["tasks"]["qa_1"].keys() == found["mean"].keys() == {"exact", "kv"}
    assert found["kv"]["method"] == "kivi:2"
    assert found["kv"]["bytes"] == found["kv"]["bytes_a_token_and_layer"] * 800 * 2
    assert (found["task_tokens"], found["task_count"], found["task_seed"]) == (800, 2, 0)
    assert not found["chat_template"]


def test_codes_are_asked_too_and_shown_to_people(tiny_prepared: PreparedModel, tmp_path: Path, run: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(Random(1).choices(string.ascii_lowercase + " ,.", k=4000)))
    command = ("eval", tiny_prepared.folder, "--kv", "fsq:4x", "--text", text, "--calibration-tokens", 2048)
    said = run(*command, "--tasks", "retrieval:niah_single_1", *SIZES)
    assert said.code == 0, said.err
    assert "niah_single_1" in said.out
    told = re.search(r"^([\d.]+) bytes a token and layer", said.out, re.MULTILINE)
    assert told is not None
    assert 24 < float(told[1]) <= 32


def test_prompts_are_written_by_the_chat_template(
    tiny_prepared: PreparedModel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<model>"
    ChatTemplate(template).save(tiny_prepared.folder / CHAT)
    command = ("eval", tiny_prepared.folder, "--kv", "exact", "--tasks", "retrieval:niah_single_1", *SIZES, "--json")
    said = run(*command)
    assert said.code == 0, said.err
    assert said.json()["chat_template"]
    monkeypatch.setattr("strataflux.client.cli.eval_tasks.find_spec", lambda _: None)
    assert run(*command).json()["error"]["remedy"] == install_command("serve")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--kv", "kivi:2", "--tasks", "reading"), "retrieval: and some of"),
        (("--kv", "kivi:2", "--tasks", "retrieval", "--task-tokens", "90"), "at least"),
        (("--kv", "fsq:4x", "--tasks", "retrieval", "--sequential"), "one of the two"),
        (("--kv", "2/2", "--tasks", "retrieval"), "one of the two"),
        (("--tasks", "retrieval"), "one of the two"),
        (("--kv", "pyramid:999x", "--tasks", "retrieval:niah_single_1", "--task-tokens", "800"), "always kept"),
    ],
)
def test_what_cannot_be_is_refused(tiny_gguf: Path, run: Run, words: tuple[str, ...], expected: str) -> None:
    said = run("eval", tiny_gguf, *words, "--task-count", 1, "--json")
    assert said.code == 2
    assert expected in said.json()["error"]["expected"]
