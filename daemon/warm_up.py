"""Compile everything the service runs, by living a life in small."""

import os
import tempfile
from pathlib import Path

import numpy as np

from strataflux.daemon.interface import SessionRequest
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.segments import drain_segment
from strataflux.daemon.store import open_served
from strataflux.proto import layout
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter

__all__ = ["warm_up"]


def warm_up(policy: str = "lru") -> None:
    """Compile everything the service runs (or find it compiled): a life in small, with a store of one
    record and the reader of this replacement policy.
    """
    with tempfile.TemporaryDirectory(prefix="strataflux-") as folder:
        path = Path(folder, "store")
        with StoreWriter(path, {}, [SectionSpec("warm-up", "weight_channel", 0, "qkv", 1, 64)]) as writer:
            writer.write(0, 0, np.zeros((1, 64), np.uint8))
            writer.publish()
        settings = ReaderSettings(weight_bytes=layout.CACHE_PAGE_BYTES, engine="threads", threads=1, policy=policy)
        thread = ReaderThread(settings, [open_served(path, direct_io="off")])
        thread.start()
        session = thread.open_session(SessionRequest(os.geteuid(), os.getegid(), os.getpid(), (0,), 8, None))
        for descriptor in session.descriptors:
            os.close(descriptor)
        thread.check_integrity()
        thread.close_session(session.index)
        thread.remove_store(0)  # of the last store: else the reader stands still to compile it while others wait
        thread.execute(lambda: drain_segment(thread.core, 0))
        thread.stop()
