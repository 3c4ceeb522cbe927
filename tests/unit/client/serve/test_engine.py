"""Jobs take turns, wait in a bounded queue, and leave nothing behind however they end. The model is a script."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.runtime.generation import Sampling
from strataflux.client.serve.engine import Engine, Event, Failed, Finished, Job, Limits, Piece, Work
from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.model import Counts
from tests.unit.client.conftest import TOKENS, TinySource

WATCHDOG_SECONDS = 60.0
TOKENIZER: Tokenizer = TinySource.tokenizer(TinySource(None))  # type: ignore[arg-type]  # it needs no dimensions
END = len(TOKENS) - 1
LETTERS = TOKENIZER.encode("abcdefgh").ids


@dataclass
class Script:
    """Sequences that say letter after letter. Steps go on only with leave, if ``gate`` is set."""

    log: list[str] = field(default_factory=list)
    open_now: int = 0
    gate: threading.Semaphore | None = None
    fail_at: int | None = None
    refuse: Exception | None = None
    end_after: int = 1000
    steps: int = 0
    closed: bool = False

    def open(self, positions: int) -> "Scripted":
        if self.refuse is not None:
            raise self.refuse
        self.open_now += 1
        return Scripted(self, f"{self.open_now}:{positions}")

    def counts(self) -> Counts:
        return Counts(10 * self.steps, 4 * self.steps, True)

    def close(self) -> None:
        self.closed = True


@dataclass
class Scripted:
    script: Script
    name: str
    said: int = 0
    closed: bool = False

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        self.script.log.append(f"{self.name} prefill {len(tokens)}")
        return self._logits()

    def step(self, token: int) -> Tensor:
        self.script.log.append(f"{self.name} step {token}")
        return self._logits()

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.script.open_now -= 1

    def _logits(self) -> Tensor:
        if self.script.gate is not None:
            assert self.script.gate.acquire(timeout=WATCHDOG_SECONDS)
        self.script.steps += 1
        if self.script.steps == self.script.fail_at:
            raise ValueError("a bug")
        logits = torch.zeros(len(TOKENS))
        logits[END if self.said == self.script.end_after else LETTERS[self.said % len(LETTERS)]] = 10.0
        self.said += 1
        return logits


class Client:
    """What a job delivers."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def next(self) -> Event:
        return self.events.get(timeout=WATCHDOG_SECONDS)

    def all(self) -> tuple[str, Event]:
        text = ""
        while isinstance(event := self.next(), Piece):
            text += event.text
        return text, event


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def made(script: Script, sequences: int = 2, waiting: int = 4, *, refine_prompt: bool = False) -> Engine:
        engines.append(Engine(script, TOKENIZER, Limits(sequences, waiting), refine_prompt=refine_prompt))
        engines[-1].start()
        return engines[-1]

    yield made
    for engine in engines:
        engine.stop()


