"""Text to train codes on: what is held out, random places, and sequences whose teacher is asked once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Course", "Lesson", "hold_out", "overlapping", "random_sequences"]


@dataclass(frozen=True)
class Lesson:
    """A batch to train on."""

    tokens: Tensor
    """[sequences, n] int64."""
    states: Tensor | None = None
    """What the unconverted model makes of them, [sequences, n, hidden] bfloat16 before its head; None: not known."""


class Course:
    """Sequences that come again and again, in another order each time; what the unconverted model makes of them is
    kept, if there is room, from the first time on.
    """

    def __init__(
        self, sequences: Tensor, teach: Callable[[Tensor], Tensor], hidden: int, keep_bytes: int = 16 << 30
    ) -> None:
        """Teach ``sequences``.

        Args:
            sequences: [count, n] int64.
            teach: the unconverted model's states [s, n, hidden] of tokens [s, n].
            hidden: of a state.
            keep_bytes: on the device of ``sequences``; 2 bytes a number. Where not all states fit, none is kept.
        """
        self._sequences, self._teach = sequences, teach
        count, length = sequences.shape
        fits = count * length * hidden * 2 <= keep_bytes
        self._states = (
            torch.empty(count, length, hidden, dtype=torch.bfloat16, device=sequences.device) if fits else None
        )
        self._known = [False] * count

    def batches(self, size: int, seed: int, first: int = 0) -> Iterator[Lesson]:
        """Batches of ``size`` sequences without end, from number ``first`` on; each number is always the same.

        Raises:
            ValueError: there are fewer sequences.
        """
        count = len(self._known)
        if count < size:
            raise ValueError(f"batches of {size} sequences asked for; there are {count}")
        number = first
        while True:
            turn, place = divmod(number, count // size)
            random = torch.Generator().manual_seed(seed * 1_000_003 + turn)
            yield self._lesson(torch.randperm(count, generator=random)[place * size : (place + 1) * size])
            number += 1

    def _lesson(self, chosen: Tensor) -> Lesson:
        places = chosen.to(self._sequences.device)
        tokens = self._sequences[places]
        if self._states is None:
            return Lesson(tokens)
        unknown = [place for place in chosen.tolist() if not self._known[place]]
        if unknown:
            # By list, not by mask: the latter waits for the device.
            asked = torch.tensor(unknown, device=places.device)
            self._states[asked] = self._teach(self._sequences[asked])
            for place in unknown:
                self._known[place] = True
        return Lesson(tokens, self._states[places])


def overlapping(tokens: Tensor, length: int, times: int) -> Tensor:
    """``tokens`` [n] as sequences [count, length] that have each token in ``times`` of them at other places, but for a
    few at the ends.
    """
    shifts = [length * number // times for number in range(times)]
    return torch.cat([tokens[shift:].unfold(0, length, length) for shift in shifts if shift + length <= len(tokens)])


def hold_out(tokens: Tensor, sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """``tokens`` [n] without ``sequences`` stretches of ``length``, evenly spread; and those [sequences, length]."""
    share = tokens.shape[0] // sequences
    parts = [tokens[i * share : (i + 1) * share if i + 1 < sequences else None] for i in range(sequences)]
    return torch.cat([part[:-length] for part in parts]), torch.stack([part[-length:] for part in parts])


def random_sequences(tokens: Tensor, sequences: int, length: int, seed: int, first: int = 0) -> Iterator[Lesson]:
    """Batches [sequences, length] from random places of ``tokens`` [n]; number ``first`` on, each always the same."""
    number = first
    while True:
        random = torch.Generator().manual_seed(seed * 1_000_003 + number)
        starts = torch.randint(0, tokens.shape[0] - length + 1, (sequences,), generator=random)
        yield Lesson(tokens[(starts[:, None] + torch.arange(length)).to(tokens.device)])
        number += 1
