"""Whether records could be served now: the reader's loop answers, and so does every device, within a bound.

Measured again and again by a thread of its own, because either may hang, and what asks about them may not.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from strataflux.daemon.errors import DaemonError

__all__ = ["Probed", "Prober", "read_once"]

_LEAST_BYTES: Final = 512


class Probed(Protocol):
    """An open store, as far as a read of it goes."""

    @property
    def descriptor(self) -> int:
        """What is read."""

    @property
    def alignment(self) -> int:
        """Of offsets, lengths and addresses."""


def read_once(store: Probed) -> None:
    """Read the first bytes of a store as the reader would.

    Raises:
        OSError: the device, or the file system, does not give them.
    """
    size = max(store.alignment, _LEAST_BYTES)
    with mmap.mmap(-1, max(size, mmap.PAGESIZE)) as buffer, memoryview(buffer) as view, view[:size] as part:
        os.preadv(store.descriptor, [part], 0)


class Prober:
    """Pairs: :meth:`start` / :meth:`stop`. ``echo`` and the reads of ``stores`` run in its thread only."""

    def __init__(
        self,
        echo: Callable[[], None],
        stores: Callable[[], Iterable[Probed]],
        limit_seconds: float,
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # fixed after construction
        self._echo = echo
        self._stores = stores
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strataflux-probe", daemon=True)
        # written by the event loop, each a single word
        self.limit_seconds = limit_seconds
        self.interval_seconds = interval_seconds
        # written by the thread, each a single word
        self.last_seconds = 0.0
        """What the last complete probe took."""
        self.count = 0
        self._begun: float | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Probe now, and at every interval from then on."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no further probe. One that hangs is left to the kernel. Idempotent."""
        self._stopping.set()

    def obstacle(self) -> str | None:
        """What is wrong now; None when the last probe was in time and none is overdue."""
        begun = self._begun
        if begun is not None and (late := self._clock() - begun) > self.limit_seconds:
            return f"no answer for {late:.1f} s; the limit is {self.limit_seconds:g} s"
        return self._failure

    def measure(self) -> None:
        """One probe: an echo through the reader's loop, then one read of each store."""
        begun = self._begun = self._clock()
        failure = None
        try:
            self._echo()
            for store in list(self._stores()):
                self._read(store)
        except (DaemonError, OSError) as error:
            failure = str(error)
        took = self._clock() - begun
        if failure is None and took > self.limit_seconds:
            failure = f"the last answer took {took:.1f} s; the limit is {self.limit_seconds:g} s"
        self._failure, self.last_seconds, self._begun = failure, took, None
        self.count += 1

    def _read(self, store: Probed) -> None:
        try:
            read_once(store)
        except OSError:
            if any(store is other for other in self._stores()):  # else it was removed meanwhile, and its file closed
                raise

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.measure()
            self._stopping.wait(self.interval_seconds)
