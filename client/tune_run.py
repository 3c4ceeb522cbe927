"""Tune a prepared model from its folder to its folder: read, measure, search, fit anew, keep.

The unquantized model is read first, for what it says about the held-out text, and is gone from memory before anything
is measured.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strataflux.cache_policy.miss import MissPolicy, Skip
from strataflux.client.errors import InputError
from strataflux.client.evaluate.compare import cut_windows, require_same_dimensions
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.candidates import Candidate, Timer, Timing
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.refinement import ladder_rungs
from strataflux.client.prepare.refit import refit, refit_steps, require_same_model
from strataflux.client.prepare.source import ModelSource, open_source
from strataflux.client.prepare.tune import Space, Tuned, tune
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.shifted import SHIFTS
from strataflux.client.schemes import stored_budgets, stored_schemes
from strataflux.client.tuning import DecodeTimer, keep, make_judge, selection_of

__all__ = ["SCORED", "Outcome", "Progress", "TuneSettings", "expected_measurements", "search_space", "tune_prepared"]

SCORED = 128
"""Scored tokens of a window."""

_CONFIRMING_ROUNDS = 4
"""How many times as long what came out is measured."""


class Progress(Protocol):
    """Shows a wait: a label, and the number of steps if it is known; gives a function to call after some."""

    def __call__(self, label: str, total: int | None = None) -> AbstractContextManager[Callable[[], object]]:
        """Begin one."""


@dataclass(frozen=True)
class TuneSettings:
    """How a model is tuned."""

    slowdown: float
    """The most a step may take longer than the base's, as a share."""
    dedicated: bool = False
    """Whether all refinement lies in host RAM and a GPU fetches it from there."""
    miss: MissPolicy = Skip()  # noqa: RUF009 (immutable)
    weight_cache_bytes: int = 1 << 30
    """Of the daemon's cache while measuring."""
    text: Path | None = None
    """To judge by; None takes prose of Python's own help. Its last windows are used: calibration takes the first."""
    windows: int = 2
    """Stretches of ``SCORED`` tokens to judge by."""
    tokens: int = 24
    """Pairs of steps of a measurement."""
    largest: int = 128
    """Largest budget to try."""
    search_seconds: float = 480.0
    """When to end the search with the best so far."""

    @property
    def shifted(self) -> bool:
        """Whether shifts are searched: where misses are skipped nothing waits that they could hide."""
        return self.dedicated or not isinstance(self.miss, Skip)


def search_space(prepared: PreparedModel, settings: TuneSettings) -> Space:
    """Schemes that the store serves; shifts, where they are searched, of all sets alike and then of each by itself."""
    schemes = stored_schemes(prepared.sets)
    if not settings.shifted:
        return Space(schemes=schemes, largest=settings.largest)
    return Space([(blocks,) * len(SETS) for blocks in SHIFTS], schemes, SHIFTS, settings.largest)


def expected_measurements(space: Space) -> int:
    """About as many as a search takes: four a combination, two rounds of varying, raising, and measuring again."""
    combinations = len(space.shifts) * len(space.schemes) + 2 * len(SETS) * max(0, len(space.varied) - 1)
    return 4 * combinations + 20


@dataclass(frozen=True)
class Outcome:
    """What came of tuning a model."""

    prepared: PreparedModel
    """As it lies in its folder now."""
    found: Tuned
    refitted: bool
    """Whether refinement values were fitted anew."""
    kl: float
    """Divergence on the held-out text with the values that are stored now."""


