"""The thread that decodes: several sequences at once, one step of each in turn.

A job waits until fewer than the most sequences are active, then has one of its own. States, and what moves a job:

    WAITING    in the queue                        → ACTIVE when a place is free, gone by cancel
    ACTIVE     has a sequence, a step each round   → gone: finished, failed, or cancelled

Whatever ends it, its sequence is closed by the engine's thread at the end of that turn. Other threads only submit,
cancel and ask.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.runtime.generation import Sampling, choose_token, special_tokens
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.model import Counts, OpenSequence, SequenceSource
from strataflux.client.serve.text import OutgoingText

__all__ = ["Deliver", "Engine", "EngineState", "Event", "Failed", "Finished", "Job", "Limits", "Piece", "Work"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much an engine takes on."""

    sequences: int
    """Decoded at once at most."""
    waiting: int
    """Jobs in the queue at most."""


@dataclass(frozen=True)
class Work:
    """What to generate."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()

    @property
    def positions(self) -> int:
        """Of its sequence, at most."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class Piece:
    """More text."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end: ``stop`` (a stop text, or the model's own end) or ``length``."""

    reason: str
    tokens: int
    refined: bool
    """A daemon filled what missed, at the end."""
    lookups: int
    hits: int


@dataclass(frozen=True)
class Failed:
    """The end by an error."""

    error: Exception


Event = Piece | Finished | Failed
Deliver = Callable[[Event], object]
"""Takes the events of a job, in order, in the engine's thread; may not block. The last one is no :class:`Piece`."""


class Job:
    """Work that was submitted."""

    def __init__(self, work: Work, deliver: Deliver) -> None:
        # fixed after construction
        self.work = work
        self.deliver = deliver
        # set by any thread, once
        self.cancelled = False

    def tell(self, event: Event) -> None:
        """Deliver; whoever cannot take an event any more wants none."""
        try:
            self.deliver(event)
        except Exception:
            _LOG.warning("a client that cannot be told is given up", exc_info=True)
            self.cancelled = True


@dataclass(frozen=True)
class EngineState:
    """How busy an engine is; totals since it started."""

    active: int
    waiting: int
    jobs: int
    cancelled: int
    tokens: int
    refined: bool


