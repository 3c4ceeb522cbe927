"""Markdown pages as tests look at them: headings, links and fenced blocks, each with its line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
READERS_PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
"""What people read; each block of it says what it is."""
ALL_PAGES = [*READERS_PAGES, ROOT / "proto" / "FORMAT.md"]

_FENCE = re.compile(r"^ *```(.*)$")
_HEADING = re.compile(r"^(#+) (.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``mark`` is the second word of its info string."""

    line: int
    language: str
    mark: str
    text: str


@dataclass(frozen=True)
class Page:
    """One page, read once."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def blocks(self) -> list[Block]:
        """Fenced blocks.

        Raises:
            ValueError: one is not closed.
        """
        found: list[Block] = []
        opened: tuple[int, str] | None = None
        held: list[str] = []
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            fence = _FENCE.match(line)
            if opened is None and fence:
                opened, held = (number, fence[1].strip()), []
            elif fence and opened is not None:
                language, _, mark = opened[1].partition(" ")
                found.append(Block(opened[0], language, mark, "\n".join(held) + "\n"))
                opened = None
            elif opened is not None:
                held.append(line)
        if opened is not None:
            raise ValueError(f"{self}:{opened[0]}: a block that does not end")
        return found

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Lines outside of blocks, with their numbers."""
        inside, found = False, []
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            if _FENCE.match(line):
                inside = not inside
            elif not inside:
                found.append((number, line))
        return found

    @property
    def headings(self) -> list[tuple[int, str]]:
        """Level and text of each."""
        return [(len(match[1]), match[2]) for _, line in self.prose if (match := _HEADING.match(line))]

    @property
    def anchors(self) -> list[str]:
        """What a link may name of this page, as GitHub makes it of headings."""
        texts = (_CODE.sub(r"\1", text) for _, text in self.headings)
        return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts]

    @property
    def links(self) -> Iterator[tuple[int, str]]:
        """Line and target of each link that leads to this repository."""
        for number, line in self.prose:
            for target in _LINK.findall(_CODE.sub("", line)):
                if not re.match(r"[a-z]+:", target):
                    yield number, target

    @property
    def named_files(self) -> Iterator[tuple[int, str]]:
        """Line and text of each code word that looks like a file of this repository."""
        tops = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
        for number, line in self.prose:
            for word in _CODE.findall(line):
                if re.fullmatch(rf"({tops})/[\w./-]+\.\w+", word):
                    yield number, word
