"""The KV side of a session: block ids of the daemon, and puts through staging memory (proto/FORMAT.md, 15).

Ids belong to one attachment. After another one (``epoch`` moved on) those held before mean nothing, and what was put
under them is gone: callers ask for new ids and go on without refinement of what they put before.

Threads: all of this is for the thread that runs steps, but ``answered``, ``replaced`` and ``lost`` for the keeper's.
"""

import contextlib
import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block, futex
from strataflux.client.attach import Attachment, AttachRequest
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.proto import layout, messages
from strataflux.proto.messages import KvGeometry

__all__ = ["PUT_RESULTS", "KvPuts", "Settled"]

_ANSWER_SECONDS: Final = 10.0
_NAP_SECONDS: Final = 0.05
"""A wait looks at least this often whether anybody still takes puts."""

PUT_RESULTS: Final = {
    layout.PUT_ACCEPTED: "accepted",
    layout.PUT_REFUSED_QUOTA: "refused: the quota of the session's file",
    layout.PUT_REFUSED_SPACE: "refused: no space on the file system",
    layout.PUT_REFUSED_DUPLICATE: "refused: the block was put before",
    layout.PUT_REFUSED_INVALID: "refused: not a block of this session",
}


class Settled(NamedTuple):
    """A put that the daemon is done with: ``result`` is a PUT_ code of the layout, PUT_NONE if its attachment ended."""

    block: int
    result: int

    @property
    def accepted(self) -> bool:
        """The block's records can be looked up."""
        return self.result == layout.PUT_ACCEPTED


