"""What a task gives out, and the texts that things are hidden in."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["NOISE", "Build", "Haystack", "Problem", "Task", "hide", "listed"]

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""What says nothing, over and over."""


@dataclass(frozen=True)
class Haystack:
    """Sentences and words of a text."""

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    """Different ones in lower case, of at least four letters, sorted."""

    @classmethod
    def of(cls, text: str) -> "Haystack":
        """Cut ``text`` at the ends of sentences."""
        whole = " ".join(text.split())
        words = sorted({word for word in re.findall(r"[A-Za-z]+", whole) if word.islower() and len(word) > 3})
        return cls(tuple(re.split(r"(?<=[.!?]) ", whole)), tuple(words))

    def passage(self, draw: random.Random, count: int) -> list[str]:
        """``count`` sentences from a random place on; after the last comes the first."""
        start = draw.randrange(len(self.sentences))
        return [self.sentences[(start + place) % len(self.sentences)] for place in range(count)]


@dataclass(frozen=True)
class Problem:
    """One question about a long text."""

    text: str
    """Instruction, text and question."""
    lead: str
    """How the answer begins; the model goes on from there."""
    answers: tuple[str, ...]


Build = Callable[[random.Random, int, Haystack], Problem]
"""A problem of so many units, whatever those are; more units, more tokens."""


@dataclass(frozen=True)
class Task:
    """One kind of problem."""

    build: Build
    tokens: int
    """Tokens an answer may have."""
    about: str
    least: int = 4
    """Units below which there is no problem."""
    most: int = 1_000_000
    """Units beyond which words run out."""
    any_answer: bool = False
    """Whether one of the answers is enough; otherwise the share of them counts."""

    def score(self, answers: Sequence[str], said: str) -> float:
        """0 … 1, by what is contained in what was said, whatever its case (RULER's protocol)."""
        found = [answer.lower() in said.lower() for answer in answers]
        return float(any(found)) if self.any_answer else sum(found) / len(found)


def hide(draw: random.Random, hay: Sequence[str], needles: Sequence[str]) -> list[str]:
    """``hay`` with ``needles`` at random places, in their order."""
    places = sorted(draw.sample(range(len(hay) + len(needles)), len(needles)))
    mixed = list(hay)
    for place, needle in zip(places, needles, strict=True):
        mixed.insert(place, needle)
    return mixed


def listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
