"""Score one text five ways, each with a sentence of its own, and look at what is left afterwards.

Each refined row has its own daemon, started for it: both begin with an empty cache, and bytes read are of one row.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Protocol

from tokenizers import Tokenizer

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.control import Control
from strataflux.client.demo.sentence import PROMPT, SENTENCE_TOKENS, one_sentence
from strataflux.client.evaluate.compare import Row, cut_windows, reference_of, score_unrefined
from strataflux.client.evaluate.run import refined_row
from strataflux.client.evaluate.scoring import Reference, score
from strataflux.client.evaluate.text import python_prose
from strataflux.client.kv_options import KvOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.leftovers import Leftovers
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.source import ModelSource
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.schemes import store_slot_bytes
from strataflux.client.session_stats import SessionStats

__all__ = ["Demo", "DemoSettings", "Progress", "run_demo"]

_TEXT_CHARACTERS: Final = 16
"""More than any token of English prose has on average: so much text a token is enough."""


class Progress(Protocol):
    """Shows a wait: a label, and the number of steps if it is known; gives a function to call after some."""

    def __call__(self, label: str, total: int | None = None) -> AbstractContextManager[Callable[[], object]]:
        """Begin one."""


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does."""

    tokens: int = 512
    k: int = 32
    cache_share: float = 0.25
    """Of the store's records, as slots of the cache."""
    wait_seconds: float = 0.5
    kv: KvOptions = KvOptions(2, 2, fraction=Fraction(1, 16))  # noqa: RUF009 (immutable)
    """Of the row that has a low-bit KV cache, too. The text is short, so the share of groups is a large one."""


@dataclass(frozen=True)
class Demo:
    """Rows and sentences by name, and how they came about."""

    rows: dict[str, Row]
    sentences: dict[str, str]
    sessions: dict[str, SessionStats]
    """What each refined row's session counted while the text was scored."""
    kv: KvOptions
    kv_cache_bytes: int
    cache_bytes: int
    store_bytes: int
    leftovers: Leftovers
    seconds: dict[str, float]


def run_demo(source: ModelSource, prepared: PreparedModel, settings: DemoSettings, progress: Progress) -> Demo:
    """Run all of it.

    Raises:
        StrataFluxError, ContractError: what stood in the way; no daemon runs any more then.
    """
    run = _Run(prepared, settings, progress)
    run.score_reference(source)
    run.score_base()
    run.score_refined("refined_skip", Skip())
    run.score_refined("refined_wait", Wait(settings.wait_seconds))
    run.score_refined("refined_kv", Skip(), settings.kv)
    return Demo(
        rows=run.rows,
        sentences=run.sentences,
        sessions=run.sessions,
        kv=settings.kv,
        kv_cache_bytes=run.kv_cache_bytes,
        cache_bytes=run.cache_bytes,
        store_bytes=store_slot_bytes(prepared.config, prepared.sets),
        leftovers=run.leftovers,
        seconds=run.seconds,
    )


class _Run:
    """One demo in the making; its methods are called once each, in the order above."""

    def __init__(self, prepared: PreparedModel, settings: DemoSettings, progress: Progress) -> None:
        # fixed after construction
        self._prepared = prepared
        self._settings = settings
        self._progress = progress
        self._tokenizer: Tokenizer = prepared.tokenizer()
        self.cache_bytes = round(settings.cache_share * store_slot_bytes(prepared.config, prepared.sets))
        self.kv_cache_bytes = round(settings.cache_share * settings.kv.slots_of(prepared.config, settings.tokens))
        # grown row by row
        self._reference: Reference
        self._weights: DecoderWeights
        self.rows: dict[str, Row] = {}
        self.sentences: dict[str, str] = {}
        self.sessions: dict[str, SessionStats] = {}
        self.leftovers = Leftovers()
        self.seconds: dict[str, float] = {}

    def score_reference(self, source: ModelSource) -> None:
        text = python_prose()[: _TEXT_CHARACTERS * (self._settings.tokens + 1)]
        tokens = self._tokenizer.encode(text).ids
        started = time.monotonic()
        with self._progress("scoring the reference"):
            (window,) = cut_windows("pydoc_data.topics", tokens, self._settings.tokens, 1)
            weights = DecoderWeights.read(source)
            self._reference = reference_of(weights, window)
            self._add_unrefined("reference", weights, Row(self._reference.score))
        self.seconds["reference"] = time.monotonic() - started

    def score_base(self) -> None:
        started = time.monotonic()
        with self._progress("scoring the low-bit weights alone"):
            self._weights = DecoderWeights.read(self._prepared)
            self._add_unrefined("base", self._weights, Row(score_unrefined(self._weights, self._reference)))
        self.seconds["base"] = time.monotonic() - started

    def score_refined(self, name: str, miss: MissPolicy, kv: KvOptions | None = None) -> None:
        started = time.monotonic()
        daemon = PrivateDaemon(
            [self._prepared.store],
            weight_cache_bytes=self.cache_bytes,
            kv_cache_bytes=0 if kv is None else kv.daemon_bytes(self._prepared.config, self.kv_cache_bytes),
        )
        with self._progress("starting a daemon (its first start compiles)"):
            daemon.start()
        try:
            self._refine(name, miss, daemon, kv)
        finally:
            self.leftovers += daemon.stop()
        self.seconds[name] = time.monotonic() - started

    def _refine(self, name: str, miss: MissPolicy, daemon: PrivateDaemon, kv: KvOptions | None) -> None:
        where, tokens = daemon.runtime_dir, self._settings.tokens
        attached = RefinedModel.attach(
            self._prepared, self._weights, context=tokens, runtime_dir=where, k=self._settings.k, miss=miss, kv=kv
        )
        label = f"scoring {tokens} tokens, misses: {str(miss).partition(':')[0]}{'' if kv is None else ', low-bit KV'}"
        with (
            attached as model,
            Control(where) as control,
            self._progress(label, tokens) as advance,
            decoding_threads(),
        ):
            result = score(model.step, self._reference, advance)
            self.rows[name] = refined_row(result, model, control.stats().reads.bytes)
            self.sessions[name] = model.stats()
            model.reset()
            self.sentences[name] = one_sentence(model.step, self._tokenizer)

    def _add_unrefined(self, name: str, weights: DecoderWeights, row: Row) -> None:
        """Add the row, with the sentence and the speed of its steps: the text was scored in one pass."""
        prompt = self._tokenizer.encode(PROMPT).ids
        decoder = Decoder(weights, len(prompt) + SENTENCE_TOKENS)
        with decoding_threads():
            started = time.perf_counter()
            self.sentences[name] = one_sentence(decoder.step, self._tokenizer)
            speed = decoder.position / (time.perf_counter() - started)
        self.rows[name] = replace(row, tokens_per_second=speed)
