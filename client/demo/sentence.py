"""One sentence, the same way for every row of the demo: greedy, from one prompt."""

from collections.abc import Callable, Iterator
from typing import Final

from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.runtime.generation import Sampling, generate_tokens, special_tokens, text_pieces

__all__ = ["PROMPT", "SENTENCE_TOKENS", "one_sentence"]

PROMPT: Final = "Plants need sunlight because"
SENTENCE_TOKENS: Final = 40
_ENDS: Final = ".!?\n"


def one_sentence(advance: Callable[[int], Tensor], tokenizer: Tokenizer) -> str:
    """The prompt and what the model goes on with, to the end of the sentence or for 40 tokens.

    Args:
        advance: a step of the model, at the start of a sequence with room for the prompt and 40 tokens.
        tokenizer: of the model.
    """
    prompt = tokenizer.encode(PROMPT).ids
    tokens = generate_tokens(advance, prompt, SENTENCE_TOKENS, Sampling(), special_tokens(tokenizer))
    return PROMPT + "".join(_first_sentence(text_pieces(tokenizer, tokens))).rstrip()


def _first_sentence(pieces: Iterator[str]) -> Iterator[str]:
    for piece in pieces:
        yield piece
        if any(end in piece for end in _ENDS):
            return
