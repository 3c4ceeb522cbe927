"""A prepared model that decodes on a device: one captured step a token, refined by a daemon or from pinned memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from strataflux.client.keeper import Event
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.prepare.prepared import PreparedModel, store_sections
from strataflux.client.runtime.cache import require_all_seen
from strataflux.client.runtime.cuda.attention import Attention, HalfCache
from strataflux.client.runtime.cuda.beside import N_LANES
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.lanes import InlineLanes, Lanes, StreamLanes
from strataflux.client.runtime.cuda.low_bit_cache import LowBitCache
from strataflux.client.runtime.cuda.maps import DeviceMaps
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, records_of
from strataflux.client.runtime.cuda.refinement import NoRefinement, Refinement
from strataflux.client.runtime.cuda.sampling import Sampler
from strataflux.client.runtime.cuda.session import DeviceSession
from strataflux.client.runtime.cuda.step import Step
from strataflux.client.runtime.generation import Sampling
from strataflux.client.runtime.models import SETS
from strataflux.kernels.topk import selected_count
from strataflux.proto.messages import StoreRef

__all__ = ["DeviceDecoder", "HitRate", "make_decoder"]

_KV_TABLE: Final = 1  # after the store's


@dataclass(frozen=True)
class HitRate:
    """Look-ups of a session's steps, or of all steps from a pinned store."""

    lookups: int
    hits: int

    @property
    def rate(self) -> float | None:
        """Hits per look-up; None before the first."""
        return self.hits / self.lookups if self.lookups else None


def make_decoder(
    model: DeviceModel,
    context: int,
    block: DeviceBlock | None,
    budget: Budget,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    *,
    early: bool = True,
    attention: Attention | None = None,
) -> GraphDecoder:
    """A decoder of ``model``, its step captured; refined from whatever ``block`` will show, or not at all.

    ``attention`` has ``context`` positions; None keeps keys and values in float16.

    Raises:
        MisuseError: heads without a kernel, or weights that cannot be refined.
    """
    device = model.device
    lanes: Lanes = InlineLanes()
    if device.type == "cuda":
        lanes = StreamLanes(device, N_LANES, early=early)
    refining = NoRefinement() if block is None else Refinement(model, block, 0, budget, lanes)
    if attention is None:
        attention = HalfCache(model.config, context, device)
    return GraphDecoder(Step(model, attention, refining, Sampler(sampling, device), lanes))


