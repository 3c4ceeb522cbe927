"""Texts to score: any file, WikiText cleaned of its marks, or the English that ships with Python."""

import re
from pathlib import Path

from strataflux.client.errors import InputError

__all__ = ["clean_wikitext", "python_prose", "read_text", "read_texts"]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, cleaned of WikiText's marks if it has any.

    Raises:
        InputError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return clean_wikitext(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(path, error.strerror or "an error", "a text file", "check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(path, f"byte {error.start} that is no UTF-8", "a UTF-8 text", "convert it") from error


def read_texts(path: Path) -> list[str]:
    """The texts of all UTF-8 files in a folder and below it, by path; of a file its own. Other files are passed over.

    Raises:
        InputError: there is nothing to read.
    """
    if path.is_file():
        return [read_text(path)]
    found = []
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            try:
                found.append(clean_wikitext(file.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    if not any(found):
        raise InputError(path, "no UTF-8 file", "a text file, or a folder of some", "check the path")
    return found


def clean_wikitext(text: str) -> str:
    """``text`` with WikiText's `` @-@ ``, `` @,@ `` and `` @.@ `` turned back into ``-``, ``,`` and ``.``."""
    return re.sub(r" @([-,.])@ ", r"\1", text)


def python_prose() -> str:
    """English prose from the language reference in ``pydoc_data.topics``, one paragraph a line.

    Code, tables, grammar and lists are left out: only unindented paragraphs that end a sentence stay. The
    text depends on the Python version, so numbers measured on it compare within one run.
    """
    from pydoc_data.topics import topics

    paragraphs = []
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            paragraph = " ".join(block.split())
            if _is_prose(block) and len(paragraph) > 80:
                paragraphs.append(paragraph)
    return "\n".join(dict.fromkeys(paragraphs))


def _is_prose(block: str) -> bool:
    lines = block.strip("\n").splitlines()
    plain = sum(character.isalpha() or character in " ,.'-" for character in block)
    return (
        all(line and not line.startswith((" ", "*", "+", "|", ">", "-", "=")) for line in lines)
        and block.rstrip().endswith(".")
        and plain > 0.92 * len(block.replace("\n", " "))
    )
