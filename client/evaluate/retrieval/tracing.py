"""Variable tracking: a chain of assignments scattered over noise."""

import random
import string

from strataflux.client.evaluate.retrieval.problem import NOISE, Haystack, Problem, hide, listed

__all__ = ["HOPS", "track_variables"]

HOPS = 4
"""Assignments of one variable to another; one more variable is given the value."""
_LETTERS = 5


def _chain(draw: random.Random) -> tuple[str, list[str], list[str]]:
    """A value, the variables that have it in the end, and the sentences that say so."""
    value, names = str(draw.randrange(10_000, 100_000)), list[str]()
    while len(names) <= HOPS:
        name = "".join(draw.choices(string.ascii_uppercase, k=_LETTERS))
        names += [name] if name not in names else []
    given = [value, *(f"VAR {name}" for name in names[:-1])]
    return value, names, [f"VAR {name} = {source}." for name, source in zip(names, given, strict=True)]


def _asked(text: str, value: str) -> str:
    return (
        f"A chain of variable assignments is hidden in the following text. Follow it.\n{text}\n"
        f"Question: Which variables are assigned the value {value} in the text above?"
    )


def _lead(value: str) -> str:
    return f"Answer: The {HOPS + 1} variables that are assigned the value {value} in the text above are:"


def track_variables(draw: random.Random, units: int, _: Haystack) -> Problem:
    """A unit is a sentence of noise. A small solved problem comes first, as in RULER."""
    shown = _chain(draw)
    example = f"{_asked(' '.join(hide(draw, NOISE, shown[2])), shown[0])}\n{_lead(shown[0])} {listed(shown[1])}."
    value, names, sentences = _chain(draw)
    noise = [NOISE[place % len(NOISE)] for place in range(units)]
    text = " ".join(hide(draw, noise, sentences))
    return Problem(f"{example}\n\n{_asked(text, value)}", _lead(value), tuple(names))
