"""Texts to score."""

import re
from pathlib import Path

import pytest

from strataflux.client.errors import InputError
from strataflux.client.evaluate.text import clean_wikitext, python_prose, read_text


def test_wikitext_marks_become_punctuation() -> None:
    assert clean_wikitext("a well @-@ known 1 @,@ 024 at 2 @.@ 5 @ home") == "a well-known 1,024 at 2.5 @ home"


def test_files_are_read_and_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("1 @,@ 024 é", encoding="utf-8")
    assert read_text(path) == "1,024 é"


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_text(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(InputError, match="byte 3"):
        read_text(tmp_path / "latin")


def test_python_ships_enough_prose() -> None:
    prose = python_prose()
    assert len(prose.split()) > 5000
    assert len(re.findall(r"[a-z ]", prose)) > 0.9 * len(prose)
    assert not re.search(r"^[\s*|>=-]|::=|>>>", prose, re.MULTILINE)
    assert prose == python_prose()
