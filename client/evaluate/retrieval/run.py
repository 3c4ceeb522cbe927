"""Let a model answer, with keys and values kept in some way, and count what it found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from tokenizers import Tokenizer

from strataflux.client.evaluate.methods.base import KvMethod
from strataflux.client.evaluate.methods.sequences import generate
from strataflux.client.evaluate.retrieval.tasks import TASKS, Asked
from strataflux.client.runtime.generation import special_tokens
from strataflux.client.runtime.models import DecoderWeights

__all__ = ["Retrieved", "retrieve"]


@dataclass(frozen=True)
class Retrieved:
    """What was said to each problem, in their order, and its scores."""

    problems: tuple[Asked, ...]
    said: tuple[str, ...]

    @property
    def scores(self) -> dict[str, float]:
        """Each task's mean, 0 … 1."""
        by_task: dict[str, list[float]] = {problem.task: [] for problem in self.problems}
        for problem, said in zip(self.problems, self.said, strict=True):
            by_task[problem.task].append(TASKS[problem.task].score(problem.answers, said))
        return {name: fmean(parts) for name, parts in by_task.items()}

    @property
    def mean(self) -> float:
        """Of all tasks, each counted alike."""
        return fmean(self.scores.values())


def retrieve(
    weights: DecoderWeights,
    method: KvMethod,
    problems: Sequence[Asked],
    tokenizer: Tokenizer,
    *,
    batch: int = 8,
    on_batch: Callable[[int], object] = lambda _: None,
) -> Retrieved:
    """Answer all of ``problems`` greedily, up to ``batch`` at a time; ``on_batch`` is told how many were answered."""
    stops = special_tokens(tokenizer)
    order = sorted(range(len(problems)), key=lambda place: TASKS[problems[place].task].tokens)
    said = [""] * len(problems)
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        prompts = torch.tensor([problems[place].tokens for place in places])
        limits = [TASKS[problems[place].task].tokens for place in places]
        answers = generate(weights, method, prompts, max(limits), sorted(stops))
        for place, limit, answer in zip(places, limits, answers, strict=True):
            said[place] = tokenizer.decode(answer[:limit])
        on_batch(len(places))
    return Retrieved(tuple(problems), tuple(said))
