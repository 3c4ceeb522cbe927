"""How many threads decode: two are enough for one sequence, and a core is left to the daemon's reader."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

__all__ = ["decoding_threads"]

_MOST: Final = 2


@contextmanager
def decoding_threads() -> Iterator[int]:
    """Let torch use one core less than this process may run on, from one to two, and restore its setting after.

    Threads that wait for one another at each of a step's hundred products suffer much from a third that takes a core
    now and then, as the reader does.
    """
    before = torch.get_num_threads()
    count = max(1, min(_MOST, len(os.sched_getaffinity(0)) - 1))
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
