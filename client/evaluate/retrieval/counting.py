"""Aggregation: the words of a list that come most often, and coded words by frequency."""

import random
import string
from itertools import islice

from strataflux.client.evaluate.retrieval.problem import Haystack, Problem

__all__ = ["COMMON", "OFTEN", "common_words", "frequent_words"]

COMMON = 5
"""Words to find."""
OFTEN = 8
"""Times each of them comes; others come once."""
_TOP = 3
_CODE_LETTERS = 6


def common_words(draw: random.Random, units: int, haystack: Haystack) -> Problem:
    """A unit is a word that comes once, as long as there are different ones."""
    shuffled = draw.sample(haystack.words, len(haystack.words))
    common, rest = shuffled[:COMMON], shuffled[COMMON:]
    words = common * OFTEN + [rest[place % len(rest)] for place in range(units)]
    draw.shuffle(words)
    text = " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))
    return Problem(
        f"This is a numbered list of words. Some of them come more often than others: remember those.\n{text}\n"
        f"Question: What are the {COMMON} most common words in the list above?",
        f"Answer: The {COMMON} most common words in the list are:",
        tuple(common),
    )


def frequent_words(draw: random.Random, units: int, _: Haystack) -> Problem:
    """A unit is a word of a coded text. The most frequent is noise; shares fall with the square of the rank."""
    counts = [max(1, round(0.61 * units / rank**2)) for rank in range(1, units + 1)]
    codes = ["..."]
    while len(codes) < len(counts):
        codes.append("".join(draw.choices(string.ascii_lowercase, k=_CODE_LETTERS)))
    repeated = (code for code, count in zip(codes, counts, strict=True) for _ in range(count))
    words = list(islice(repeated, units))
    draw.shuffle(words)
    return Problem(
        f"This is a coded text. Count how often each coded word comes.\n{' '.join(words)}\nQuestion: Dots aside, what "
        f"are the {_TOP} most frequent words in the coded text above?",
        f"Answer: The {_TOP} most frequent words in the coded text are:",
        tuple(codes[1 : _TOP + 1]),
    )