def work(tokens: int, *stop: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Work:
    return Work(prompt, tokens, Sampling(), stop)


def submit(engine: Engine, asked: Work) -> tuple[Job, Client]:
    client = Client()
    return engine.submit(asked, client.events.put), client


def settle(engine: Engine, active: int) -> None:
    """Wait until so many are active."""
    waited = threading.Event()
    for _ in range(int(WATCHDOG_SECONDS * 1000)):
        if engine.state().active == active:
            return
        waited.wait(0.001)
    raise AssertionError(engine.state())


def test_text_usage_and_hits_of_a_job(make: Make) -> None:
    script = Script()
    _, client = submit(make(script), work(4))
    assert client.all() == ("abcd", Finished("length", 4, True, 40, 16))
    assert script.log == ["1:7 prefill 3", *(f"1:7 step {token}" for token in LETTERS[:3])]


def test_the_models_own_end_and_stop_texts(make: Make) -> None:
    engine = make(Script(end_after=2))
    assert submit(engine, work(9))[1].all() == ("ab", Finished("stop", 2, True, 30, 12))
    engine = make(Script())
    text, end = submit(engine, work(9, "de"))[1].all()
    assert (text, isinstance(end, Finished) and end.reason) == ("abc", "stop")


def test_prompts_are_refined_token_by_token_when_asked_for(make: Make) -> None:
    script = Script()
    submit(make(script, refine_prompt=True), work(1))[1].all()
    assert script.log == ["1:4 step 1", "1:4 step 2", "1:4 step 3"]


def test_two_jobs_take_turns(make: Make) -> None:
    script = Script(gate=threading.Semaphore(0))
    engine = make(script)
    _, first = submit(engine, work(4))
    settle(engine, 1)
    _, second = submit(engine, work(4))
    assert script.gate is not None
    script.gate.release(100)
    assert first.all()[0] == second.all()[0] == "abcd"
    names = [line.split()[0] for line in script.log]
    assert names[:6] in (["1:7", "2:7"] * 3, ["1:7", "1:7", "2:7", "1:7", "2:7", "1:7"])


def test_beyond_the_queue_jobs_are_refused_and_a_place_that_is_free_is_taken(make: Make) -> None:
    script = Script(gate=threading.Semaphore(0))
    engine = make(script, sequences=1, waiting=1)
    _, first = submit(engine, work(2))
    _, second = submit(engine, work(3))
    with pytest.raises(RequestError) as refused:
        engine.submit(work(1), lambda event: None)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert script.gate is not None
    script.gate.release(100)
    assert (first.all()[0], second.all()[0]) == ("ab", "abc")
    assert submit(engine, work(1))[1].all()[0] == "a"


def test_a_job_that_is_cancelled_gives_its_sequence_back_and_others_go_on(make: Make) -> None:
    script = Script(gate=threading.Semaphore(0))
    engine = make(script)
    job, gone = submit(engine, work(1000))
    assert script.gate is not None
    script.gate.release(1)
    assert gone.next() == Piece("a")
    _, other = submit(engine, work(3))
    engine.cancel(job)
    script.gate.release(100)
    assert other.all()[0] == "abc"
    settle(engine, 0)
    assert (script.open_now, engine.state().cancelled) == (0, 1)


def test_a_waiting_job_that_is_cancelled_never_begins(make: Make) -> None:
    script = Script(gate=threading.Semaphore(0))
    engine = make(script, sequences=1, waiting=1)
    _, first = submit(engine, work(1))
    settle(engine, 1)
    job, _ = submit(engine, work(1))
    engine.cancel(job)
    _, third = submit(engine, work(1))
    assert script.gate is not None
    script.gate.release(100)
    first.all()
    third.all()
    assert len(script.log) == 2


def test_a_bug_in_one_job_fails_that_job_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(fail_at=1)
    engine = make(script)
    _, end = submit(engine, work(3))[1].all()
    assert isinstance(end, Failed)
    assert "a bug" in str(end.error)
    assert submit(engine, work(2))[1].all() == ("ab", Finished("length", 2, True, 20, 8))  # its own steps alone
    assert script.open_now == 0
    assert "a request failed" in caplog.text


def test_a_sequence_that_cannot_be_opened_is_told(make: Make) -> None:
    refusal = RequestError("x", "y", "z", "w", status=503)
    engine = make(Script(refuse=refusal))
    assert submit(engine, work(3))[1].all() == ("", Failed(refusal))


def test_a_client_that_cannot_be_told_is_given_up_and_others_go_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no loop")

    script = Script()
    engine = make(script)
    engine.submit(work(1000), broken)
    assert submit(engine, work(3))[1].all()[0] == "abc"
    settle(engine, 0)
    assert script.open_now == 0
    assert caplog.text.count("given up") == 1


def test_stopping_fails_what_is_under_way_and_takes_no_more(make: Make) -> None:
    script = Script(gate=threading.Semaphore(0))
    engine = make(script, sequences=1)
    _, active = submit(engine, work(1000))
    settle(engine, 1)
    _, waiting = submit(engine, work(1000))
    engine.begin_stop()
    assert script.gate is not None
    script.gate.release(100)
    engine.stop()
    for client in (active, waiting):
        end = client.all()[1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestError)
        assert end.error.status == 503
    assert (script.open_now, script.closed) == (0, True)
    with pytest.raises(RequestError, match="stopping"):
        engine.submit(work(1), lambda event: None)