class KvPuts:
    """What a session with KV blocks can do beyond looking records up; :attr:`Session.kv`."""

    def __init__(
        self, geometry: KvGeometry, table: int, lock: threading.Lock, attachment: Callable[[], Attachment]
    ) -> None:
        # fixed after construction
        self.geometry = geometry
        self.table = table
        """Number of the KV table, for look-ups."""
        self._lock = lock
        self._attachment = attachment
        self._bytes = geometry.groups_per_block * geometry.record_bytes
        # guarded by _answering
        self._answering = threading.Condition()
        self._answer: messages.Message | None = None
        self._asked = 0
        self._lost = False
        # guarded by _lock
        self.epoch = 0
        """How many attachments there were before this one."""
        self.lives: Counter[int] = Counter()
        """How often each id was put: what its object ids stood for before are other records."""
        self._under_way: deque[tuple[int, int]] = deque()
        self._done = 0
        self._settled: list[Settled] = []

    @classmethod
    def of(cls, request: AttachRequest, lock: threading.Lock, attachment: Callable[[], Attachment]) -> "KvPuts | None":
        """The KV side of a session with this request, if it asks for one; ``lock`` guards ``attachment``."""
        return None if request.kv is None else cls(request.kv, len(request.stores), lock, attachment)

    def reserve(self, blocks: int) -> list[int]:
        """Ids of ``blocks`` more KV blocks.

        Raises:
            RefusedError: more than the session's quota, with the daemon's numbers.
            DaemonUnavailableError: nobody answers.
        """
        answer = self._ask(lambda number: messages.KvReserve(number, blocks))
        if not isinstance(answer, messages.KvReserved):
            raise DaemonUnavailableError("kv_reserve", answer.type, "block ids", "is the daemon of this version?")
        ids = [i for first, count in answer.ranges for i in range(first, first + count)]
        if len(ids) != blocks or len(set(ids)) != blocks or not all(0 <= i < self.geometry.max_blocks for i in ids):
            found, expected = f"{len(ids)} ids", f"{blocks} below {self.geometry.max_blocks}"
            raise DaemonUnavailableError("kv_reserve", found, expected, "is the daemon of this version?")
        return ids

    def release(self, ids: Sequence[int]) -> None:
        """Give ids back; returns when they may be granted again. Outside of steps, because the daemon waits for those.

        Raises:
            RefusedError, DaemonUnavailableError: as :meth:`reserve`.
        """
        if ids:
            ranges = [list(pair) for pair in _ranges(sorted(ids))]
            self._ask(lambda number: messages.KvRelease(number, ranges))

    def put(self, block: int, payload: NDArray[np.uint8]) -> bool:
        """Hand a block's records over to the daemon, if one of the four staging blocks is free.

        Args:
            block: an id of :meth:`reserve`, put once.
            payload: u8 [groups_per_block · record_bytes], copied.

        Returns:
            Whether it is under way. False: all staging blocks are taken, or nobody takes puts now.

        Raises:
            MisuseError: ``payload`` has another length.
        """
        if payload.nbytes != self._bytes:
            expected = f"{self._bytes} bytes"
            raise MisuseError("put", f"{payload.nbytes} bytes", expected, "put all records of one block")
        with self._lock:
            attachment = self._attachment()
            self._reap(attachment)
            staging = self._free_staging()
            if staging is None or not self._taking(attachment):
                return False
            at = int(attachment.block[attach_block.STAGING]) + staging * int(
                attachment.block[attach_block.STAGING_STRIDE]
            )
            ctypes.memmove(at, np.ascontiguousarray(payload).ctypes.data, self._bytes)
            self._under_way.append((staging, block))
            self.lives[block] += 1
            ring = attach_block.announce_put(attachment.block, staging, block)
        if ring:
            attachment.ring_doorbell()
        return True

    def put_waiting(self, block: int, payload: NDArray[np.uint8], deadline: float) -> bool:
        """As :meth:`put`, but wait for a free staging block until ``deadline`` (of ``time.monotonic``)."""
        while not self.put(block, payload):
            if not self._await_more(deadline):
                return False
        return True

    def settled(self) -> list[Settled]:
        """Puts that were settled since the last call."""
        with self._lock:
            self._reap(self._attachment())
            taken, self._settled = self._settled, []
        return taken

    def wait_settled(self, deadline: float) -> bool:
        """Wait until no put is under way; False at the deadline, or if nobody takes puts any more."""
        while True:
            with self._lock:
                self._reap(self._attachment())
                if not self._under_way:
                    return True
            if not self._await_more(deadline):
                return False

    def count_dropped(self, blocks: int = 1) -> None:
        """Count blocks that stay unrefined because nobody took them."""
        with self._lock:
            self._attachment().block[attach_block.PUTS_DROPPED] += np.uint64(blocks)

    def _await_more(self, deadline: float) -> bool:
        """Sleep until the daemon has settled more puts than were seen, for a nap at most; False at the deadline, or if
        nobody takes puts.
        """
        left = deadline - time.monotonic()
        with self._lock:
            attachment = self._attachment()
            if left <= 0 or not self._taking(attachment):
                return False
            block, done = attachment.block, self._done
            # One tick: the daemon wakes us, and keeps no slot for us.
            attach_block.announce_wait(block, 1)
            settled, address = attach_block.puts_done(block) != done, attach_block.puts_done_address(block)
        if not settled:
            # The map may go meanwhile: then the address is not ours, and the call returns, or sleeps for its nap.
            with contextlib.suppress(OSError):
                futex.wait(address, done & 0xFFFFFFFF, int(min(left, _NAP_SECONDS) * 1e9))
        with self._lock:
            if self._attachment() is attachment and self._taking(attachment):
                attach_block.end_wait(block)
        return True

    # --- called with _lock held --------------------------------------------------------------------------------------

    def _taking(self, attachment: Attachment) -> bool:
        return attachment.filling and bool(attachment.block[attach_block.ENABLED])

    def _reap(self, attachment: Attachment) -> None:
        block = attachment.block
        if not block[attach_block.ENABLED]:  # fenced, or closed and unmapped
            return
        done = attach_block.puts_done(block)
        for _ in range(min(done - self._done, len(self._under_way))):
            staging, put = self._under_way.popleft()
            self._settled.append(Settled(put, attach_block.put_result(block, staging)))
        self._done = done

    def _free_staging(self) -> int | None:
        taken = {staging for staging, _ in self._under_way}
        return next((s for s in range(layout.STAGING_BLOCKS) if s not in taken), None)

    def replaced(self) -> None:
        """Another attachment took over: ids and puts of the one before are gone."""
        self.epoch += 1
        # Also what was accepted and not yet told of: its number may soon be another block's.
        lost = [settled.block for settled in self._settled] + [block for _, block in self._under_way]
        self._settled = [Settled(block, layout.PUT_NONE) for block in lost]
        self._under_way.clear()
        self._done = 0
        with self._answering:
            self._lost = False

    # --- the keeper's thread -----------------------------------------------------------------------------------------

    def answered(self, message: messages.Message) -> bool:
        """Take an answer; False if it is none, or not to the newest question."""
        if not isinstance(message, messages.KvReserved | messages.KvReleased | messages.Refuse):
            return False
        with self._answering:
            if message.request != self._asked:
                return False
            self._answer = message
            self._answering.notify_all()
        return True

    def lost(self) -> None:
        """Nobody will answer."""
        with self._answering:
            self._lost = True
            self._answering.notify_all()

    def _ask(self, question: Callable[[int], messages.Message]) -> messages.KvReserved | messages.KvReleased:
        with self._answering:
            self._asked += 1
            self._answer = None
            message = question(self._asked)
            try:
                messages.send(self._attachment().connection, message)
            except OSError as error:
                raise self._nobody(message, str(error)) from error
            if not self._answering.wait_for(lambda: self._answer is not None or self._lost, _ANSWER_SECONDS):
                raise self._nobody(message, f"no answer in {_ANSWER_SECONDS:g} s")
            answer = self._answer
        if isinstance(answer, messages.Refuse):
            raise RefusedError(f"{message.type} ({answer.code})", answer.found, answer.expected, answer.remedy)
        if not isinstance(answer, messages.KvReserved | messages.KvReleased):
            raise self._nobody(message, "a hang-up")
        return answer

    def _nobody(self, message: messages.Message, found: str) -> DaemonUnavailableError:
        return DaemonUnavailableError(message.type, found, "an answer", "decoding goes on without these blocks")


def _ranges(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the runs in ascending ids."""
    first, count = ids[0], 0
    for i in ids:
        if i != first + count:
            yield first, count
            first, count = i, 0
        count += 1
    yield first, count
