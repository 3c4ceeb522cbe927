"""Questions about one of many documents, and about two of them. The documents are made up, one person each."""

import random
from dataclasses import dataclass

from strataflux.client.evaluate.retrieval.problem import Haystack, Problem
from strataflux.client.evaluate.retrieval.words import FIRST_NAMES, LAST_NAMES, TOWNS, TRADES

__all__ = ["PEOPLE", "answer_about_one", "answer_about_two"]

PEOPLE = len(FIRST_NAMES) * len(LAST_NAMES)
"""Different names."""


@dataclass(frozen=True)
class _Person:
    name: str
    town: str
    trade: str
    home: str
    teacher: str

    def told(self, number: int) -> str:
        born = f"{self.name} was born in {self.town}."
        works = f"{self.name} learned from {self.teacher}, works as a {self.trade} and lives in {self.home}."
        return f"Document {number}:\n{born} {works}"


def _people(draw: random.Random, count: int) -> list[_Person]:
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    chosen = draw.sample(names, count)
    people = []
    for place, name in enumerate(chosen):
        town, home = draw.sample(TOWNS, 2)
        # A teacher is somebody else of these people.
        teacher = chosen[(place + draw.randrange(1, count)) % count]
        people.append(_Person(name, town, draw.choice(TRADES), home, teacher))
    return people


def _problem(people: list[_Person], question: str, lead: str, answer: str) -> Problem:
    documents = "\n".join(person.told(number) for number, person in enumerate(people, 1))
    return Problem(
        f"Answer a question from these documents, in as few words as you can.\n{documents}\nQuestion: {question}",
        f"Answer: {lead}",
        (answer,),
    )


def answer_about_one(draw: random.Random, units: int, _: Haystack) -> Problem:
    """A unit is a document; one has the answer."""
    people = _people(draw, units)
    asked = draw.choice(people)
    return _problem(people, f"In which town was {asked.name} born?", f"{asked.name} was born in", asked.town)


def answer_about_two(draw: random.Random, units: int, _: Haystack) -> Problem:
    """A unit is a document; one says whom to look for, another has the answer."""
    people = _people(draw, units)
    asked = draw.choice(people)
    teacher = next(person for person in people if person.name == asked.teacher)
    lead = f"The teacher of {asked.name} was born in"
    return _problem(people, f"In which town was the teacher of {asked.name} born?", lead, teacher.town)
