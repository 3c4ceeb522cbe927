"""What holds connections and maps of its own, told in a forked child that they are its parent's."""

import os
import weakref
from typing import Final, Protocol

__all__ = ["Watched", "watch"]


class Watched(Protocol):
    """What is told."""

    def forget_in_child(self) -> None:
        """Nothing of it may be used here."""


_WATCHED: Final[weakref.WeakSet[Watched]] = weakref.WeakSet()


def watch(one: Watched) -> None:
    """Tell ``one`` in every child forked from now on, as long as it lives."""
    _WATCHED.add(one)


def _after_fork_in_child() -> None:
    for one in list(_WATCHED):
        one.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
