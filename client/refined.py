"""A prepared model that decodes with what a daemon holds: one session's step around each decoder's step.

A session may have several sequences, which take turns; :class:`RefinedModel` has one of its own unless told otherwise.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.ahead import GuessedChannels, ReadAhead
from strataflux.client.bundles import make_refiner
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.recording import describe_tables, session_kind
from strataflux.client.residents import UsesResidents
from strataflux.client.runtime.decoder import Decoder, ShiftingRefiner, Unrefined
from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.client.schemes import Scheme
from strataflux.client.session import Session
from strataflux.client.session_model import SessionModel
from strataflux.client.session_stats import SessionStats
from strataflux.client.throttle import Throttle
from strataflux.client.weights import MORE, step_demand
from strataflux.proto.messages import StoreRef
from strataflux.proto.store_format import open_store

__all__ = ["RefinedModel", "RefinedSession"]


class RefinedModel(SessionModel):
    """Decodes one sequence, each step refined with what is resident at that moment.

    Pairs: :meth:`attach` or :meth:`RefinedSession.open` / :meth:`close`.
    """

    def __init__(
        self,
        session: Session,
        weights: DecoderWeights,
        context: int,
        refiner: ShiftingRefiner | None,
        kv: RefinedKVCache | None,
        shift: Mapping[str, float] | None = None,
        leave: Callable[[], object] | None = None,
        ahead: ReadAhead | None = None,
    ) -> None:
        """Use :meth:`attach`. ``leave`` is what :meth:`close` does, by default closing the session."""
        # fixed after construction
        self._refiner = refiner
        self._switch = _Switch(refiner)
        self._ahead = ahead
        super().__init__(session, Decoder(weights, context, self._switch, kv, shift, ahead), leave)
        self.kv = kv
        """The cache, if it is one in low bits."""
        # changed by step
        self.steps = 0
        self.seconds = 0.0
        """Time spent in ``steps`` steps."""

    @classmethod
    def attach(
        cls,
        prepared: PreparedModel | None,
        weights: DecoderWeights,
        *,
        context: int,
        runtime_dir: Path | None = None,
        k: int | Mapping[str, int] | None = None,
        shift: Mapping[str, float] | None = None,
        scheme: Scheme | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
        kv: KvOptions | None = None,
        ahead: float = 0.0,
        residents: int = 0,
    ) -> "RefinedModel":
        """Attach to the daemon that serves the store of ``prepared``.

        Args:
            prepared: the model; None refines no weights.
            weights: its weights, read from it.
            context: positions of the key and value cache.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            k: channels per 1,024, for all projection sets or for each; None takes the prepared model's.
            shift: blocks of fetch lead or lag of each projection set; None takes the prepared model's.
            scheme: how MLPs are refined; None takes the prepared model's.
            miss: what to do about absent records.
            kv: a KV cache in low bits; None keeps it exact.
            ahead: how many blocks before a layer what it will probably select is asked for; 0 for never.
            residents: channels per 1,024 beyond ``k`` that refine weights, too, where they are present.

        Raises:
            MisuseError: ``k``, ``ahead`` or ``residents`` is out of range, or there is no such KV format, shift, or
                scheme in the store.
            DaemonUnavailableError: nobody answers. RefusedError: the daemon does not serve this store, or said no.
        """
        session = RefinedSession.attach(
            prepared,
            weights,
            context=context,
            runtime_dir=runtime_dir,
            k=k,
            shift=shift,
            scheme=scheme,
            miss=miss,
            kv=kv,
            ahead=ahead,
            residents=residents,
        )
        try:
            return session.open(context, alone=True)
        except BaseException:
            session.close()
            raise

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Take ``tokens`` into an empty cache in one pass, unrefined; logits [vocabulary] of the next one.

        Raises:
            ContextFull, MisuseError: as :meth:`Decoder.prefill`.
        """
        return self._decoder.prefill(tokens)

    def step(self, token: int) -> Tensor:
        """As :meth:`SessionModel.step`, timed."""
        started = time.perf_counter()
        logits = super().step(token)
        if self._ahead is not None:
            self._ahead.end_step()
        self.seconds += time.perf_counter() - started
        self.steps += 1
        return logits

    @property
    def residents(self) -> int:
        """Channels that refined without having been selected so far, over all sequences of the session."""
        return self._refiner.residents if isinstance(self._refiner, UsesResidents) else 0

    def _refine(self, on: bool) -> None:
        self._switch.on = on
        if self._ahead is not None:
            self._ahead.on = on
        if self.kv is not None:
            self.kv.refining = on


