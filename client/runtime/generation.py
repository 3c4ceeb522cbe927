"""Text from a decoder: greedy or sampled, reproducible by seed, as a stream of pieces."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.errors import MisuseError

__all__ = ["Advance", "Sampling", "choose_token", "generate_tokens", "special_tokens", "text_pieces"]

Advance = Callable[[int], Tensor]
"""Appends a token and returns the next one's logits [vocabulary], as :meth:`Decoder.step` does."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        MisuseError: on construction, naming the setting and its range.
    """

    temperature: float = 0.0
    """0 takes the most probable token; larger values flatten the distribution."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have at least this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise MisuseError("temperature", f"{self.temperature}", "0 or more", "0 is greedy")
        if not 0 < self.top_p <= 1:
            raise MisuseError("top_p", f"{self.top_p}", "above 0 and at most 1", "1 keeps every token")


def choose_token(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """The next token for ``logits`` [vocabulary]; draws from ``random`` only if the temperature is above
    0.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probability, token = torch.softmax(logits.double() / sampling.temperature, -1).sort(descending=True, stable=True)
    # A token stays if the ones before it do not yet reach top_p, so at least one always stays.
    probability[probability.cumsum(-1) - probability >= sampling.top_p] = 0
    return int(token[torch.multinomial(probability, 1, generator=random)])


def generate_tokens(
    advance: Advance, prompt: Sequence[int], count: int, sampling: Sampling, stop: Collection[int] = ()
) -> Iterator[int]:
    """Up to ``count`` tokens after ``prompt``; ends before a token in ``stop``, which is not given out.

    Raises:
        MisuseError: the prompt is empty.
    """
    if not prompt:
        raise MisuseError("prompt", "no tokens", "at least one", "give some text")
    random = torch.Generator().manual_seed(sampling.seed)
    for token in prompt[:-1]:
        advance(token)
    token = prompt[-1]
    for _ in range(count):
        token = choose_token(advance(token), sampling, random)
        if token in stop:
            return
        yield token


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Control tokens such as the end of a text or of a turn: none is text, each ends a generation."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


def text_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of ``tokens`` in pieces as soon as each is certain; together they are the decoded whole.

    A character may span several tokens: its piece waits until all its bytes have come.
    """
    # Decoders may treat the first token of a text differently, so the whole is decoded again each time.
    taken: list[int] = []
    given = 0
    for token in tokens:
        taken.append(token)
        text = tokenizer.decode(taken)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[given:]
            given = len(text)
    if rest := tokenizer.decode(taken)[given:]:
        yield rest