def tune_prepared(prepared: PreparedModel, reference: Path, settings: TuneSettings, progress: Progress) -> Outcome:
    """Search, fit anew what was fitted, and write all of it into the prepared model.

    Args:
        prepared: the model; not to be used afterwards.
        reference: the unquantized one.
        settings: of the search.
        progress: shows waits.

    Raises:
        InputError: the text is too short, the reference damaged, or what was fitted has no ladder to judge by.
        MisuseError: the slowdown is negative, or the reference is another model.
        DaemonUnavailableError, RefusedError: no daemon could be started for measuring.
    """
    _require_ladder(prepared)
    windows = _windows(prepared, settings)
    with progress("reading the models"):
        source = open_source(reference)
        expected = _expected(prepared, source, windows)
        low = DecoderWeights.read(prepared)
    found = _search(prepared, low, expected, settings, progress)
    published, refitted = _publish(prepared, source, found.chosen, progress)
    kl = make_judge(published, low, expected, laddered=False)(found.chosen) if refitted else found.kl
    return Outcome(published, found, refitted, kl)


def _require_ladder(prepared: PreparedModel) -> None:
    if prepared.fitted_budgets is None or ladder_rungs(prepared):
        return
    budgets = ", ".join(f"{name} {k}" for name, k in prepared.fitted_budgets.items())
    raise InputError(
        prepared.folder,
        f"values fitted for one budget alone ({budgets})",
        "a ladder of fits, by which to judge other budgets",
        "prepare it with --ladder auto, or without --fit",
    )


def _search(
    prepared: PreparedModel,
    low: DecoderWeights,
    expected: Sequence[Reference],
    settings: TuneSettings,
    progress: Progress,
) -> Tuned:
    space, text = search_space(prepared, settings), expected[0].tokens[: settings.tokens]
    daemon = PrivateDaemon([prepared.store], weight_cache_bytes=settings.weight_cache_bytes)
    with ExitStack() as stack:
        with progress("starting a daemon (its first start compiles)"):
            folder = stack.enter_context(daemon).runtime_dir
        advance = stack.enter_context(progress("measuring candidates", expected_measurements(space)))
        timer, longer = (
            _telling(DecodeTimer(prepared, low, text, folder, miss=settings.miss, rounds=rounds), advance)
            for rounds in (1, _CONFIRMING_ROUNDS)
        )
        until = time.monotonic() + settings.search_seconds
        return tune(
            timer,
            make_judge(prepared, low, expected),
            settings.slowdown,
            space,
            confirm=longer,
            expired=lambda: time.monotonic() >= until,
            alike=selection_of(prepared.config),
        )


def _publish(
    prepared: PreparedModel, source: ModelSource, chosen: Candidate, progress: Progress
) -> tuple[PreparedModel, bool]:
    """Fit at the chosen budgets, if anything was fitted for others and is to be refined, and keep the choice."""
    wanted = stored_budgets(chosen.budgets(), chosen.mlp, prepared.sets)
    if any(chosen.k) and prepared.fitted_budgets not in (None, wanted):
        with progress("fitting at these budgets, layer by layer", refit_steps(prepared)) as advance:
            shift = chosen.shifts()
            return refit(prepared, source, chosen.budgets(), chosen.mlp, advance, shift=shift), True
    keep(prepared, chosen)
    return open_prepared(prepared.folder), False


def _windows(prepared: PreparedModel, settings: TuneSettings) -> list[list[int]]:
    words, subject = (python_prose(), "pydoc_data.topics") if settings.text is None else (None, settings.text)
    ids = prepared.tokenizer().encode(read_text(Path(subject)) if words is None else words).ids
    return cut_windows(subject, ids[-settings.windows * (SCORED + 1) :], SCORED, settings.windows)


def _expected(prepared: PreparedModel, source: ModelSource, windows: Sequence[Sequence[int]]) -> list[Reference]:
    require_same_dimensions(source.config, prepared.config)
    if prepared.fitted_budgets is not None:
        require_same_model(prepared, source)  # which fitting anew would find out at the end
    exact = DecoderWeights.read(source)
    return [dense_reference(exact, window) for window in windows]


def _telling(timer: DecodeTimer, advance: Callable[[], object]) -> Timer:
    def measure(candidate: Candidate) -> Timing:
        timing = timer(candidate)
        advance()
        return timing

    return measure
