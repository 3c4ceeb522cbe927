"""Signals are put off, not lost, and every handler is where it was."""

import signal
import threading
from collections.abc import Iterator

import pytest

from strataflux.client.held_signals import held_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ToldError(Exception):
    """What the handlers of these tests raise."""


def tell(number: int, _frame: object) -> None:
    raise ToldError(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, tell) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_handled_at_the_end(number: signal.Signals) -> None:
    steps = []

    def interrupted() -> None:
        with held_signals():
            signal.raise_signal(number)
            steps.append("not interrupted")

    with pytest.raises(ToldError, match=str(int(number))):
        interrupted()
    assert steps == ["not interrupted"]
    assert [signal.getsignal(each) for each in SIGNALS] == [tell, tell]


def test_an_error_inside_passes_and_handlers_are_put_back() -> None:
    with pytest.raises(KeyError), held_signals():
        raise KeyError
    assert [signal.getsignal(each) for each in SIGNALS] == [tell, tell]


def test_each_of_several_reaches_a_handler_that_does_not_raise() -> None:
    seen: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: seen.append(number))
    with held_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert seen == []
    assert seen == [signal.SIGTERM, signal.SIGINT]


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with held_signals():
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_handler_that_raises_while_others_are_put_back_does_not_silence_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = signal.signal

    def early(number: int, handler: object) -> object:
        if handler is tell:
            signal.raise_signal(signal.SIGTERM)
        return real(number, handler)  # type: ignore[arg-type]

    with pytest.raises(ToldError), held_signals():
        monkeypatch.setattr(signal, "signal", early)
    monkeypatch.undo()
    for number in SIGNALS:
        with pytest.raises(ToldError):
            signal.raise_signal(number)


def test_another_thread_has_nothing_to_put_off() -> None:
    found = []

    def look() -> None:
        with held_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [tell]
