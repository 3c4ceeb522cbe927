"""Put off what signals do while something is made that must be known before it can be undone."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["held_signals"]


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Inside, a signal that has a handler in Python is only noted; those noted are raised again at the end.

    Keep what is inside short: Ctrl-C has no effect meanwhile. Python runs handlers in the main thread alone, so in
    any other thread there is nothing to put off. The signal mask would not do: a signal then goes to a thread that
    does not block it, the handler still runs in this one, and a child would inherit the mask.

    Raises:
        BaseException: at the end, what the handler of a noted signal raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
        number: handler for number, handler in found.items() if callable(handler)
    }
    noted: list[int] = []
    holding = True

    def note(number: int, frame: FrameType | None) -> None:
        # Once the end has begun it hands on: a handler that raises may keep the ones after it from being put back.
        if holding:
            noted.append(number)
        else:
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        holding = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in noted:
            signal.raise_signal(number)
