"""One step of a session."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Step"]


class Step:
    """One step: ``with session.step() as step``. Addresses found in it are void after it."""

    __slots__ = ("_begin", "_end", "_valid")

    def __init__(self, begin: Callable[[], None], end: Callable[[], bool]) -> None:
        """Use :meth:`strataflux.client.session.Session.step`."""
        self._begin = begin
        self._end = end
        self._valid: bool | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> bool:
        """End the step now. False: what was read in it may be wrong, run it again without refinement. Never raises;
        later calls give the same answer.
        """
        if self._valid is None:
            self._valid = self._end()
        return self._valid
