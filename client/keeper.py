"""The thread that keeps a session attached.

It blocks in recv(2) on the attach connection: a daemon's death wakes it at once and costs a step nothing, neither a
system call nor a poll. After a hang-up it attaches again, after pauses that double from 50 ms to 2 s, for as long as
the session lives. What it prepares (maps, another attachment) takes effect between two steps of the session.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from strataflux.client import attach_block
from strataflux.client.attach import Attachment, AttachRequest, attach, map_segments
from strataflux.client.errors import BusyError, StrataFluxError
from strataflux.proto import messages
from strataflux.proto.errors import ContractError

__all__ = [
    "BUSY_SECONDS",
    "PAUSE_FIRST_SECONDS",
    "PAUSE_LAST_SECONDS",
    "Event",
    "Keeper",
    "Owner",
    "attach_patiently",
]

_LOG: Final = logging.getLogger(__name__)
PAUSE_FIRST_SECONDS: Final = 0.05
PAUSE_LAST_SECONDS: Final = 2.0
BUSY_SECONDS: Final = 3.0
"""For so long, at least, a newcomer tries again while all places are taken: one that a session leaves is free once its
writes have ended and its slots are past their grace.
"""


def attach_patiently(request: AttachRequest, pause: Callable[[float], object]) -> Attachment:
    """As :func:`~strataflux.client.attach.attach`, but while the daemon is busy try again, after pauses that double.

    Args:
        request: what to ask for.
        pause: waits so many seconds.

    Raises:
        BusyError: it still was after ``BUSY_SECONDS``. Else as ``attach``.
    """
    waited, seconds = 0.0, PAUSE_FIRST_SECONDS
    while True:
        try:
            return attach(request)
        except BusyError as error:
            if waited >= BUSY_SECONDS:
                found = f"{error.found}, and so for {waited:.1f} s"
                raise BusyError(error.subject, found, error.expected, error.remedy) from error
        pause(seconds)
        waited += seconds
        seconds = min(2 * seconds, PAUSE_LAST_SECONDS)


@dataclass(frozen=True)
class Event:
    """Something that happened to a session: ``hung_up``, ``fenced``, ``reattach``, ``attached``, ``refused``,
    ``draining``, ``segments_added`` or ``segment_retiring``.
    """

    kind: str
    detail: str = ""


class Owner(Protocol):
    """What a keeper asks of its session. Called from the keeper's thread."""

    def lost(self) -> None:
        """Nothing is filled any more."""

    def replace(self, attachment: Attachment) -> None:
        """Go on with ``attachment``, from the next step on; the session closes the one before."""

    def between_steps(self, change: Callable[[], None]) -> None:
        """Run ``change``, which may not raise, now if no step is open, else at its end."""

    def answered(self, message: messages.Message) -> bool:
        """Take an answer to a question about KV blocks; False if nobody asked."""


class Keeper:
    """Pairs: :meth:`start` / :meth:`stop`."""

    def __init__(
        self,
        request: AttachRequest,
        attachment: Attachment,
        owner: Owner,
        on_event: Callable[[Event], None] | None,
        pause: Callable[[float], object] | None,
    ) -> None:
        # fixed after construction
        self._request = request
        self._owner = owner
        self._on_event = on_event
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._thread = threading.Thread(target=self._run, name="strataflux-session", daemon=True)
        # guarded by _lock
        self._lock = threading.Lock()
        self._attachment = attachment

    def start(self) -> None:
        """Watch the connection from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up and end the thread, unless called from it; the session closes the attachment."""
        with self._lock:
            self._stopping.set()
            self._attachment.hang_up()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def forget_in_child(self) -> None:
        """After fork there is no thread; the newest attachment may not have reached the session yet."""
        self._attachment.close()

    def _run(self) -> None:
        while True:
            ended = self._listen(self._attachment)
            self._attachment.ended = True
            self._attachment.filling = False
            if self._stopping.is_set():
                return
            self._owner.lost()
            self._tell(ended)
            again = self._attach_again()
            if again is None:
                return
            with self._lock:
                self._attachment = again
                if self._stopping.is_set():
                    again.hang_up()
            self._owner.replace(again)
            self._tell(Event("attached", f"generation {again.welcome.generation}"))

    def _listen(self, attachment: Attachment) -> Event:
        """Handle messages until the attachment is over; what ended it."""
        while True:
            try:
                received = messages.receive(attachment.connection)
            except (OSError, ContractError) as error:
                _LOG.info("the attach connection broke: %s", error)
                received = None
            if received is None:
                # After stop() the maps may be gone already: the session may be closed from on_event.
                fenced = not self._stopping.is_set() and attach_block.is_fenced(attachment.block)
                return Event("fenced" if fenced else "hung_up")
            message, descriptors = received
            if isinstance(message, messages.Reattach):
                return Event("reattach", message.reason)
            self._handle(attachment, message, descriptors)

    def _handle(self, attachment: Attachment, message: messages.Message, descriptors: list[int]) -> None:
        if isinstance(message, messages.SegmentsAdded):
            self._add(attachment, message, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(message, messages.SegmentRetiring):
            first_slot = message.first_slot
            self._owner.between_steps(lambda: attachment.hide(first_slot))
            self._tell(Event("segment_retiring", str(first_slot)))
        elif isinstance(message, messages.Draining):
            attachment.filling = False
            self._tell(Event("draining"))
        elif not self._owner.answered(message):
            _LOG.warning("a message of type %s was not expected and is ignored", message.type)

    def _add(self, attachment: Attachment, message: messages.SegmentsAdded, descriptors: list[int]) -> None:
        try:
            added = map_segments(message.segments, descriptors, attachment.welcome.stamps_count)
        except ContractError as error:
            _LOG.warning("segments not mapped, their records miss: %s", error)
            return
        self._owner.between_steps(lambda: attachment.show(added))
        self._tell(Event("segments_added", str(len(added))))

    def _attach_again(self) -> Attachment | None:
        seconds = PAUSE_FIRST_SECONDS
        while True:
            self._pause(seconds)
            if self._stopping.is_set():
                return None
            try:
                return attach(self._request)
            except (StrataFluxError, ContractError) as error:
                self._tell(Event("refused", str(error)))
            seconds = min(2 * seconds, PAUSE_LAST_SECONDS)

    def _tell(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            _LOG.exception("on_event failed for %s", event)
