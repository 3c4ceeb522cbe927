"""Text as it comes out of a decoder: tokens to pieces, and the end at a stop text that may span several of them."""

from collections.abc import Sequence

from tokenizers import Tokenizer

__all__ = ["OutgoingText", "Pieces", "StopText"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """Pieces of text, each as soon as it is certain; together they are the decoded whole.

    A character may span several tokens: its piece waits until all its bytes have come. Decoders may treat the first
    token of a text differently, so each piece is decoded together with the one before it; what lies further back is not
    decoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # fixed after construction
        self._tokenizer = tokenizer
        # changed by push
        self._tokens: list[int] = []  # those of the last piece, then those that gave none yet
        self._given = 0

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._rest()
        if text.endswith(_UNFINISHED):
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        return text

    def finish(self) -> str:
        """What is left when no token comes any more."""
        text = self._rest()
        self._tokens, self._given = [], 0
        return text

    def _rest(self) -> str:
        before: str = self._tokenizer.decode(self._tokens[: self._given])
        return str(self._tokenizer.decode(self._tokens))[len(before) :]


class StopText:
    """Lets text through up to the first of some stop texts, and holds back what may turn out to be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: none of them empty."""
        # fixed after construction
        self._stops = tuple(stops)
        # changed by push
        self._held = ""
        self.stopped = False
        """A stop text came; nothing follows."""

    def push(self, text: str) -> str:
        """What of all so far may be shown now and was not."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._take(min(found))
        return self._take(len(self._held) - self._beginning())

    def finish(self) -> str:
        """What was held back and is no stop text after all."""
        return "" if self.stopped else self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _beginning(self) -> int:
        """Length of the longest end of what is held that begins a stop text."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class OutgoingText:
    """Tokens to text that may be shown: :class:`Pieces`, then :class:`StopText`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._pieces = Pieces(tokenizer)
        self._stop = StopText(stops)

    @property
    def stopped(self) -> bool:
        """A stop text came; nothing follows."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """What may be shown after ``token``."""
        return self._stop.push(self._pieces.push(token))

    def finish(self) -> str:
        """The rest."""
        return self._stop.push(self._pieces.finish()) + self._stop.finish()
