"""What models have in common that decode with a daemon: a session's step around each of theirs, and how they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.session import Session
from strataflux.client.session_stats import SessionStats

__all__ = ["SessionModel"]


class SessionModel(ABC):
    """Decodes one sequence. One thread at a time.

    Pairs: construction / :meth:`close`, or ``with``. A step that the daemon had to cut off (it held slots for too long)
    is run again unrefined before its logits are given out.
    """

    def __init__(self, session: Session, decoder: Decoder, leave: Callable[[], object] | None = None) -> None:
        """``leave`` is what :meth:`close` does, by default closing the session."""
        # fixed after construction
        self._session = session
        self._decoder = decoder
        self._leave = session.close if leave is None else leave

    def step(self, token: int) -> Tensor:
        """Append ``token`` and return the logits [vocabulary] float32 of the next one.

        Raises:
            ContextFull, IndexError: as :meth:`Decoder.step`. Nothing for the daemon's sake.
        """
        # Before the session's step, which holds slots: the cache may encode a tile, or wait for staging memory.
        self._decoder.cache.begin_step()
        with self._session.step() as step:
            logits = self._decoder.step(token)
        return logits if step.end() else self._again(token)

    def _again(self, token: int) -> Tensor:
        # The invalid step's key and value are overwritten; those before it come from valid steps.
        self._decoder.reset(self._decoder.position - 1)
        self._refine(False)
        try:
            return self._decoder.step(token)
        finally:
            self._refine(True)

    @abstractmethod
    def _refine(self, on: bool) -> None:
        """Use what the daemon holds in the steps that follow, or do not."""

    def reset(self, position: int = 0) -> None:
        """Forget all tokens from ``position`` on; 0 begins another sequence. What is resident stays so.

        Raises:
            MisuseError: as :meth:`Decoder.reset`.
        """
        self._decoder.reset(position)

    def stats(self) -> SessionStats:
        """Counts and state of the session."""
        return self._session.stats()

    def close(self) -> None:
        """Leave the daemon; a sequence of a session that has more leaves that. Idempotent."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MisuseError:
            # Ctrl-C between two lines of a step's beginning or end leaves it open, and is what should be told.
            if error is None:
                raise
