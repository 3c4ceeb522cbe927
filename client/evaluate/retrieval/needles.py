"""Needles in haystacks: numbers or UUIDs by name, hidden in noise, in prose, or among others of their kind."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from strataflux.client.evaluate.retrieval.problem import NOISE, Haystack, Problem, hide, listed
from strataflux.client.evaluate.retrieval.words import keys, numbers, uuids

__all__ = ["Needles"]

_Draw = Callable[[random.Random, int], list[str]]
_KINDS: dict[str, _Draw] = {"words": keys, "number": numbers, "uuid": uuids}


@dataclass(frozen=True)
class Needles:
    """A :data:`~strataflux.client.evaluate.retrieval.problem.Build`; a unit is a sentence of the haystack."""

    hay: Literal["noise", "prose", "needles"]
    key: Literal["words", "uuid"] = "words"
    value: Literal["number", "uuid"] = "number"
    hidden: int = 1
    """Names hidden beside a haystack that is no needles itself."""
    values: int = 1
    """Values of each name."""
    asked: int = 1
    """Names asked for."""

    def __call__(self, draw: random.Random, units: int, haystack: Haystack) -> Problem:
        """One question about some of the names."""
        count = self.hidden if self.hay != "needles" else max(self.asked, units)
        named = _KINDS[self.key](draw, count)
        values = _KINDS[self.value](draw, count * self.values)
        told = [
            (name, values[place * self.values + turn])
            for place, name in enumerate(named)
            for turn in range(self.values)
        ]
        needles = [f"One of the special {self.value}s for {name} is: {value}." for name, value in told]
        draw.shuffle(needles)
        sentences = hide(draw, self._hay(draw, units, haystack), needles)
        asked = draw.sample(named, self.asked)
        answers = tuple(value for name, value in told if name in asked)
        return self._ask(" ".join(sentences), asked, answers)

    def _hay(self, draw: random.Random, units: int, haystack: Haystack) -> Sequence[str]:
        if self.hay == "needles":
            return ()
        if self.hay == "prose":
            return haystack.passage(draw, units)
        return [NOISE[place % len(NOISE)] for place in range(units)]

    def _ask(self, text: str, asked: Sequence[str], answers: tuple[str, ...]) -> Problem:
        some = len(answers) > 1
        what = f"special {self.value}{'s' if some else ''} for {listed(asked)}"
        instruction = f"Special {self.value}s are hidden in the following text. Remember them: a question follows."
        question = f"What {'are all the' if some else 'is the'} {what} mentioned in the text above?"
        return Problem(
            f"{instruction}\n{text}\n{question}",
            f"The {what} mentioned in the text {'are' if some else 'is'}",
            answers,
        )