class DeviceDecoder:
    """Decodes one sequence of a prepared model. Pairs: construction / :meth:`close`, or ``with``."""

    def __init__(
        self,
        prepared: PreparedModel,
        model: DeviceModel,
        *,
        context: int,
        budget: Budget,
        sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
        early: bool = True,
        kv: KvOptions | None = None,
    ) -> None:
        """Capture a step of ``model``, which was loaded from ``prepared``; nothing is refined until :meth:`attach` or
        :meth:`pin`. ``kv`` says how keys and values are kept; None keeps them in float16.

        Raises:
            MisuseError: heads without a kernel, a layer with a window shorter than ``context`` and a ``kv`` that keeps
                none, or a store without records of channels.
        """
        if kv is not None:
            require_all_seen(model.config, context, "--kv")
        # fixed after construction
        self._prepared, self._device, self._budget, self._context = prepared, model.device, budget, context
        self._block = DeviceBlock(model.device)
        self._kv = kv
        self.cache = (
            None if kv is None else LowBitCache(model.config, context, self._device, kv, self._block, _KV_TABLE)
        )
        """The cache, if it is one in low bits."""
        self.decoder = make_decoder(model, context, self._block, budget, sampling, early=early, attention=self.cache)
        # what refines, at most one of them
        self._maps: DeviceMaps | None = None
        self._session: DeviceSession | None = None
        self._store: PinnedStore | None = None
        # changed by step
        self._chosen = 0

    def attach(self, runtime_dir: Path | None = None, on_event: Callable[[Event], None] | None = None) -> None:
        """Refine with what a daemon holds, from the next step on.

        Args:
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            on_event: told about what happens to the session, from another thread.

        Raises:
            DaemonUnavailableError: nobody answers. RefusedError: the daemon does not serve this store, or said no.
        """
        manifest, config = self._prepared.manifest, self._prepared.config
        counts = [selected_count(self._budget.k[name], config.set_shape(name)[1]) for name in SETS]
        self._maps = DeviceMaps(self._block, self._device)
        try:
            session = DeviceSession.attach_device(
                [StoreRef(manifest.digest, manifest.identity)],
                self._maps,
                selections_per_step=max(1, config.layers * sum(counts) + self._kv_selections()),
                runtime_dir=runtime_dir,
                on_event=on_event,
                kv=None if self._kv is None else self._kv.geometry(config, blocks_for(self._context)),
            )
        except BaseException:
            self._maps.close()
            raise
        self._connect(session)
        self._session = session

    def _kv_selections(self) -> int:
        """Token groups that the last step asks for at most: what was brought before is not looked up again."""
        if self._kv is None:
            return 0
        return replace(self._kv, kept_steps=1).demand(self._prepared.config, self._context).selections

    def _connect(self, session: DeviceSession) -> None:
        """Let the cache put its records there."""
        if self.cache is None or session.kv is None:
            return
        try:
            self.cache.connect(session.kv, session.kv.table)
        except BaseException:
            session.close()
            raise

    def pin(self, hot_bytes: int = 0) -> None:
        """Refine from the whole store, read into pinned memory beside the steps; ``hot_bytes`` of device memory are for
        the records that are used most.

        Raises:
            ContractError: the store is damaged. FailureError: there is not so much memory.
        """
        prepared = self._prepared
        sections = store_sections(prepared.config, prepared.sets)
        fill = records_of(prepared.store, prepared.manifest.digest)
        self._store = PinnedStore(sections, fill, self._block, hot_bytes=hot_bytes)

    def wait_until_pinned(self) -> None:
        """Wait until all of the store is there. Raises as :meth:`PinnedStore.refresh`."""
        if self._store is not None:
            self._store.wait()

    def step(self, token: int | None = None) -> int:
        """Append ``token``, or else the one chosen before; the next token, once the step is known to be right.

        Raises:
            ContextFull, MisuseError: as :meth:`GraphDecoder.launch`. FailureError: the pinned store could not be read.
        """
        appended = self._chosen if token is None else token
        if self._session is None:
            if self._store is not None:
                self._store.refresh()
            self.decoder.launch(appended)
        else:
            # before the session's step, which holds slots: it may encode a tile
            self.decoder.step.attention.begin_step(self.decoder.position)
            with self._session.step() as step:
                self.decoder.launch(appended)
            if not step.end():
                self._again(appended)
        self._chosen = self.decoder.token
        return self._chosen

    def advance(self, token: int) -> Tensor:
        """As :meth:`step`, but the logits [vocabulary] float32 of the next token, on the host."""
        self.step(token)
        return self.decoder.logits

    def hit_rate(self) -> HitRate:
        """Look-ups of weights so far."""
        if self._session is not None:
            stats = self._session.stats()
            return HitRate(stats.lookups - stats.kv_lookups, stats.hits - stats.kv_hits)
        return HitRate(*self._block.weight_lookups()) if self._store is not None else HitRate(0, 0)

    def kv_hit_rate(self) -> HitRate:
        """Look-ups of token groups so far."""
        if self._session is None:
            return HitRate(0, 0)
        stats = self._session.stats()
        return HitRate(stats.kv_lookups, stats.kv_hits)

    @property
    def name(self) -> str:
        """The device's name."""
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "this processor"

    @property
    def access(self) -> str:
        """How the device reaches records: see :class:`~strataflux.kernels.gpu.host_memory.Access`."""
        source = self._maps or self._store
        return "nothing" if source is None else source.access

    def close(self) -> None:
        """Leave the daemon, or give the memory back. Idempotent."""
        self.decoder.wait()
        if self._session is not None:
            self._session.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _again(self, token: int) -> None:
        # What the invalid step stored of its position is overwritten; those before it come from valid steps.
        assert self._maps is not None
        self._maps.show_nobody()
        self.decoder.reset(self.decoder.position - 1)
        self.decoder.launch(token)
        self.decoder.wait()