class RefinedSession:
    """A session of one model and the sequences that are decoded in it, one step of one of them at a time.

    Pairs: :meth:`attach` / :meth:`close`, :meth:`open` / :meth:`RefinedModel.close`. One thread at a time.
    """

    def __init__(
        self,
        session: Session,
        weights: DecoderWeights,
        refiner: ShiftingRefiner | None,
        shift: Mapping[str, float] | None,
        cache: Callable[[int], RefinedKVCache] | None,
        ahead: float = 0.0,
        renews: bool = False,
    ) -> None:
        """Use :meth:`attach`. ``cache`` makes the KV cache of a sequence of so many positions; None: an exact one.
        ``renews``: steps let go of slots every few layers though nothing is asked for ahead.
        """
        # fixed after construction
        self._session = session
        self._weights = weights
        self._refiner = refiner
        self._cache = cache
        self._shift = shift
        self._blocks_ahead = ahead
        self._renews = renews
        self._throttles = (Throttle(), Throttle())

    @classmethod
    def attach(
        cls,
        prepared: PreparedModel | None,
        weights: DecoderWeights,
        *,
        context: int,
        sequences: int = 1,
        runtime_dir: Path | None = None,
        k: int | Mapping[str, int] | None = None,
        shift: Mapping[str, float] | None = None,
        scheme: Scheme | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
        kv: KvOptions | None = None,
        ahead: float = 0.0,
        residents: int = 0,
    ) -> "RefinedSession":
        """As :meth:`RefinedModel.attach`, for up to ``sequences`` sequences of ``context`` positions at once."""
        demands = [] if prepared is None else [step_demand(prepared, k, shift, scheme)]
        demands += [] if kv is None else [kv.demand(weights.config, context)]
        blocks = sequences * blocks_for(context)
        selections = sum(demand.selections for demand in demands)
        largest = max((d.largest_set_bytes for d in demands), default=0)
        session = session_kind().attach(
            [] if prepared is None else [StoreRef(prepared.manifest.digest, prepared.manifest.identity)],
            selections_per_step=max(1, ceil(selections * (1 + MORE)) if ahead else selections),
            largest_set_bytes=largest if isinstance(miss, Wait) else 0,
            runtime_dir=runtime_dir,
            miss=miss,
            kv=None if kv is None else kv.geometry(weights.config, blocks),
            client=_label(prepared, shift, scheme),
        )
        try:
            sections = None if prepared is None else lambda: open_store(prepared.store).sections
            describe_tables(session, sections, weights.config.layers, weights.config.kv_heads)
            refiner = None if prepared is None else make_refiner(session, 0, prepared, k, scheme, residents)
            seconds = miss.deadline_seconds if isinstance(miss, Wait) else 0.0
            cache = None if kv is None else _cache_maker(session, weights.config, blocks, kv, seconds)
            if shift is None and prepared is not None:
                shift = prepared.manifest.shift
            return cls(session, weights, refiner, shift, cache, ahead, bool(residents))
        except BaseException:
            session.close()
            raise

    def open(self, context: int, *, alone: bool = False) -> RefinedModel:
        """An empty sequence of up to ``context`` positions; the session ends with it if it is ``alone`` in it.

        Raises:
            MisuseError: the pool of KV blocks has no room for it.
        """
        kv = None if self._cache is None else self._cache(context)
        give_back: Callable[[], object] = (lambda: None) if kv is None else kv.close
        leave = self.close if alone else give_back
        ahead = self._read_ahead(kv) if self._blocks_ahead or self._renews else None
        return RefinedModel(self._session, self._weights, context, self._refiner, kv, self._shift, leave, ahead)

    def _read_ahead(self, cache: RefinedKVCache | None) -> ReadAhead:
        refiner = self._refiner if isinstance(self._refiner, GuessedChannels) else None
        table = 0 if self._session.kv is None else self._session.kv.table
        return ReadAhead(self._session, self._blocks_ahead, self._throttles, refiner, cache, table)

    def stats(self) -> SessionStats:
        """Counts and state of the session, over all its sequences."""
        return self._session.stats()

    def close(self) -> None:
        """Leave the daemon; sequences that are open may not be stepped any more. Idempotent."""
        self._session.close()


def _cache_maker(
    session: Session, config: ModelConfig, capacity: int, options: KvOptions, wait_seconds: float
) -> Callable[[int], RefinedKVCache]:
    """Makes caches that share a pool of ``capacity`` blocks."""
    blocks = KvBlocks(config, options.form(config.head_dim), capacity, session.kv)
    table = 0 if session.kv is None else session.kv.table
    early = session if options.select_lag else None
    last = table, wait_seconds, early, options.kept_steps
    return lambda context: RefinedKVCache(blocks, context, options.fraction, session, *last)


def _label(prepared: PreparedModel | None, shift: Mapping[str, float] | None, scheme: Scheme | None) -> str:
    """What a session is called in the daemon's listings: shifts in the order of the sets, and bundles, if any."""
    if prepared is None:
        return "strataflux"
    blocks = (prepared.manifest.shift if shift is None else shift).values()
    bundles = (prepared.manifest.mlp_scheme if scheme is None else scheme) == "bundles"
    shifted = f" shift={','.join(f'{one:g}' for one in blocks)}" if any(blocks) else ""
    return f"strataflux{shifted}{' mlp=bundles' if bundles else ''}"


class _Switch:
    """A refiner that can be turned off for a step."""

    def __init__(self, refiner: ShiftingRefiner | None) -> None:
        self.on = True
        self._off = Unrefined()
        self._refiner: ShiftingRefiner = refiner or self._off

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        (self._refiner if self.on else self._off).begin(layer, set_index, x)

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        (self._refiner if self.on else self._off).refine(layer, set_index, x, y)
