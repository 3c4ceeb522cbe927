"""The thirteen tasks by RULER's names (Hsieh et al., 2024), and problems of an exact number of tokens."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.retrieval.answering import PEOPLE, answer_about_one, answer_about_two
from strataflux.client.evaluate.retrieval.counting import common_words, frequent_words
from strataflux.client.evaluate.retrieval.needles import Needles
from strataflux.client.evaluate.retrieval.problem import NOISE, Haystack, Problem, Task
from strataflux.client.evaluate.retrieval.tracing import track_variables
from strataflux.client.evaluate.retrieval.words import KEYS

__all__ = ["TASKS", "Asked", "Wrapping", "draw_problems", "parse_tasks"]

TASKS: Mapping[str, Task] = {
    "niah_single_1": Task(Needles("noise"), 24, "a number in noise"),
    "niah_single_2": Task(Needles("prose"), 24, "a number in prose"),
    "niah_single_3": Task(Needles("prose", value="uuid"), 56, "a UUID in prose"),
    "niah_multikey_1": Task(Needles("prose", hidden=4), 24, "one of four numbers in prose"),
    "niah_multikey_2": Task(Needles("needles"), 24, "one of as many numbers as there is room for", most=KEYS),
    "niah_multikey_3": Task(Needles("needles", "uuid", "uuid"), 56, "the same of UUIDs by UUIDs"),
    "niah_multivalue": Task(Needles("prose", values=4), 64, "four numbers of one name in prose"),
    "niah_multiquery": Task(Needles("prose", hidden=4, asked=4), 64, "four numbers of four names in prose"),
    "vt": Task(track_variables, 48, "all variables of a chain of assignments"),
    "cwe": Task(common_words, 48, "the most common words of a list"),
    "fwe": Task(frequent_words, 48, "the most frequent coded words", least=40),
    "qa_1": Task(answer_about_one, 16, "a fact in one of many documents", most=PEOPLE, any_answer=True),
    "qa_2": Task(answer_about_two, 16, "a fact in a document that another points at", most=PEOPLE, any_answer=True),
}
"""In RULER's order."""


@dataclass(frozen=True)
class Wrapping:
    """What stands around a problem's text: a chat template's marks, or nothing."""

    before: str = ""
    after: str = "\n"

    @classmethod
    def by(cls, render: Callable[[str], str]) -> "Wrapping":
        """By what writes a user's words as the model wants them."""
        before, _, after = render(mark := "\x00").partition(mark)
        return cls(before, after)


@dataclass(frozen=True)
class Asked:
    """A problem as tokens."""

    task: str
    tokens: tuple[int, ...]
    answers: tuple[str, ...]


def parse_tasks(text: str) -> list[str]:
    """``retrieval``, or ``retrieval:niah_single_1,vt``.

    Raises:
        MisuseError: it names another task.
    """
    kind, _, some = text.partition(":")
    names = some.split(",") if some else list(TASKS)
    unknown = [name for name in names if name not in TASKS]
    if kind != "retrieval" or unknown or text.endswith(":"):
        expected = f"retrieval, or retrieval: and some of {', '.join(TASKS)}"
        raise MisuseError("--tasks", repr(unknown[0] if unknown else text), expected, "name those")
    return names


def draw_problems(
    names: Sequence[str],
    tokenizer: Tokenizer,
    haystack: Haystack,
    *,
    tokens: int,
    count: int,
    seed: int,
    wrapping: Wrapping,
) -> list[Asked]:
    """``count`` problems of each task, every one of exactly ``tokens`` tokens, its answer's lead included.

    Each has as many units as fit; noise before its text fills the rest. The same arguments give the same problems.

    Raises:
        MisuseError: the smallest problem has more tokens.
    """
    fitter = _Fitter(tokenizer, haystack, tokens, wrapping)
    return [fitter.fit(name, f"{seed}:{name}:{number}") for name in names for number in range(count)]


class _Fitter:
    def __init__(self, tokenizer: Tokenizer, haystack: Haystack, tokens: int, wrapping: Wrapping) -> None:
        # fixed after construction
        self._tokenizer = tokenizer
        self._haystack = haystack
        self._tokens = tokens
        self._wrapping = wrapping
        start = tokenizer.encode("").ids if not wrapping.before else []
        self._before = [*start, *self._encode(wrapping.before)]
        self._noise = self._encode(" ".join(NOISE) + "\n")

    def fit(self, name: str, seed: str) -> Asked:
        task = TASKS[name]

        def made(units: int) -> tuple[Problem, list[int]]:
            problem = task.build(random.Random(seed), units, self._haystack)  # noqa: S311
            return problem, self._encode(f"{problem.text}{self._wrapping.after}{problem.lead}")

        room = self._tokens - len(self._before)
        if (needed := len(made(task.least)[1])) > room:
            found = f"{self._tokens} tokens, {room} of them beside the template"
            raise MisuseError("--task-tokens", found, f"at least {needed} for {name}", "ask for more")
        fits, beyond = task.least, min(2 * task.least, task.most + 1)
        while beyond <= task.most and len(made(beyond)[1]) <= room:
            fits, beyond = beyond, min(2 * beyond, task.most + 1)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if len(made(middle)[1]) <= room else (fits, middle)
        problem, body = made(fits)
        missing = room - len(body)
        # Ends where noise ends, so that the text begins as it does without.
        filler = (self._noise * (missing // len(self._noise) + 1))[len(self._noise) - missing % len(self._noise) :]
        return Asked(name, (*self._before, *filler[:missing], *body), problem.answers)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