class Engine:
    """Pairs: :meth:`start` / :meth:`stop`, :meth:`submit` / :meth:`cancel` (or the job's end)."""

    def __init__(self, model: SequenceSource, tokenizer: Tokenizer, limits: Limits, *, refine_prompt: bool) -> None:
        """Take over ``model``: it is closed at the end.

        Args:
            model: where sequences come from.
            tokenizer: of the model; its special tokens end an answer.
            limits: bounds.
            refine_prompt: take prompts token by token, each refined as when decoding; else in one pass, unrefined,
                during which no other sequence goes on.
        """
        # fixed after construction
        self._model = model
        self._tokenizer = tokenizer
        self._ends = special_tokens(tokenizer)
        self._limits = limits
        self._refine_prompt = refine_prompt
        self._thread = threading.Thread(target=self._run, name="strataflux-engine", daemon=True)
        # guarded by _changed
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._stopping = False
        self._jobs = self._cancelled = 0
        # the engine's thread; read by any
        self._active: list[_Running] = []
        self._tokens = 0
        self._counts = model.counts()

    def start(self) -> None:
        """Decode from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Fail what is under way, close the model and end the thread. Idempotent."""
        self.begin_stop()
        self._thread.join()

    def begin_stop(self) -> None:
        """Take no more jobs and fail those there are, soon."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    @property
    def alive(self) -> bool:
        """Jobs are taken and decoded."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, work: Work, deliver: Deliver) -> Job:
        """Queue ``work``.

        Raises:
            RequestError: the queue is full (429), or the engine stops (503).
        """
        job = Job(work, deliver)
        with self._changed:
            if not self.alive:
                raise _stopping()
            limits, under_way = self._limits, len(self._waiting) + len(self._active)
            if under_way >= limits.sequences + limits.waiting:
                found = f"{under_way} requests under way"
                expected = f"fewer than {limits.sequences} decoded and {limits.waiting} waiting"
                raise RequestError("queue", found, expected, "try again later", status=429, code="queue_full")
            self._waiting.append(job)
            self._jobs += 1
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants ``job`` any more; without effect after its end. Its sequence is closed soon."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._cancelled += 1

    def state(self) -> EngineState:
        """How busy it is now."""
        with self._changed:
            active, waiting = len(self._active), len(self._waiting)
            return EngineState(active, waiting, self._jobs, self._cancelled, self._tokens, self._counts.refined)

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with decoding_threads():
                while self._await_work():
                    for running in list(self._active):
                        self._turn(running)
        finally:
            with self._changed:
                self._stopping = True
                left, self._waiting = list(self._waiting), deque()
            for running in list(self._active):
                self._end(running, Failed(_stopping()))
            for job in left:
                job.tell(Failed(_stopping()))
            self._model.close()

    def _await_work(self) -> bool:
        """Sleep while there is nothing to do, then give free places to those that waited longest; False to stop."""
        with self._changed:
            while not (self._stopping or self._waiting or self._active):
                self._changed.wait()
            begun = []
            while not self._stopping and self._waiting and len(self._active) < self._limits.sequences:
                begun.append(_Running(self._waiting.popleft()))
                self._active.append(begun[-1])
            stopping = self._stopping
        for running in begun:
            self._begin(running)
        return not stopping

    def _begin(self, running: "_Running") -> None:
        work = running.job.work
        try:
            running.sequence = self._model.open(work.positions)
        except Exception as error:
            self._end(running, Failed(error))
            return
        running.pieces = self._decode(running, running.sequence, work)

    def _turn(self, running: "_Running") -> None:
        """One step of one sequence."""
        if running.job.cancelled:
            with self._changed:
                self._cancelled += 1
            self._end(running, None)
            return
        before = self._counts
        try:
            text = next(running.pieces)
        except StopIteration as stop:
            self._end(running, running.finished(stop.value, self._counts))
        except Exception as error:
            _LOG.exception("a request failed")
            self._counts = self._model.counts()  # what it looked up is nobody else's
            self._end(running, Failed(error))
        else:
            self._counts = self._model.counts()
            running.count(before, self._counts)
            if text:
                running.job.tell(Piece(text))

    def _end(self, running: "_Running", event: Event | None) -> None:
        running.close()
        with self._changed:
            self._active.remove(running)
        if event is not None:
            running.job.tell(event)

    def _decode(self, running: "_Running", sequence: OpenSequence, work: Work) -> Generator[str, None, str]:
        """Text, one piece (perhaps empty) a step; why it ended."""
        text = OutgoingText(self._tokenizer, work.stop)
        random = torch.Generator().manual_seed(work.sampling.seed)
        logits = yield from self._take_prompt(sequence, work.prompt)
        while True:
            token = choose_token(logits, work.sampling, random)
            if token in self._ends:
                yield text.finish()
                return "stop"
            running.tokens += 1
            self._tokens += 1
            yield text.push(token)
            if text.stopped:
                return "stop"
            if running.tokens == work.max_tokens:
                yield text.finish()
                return "length"
            logits = sequence.step(token)

    def _take_prompt(self, sequence: OpenSequence, prompt: tuple[int, ...]) -> Generator[str, None, Tensor]:
        if not self._refine_prompt:
            return sequence.prefill(prompt)
        for token in prompt[:-1]:
            sequence.step(token)
            yield ""
        return sequence.step(prompt[-1])


@dataclass(eq=False)
class _Running:
    """A job that has a place."""

    job: Job
    sequence: OpenSequence | None = None
    pieces: Iterator[str] = field(default_factory=lambda: iter(()))
    tokens: int = 0
    lookups: int = 0
    hits: int = 0

    def count(self, before: Counts, after: Counts) -> None:
        """A step was this job's alone."""
        self.lookups += after.lookups - before.lookups
        self.hits += after.hits - before.hits

    def finished(self, reason: str, counts: Counts) -> Finished:
        return Finished(reason, self.tokens, counts.refined, self.lookups, self.hits)

    def close(self) -> None:
        if self.sequence is not None:
            self.sequence.close()


def _stopping() -> RequestError:
    return RequestError("server", "it is stopping", "a server that runs", "try again later", status=503)
