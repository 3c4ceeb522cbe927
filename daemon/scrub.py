"""Read the served stores in the background, slowly, to find damaged records before a client meets them.

A thread of its own with its own descriptors; what it read is dropped from the page cache. The budget is bytes a day,
spread evenly, so that a device never sees it as more than a trickle.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from strataflux.proto.errors import ContractError
from strataflux.proto.store_format import load_checksums, open_store
from strataflux.proto.verify import chunks_of, find_bad

__all__ = ["Scrubber"]

_LOG: Final = logging.getLogger(__name__)
_DAY_SECONDS: Final = 86_400
_CHUNK_BYTES: Final = 256 * 1024
_RETRY_SECONDS: Final = 600.0


class Scrubber:
    """Pairs: :meth:`start` / :meth:`stop`. Counters are read by any thread."""

    def __init__(
        self,
        folders: Callable[[], Iterable[Path]],
        bytes_per_day: int,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """Nothing is read yet. ``pause`` waits so many seconds (tests); ``bytes_per_day`` 0 never reads."""
        # fixed after construction
        self._folders = folders
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._thread = threading.Thread(target=self._run, name="strataflux-scrub", daemon=True)
        # a single word, written by the event loop
        self.bytes_per_day = bytes_per_day
        # written by the thread
        self.bytes = 0
        self.passes = 0
        self.bad: dict[Path, int] = {}
        """Damaged records of each store in its last complete pass."""

    def start(self) -> None:
        """Begin the first pass."""
        self._thread.start()

    def stop(self) -> None:
        """End after the chunk that is being read. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def scrub(self, folder: Path) -> int | None:
        """One pass over one store as it lies on disk; its damaged records, or None if it was stopped or is no store."""
        try:
            manifest = open_store(folder)
            checksums = load_checksums(manifest)
            descriptor = os.open(manifest.records_path, os.O_RDONLY | os.O_CLOEXEC)
        except (ContractError, OSError) as error:
            _LOG.warning("scrub: %s cannot be read: %s", folder, error)
            return None
        bad = 0
        try:
            for chunk in chunks_of(manifest, _CHUNK_BYTES):
                if self._stopping.is_set() or not self.bytes_per_day:
                    return None
                for oid in find_bad(descriptor, chunk, checksums):
                    bad += 1
                    _LOG.error("scrub: record %d of %s is damaged; strataflux store repair %s", oid, folder, folder)
                os.posix_fadvise(descriptor, chunk.offset, chunk.bytes, os.POSIX_FADV_DONTNEED)
                self.bytes += chunk.bytes
                self._pause(chunk.bytes * _DAY_SECONDS / max(self.bytes_per_day, 1))
        finally:
            os.close(descriptor)
        return bad

    def _run(self) -> None:
        while not self._stopping.is_set():
            before = self.bytes
            for folder in list(self._folders()):
                found = self.scrub(folder)
                if found is not None:
                    self.bad[folder] = found
            if self.bytes > before:
                self.passes += 1
            else:
                self._stopping.wait(_RETRY_SECONDS)
