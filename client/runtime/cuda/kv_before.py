"""Refinement of a low-bit KV cache by groups that steps before selected: nothing of it is waited for.

What stands in a layer's way is one launch of attention, of which a few blocks refine from records that are in device
memory already. All else goes beside: on a lane of its own the layer's shares are ranked, its groups asked for, and the
records of a later layer fetched, which that layer's last step selected. So each record has nearly a step to come.

Of layer L + 2 the first launch waits for what layer L began beside it, so that two working memories take turns. The
first layers' records are fetched at the end of the step before, hence by its step's rules: they are looked up inside
it, and what lies in device memory afterwards stays, whatever becomes of their slots.

States of a layer's list: empty → *listed* (its step's selection) → *fetched* (its groups refine from their rows) →
listed anew. What was fetched goes on refining until so many lists came since. :meth:`SelectedBefore.forget` empties
all.
"""

from fractions import Fraction
from typing import Final

from torch import Tensor

from strataflux.client.runtime.cuda.kv_now import NewToken
from strataflux.client.runtime.cuda.lanes import MAIN, InlineLanes, Lanes, StreamLanes, join
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.gpu.kv_attend import kv_attend
from strataflux.kernels.gpu.kv_fetch import KvRecords, kv_fetch
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_select import kv_select
from strataflux.kernels.gpu.kv_work import Fetched, KvTiles, KvWork, default_splits
from strataflux.kernels.kv_encode import KvFormat

__all__ = ["SelectedBefore"]

_SIDE: Final = 1
_AHEAD: Final = 2
"""Layers between the launch that fetches a layer's records and the layer: working memories take as many turns."""
_REFINERS: Final = 4
"""Blocks of a KV head's attention that refine."""


class SelectedBefore:
    """Of one sequence. Within a step: :meth:`attend` for each layer in order, then :meth:`join`. One thread."""

    def __init__(
        self, config: ModelConfig, form: KvFormat, tiles: int, fraction: Fraction, steps: int, records: KvRecords
    ) -> None:
        """Allocate for sequences of up to ``tiles`` tiles; nothing was selected yet.

        Args:
            config: of the model.
            form: of the cache, with refinement.
            tiles: the most in low bits; at least 1.
            fraction: how many groups are selected, above 0.
            steps: how many steps' selections are refined, 1 or more.
            records: where they are looked up.
        """
        device, owners = records.bases.device, config.kv_heads
        splits = default_splits(device, owners, tiles, config.heads // owners)
        shape = (form, 1, config.heads, owners, tiles, device)
        # fixed after construction
        self._fraction, self._records = fraction, records
        self._lanes: Lanes = StreamLanes(device, 2, early=False) if device.type == "cuda" else InlineLanes()
        # device memory
        self._works = [KvWork(*shape, splits=max(1, splits - _REFINERS), refiners=_REFINERS) for _ in range(_AHEAD)]
        room = self._works[0].selected_groups(fraction, tiles)
        sizes = (owners, tiles * form.groups_per_tile, room, steps, form.record_bytes, device)
        self._layers = [Fetched.empty(*sizes) for _ in range(config.layers)]
        # while a step is queued
        self._due: dict[int, object] = {}

    def attend(self, layer: int, cache: KvTiles, new: NewToken, position: Tensor, out: Tensor) -> None:
        """As :meth:`SelectedNow.attend <strataflux.client.runtime.cuda.kv_now.SelectedNow.attend>`, refined by what the
        layer's last step selected; begin what the next one needs.
        """
        lanes, work = self._lanes, self._works[layer % _AHEAD]
        if (due := self._due.pop(layer, None)) is not None:
            lanes.wait(MAIN, due)
        kv_attend(*new, position, cache, work, self._layers[layer])
        lanes.wait(_SIDE, lanes.mark(MAIN))
        lanes.run(_SIDE, lambda _: self._prepare(layer, cache, work, position))
        self._due[layer + _AHEAD] = lanes.mark(_SIDE)
        kv_merge(work, out)

    def _prepare(self, layer: int, cache: KvTiles, work: KvWork, position: Tensor) -> None:
        """List this layer's groups, ask for them, and fetch the records of the layer that comes in a while."""
        of_layer = cache.kv_heads * cache.form.groups_per_tile
        listed, later = self._layers[layer].listed, (layer + _AHEAD) % len(self._layers)
        kv_select(position, work, self._fraction, listed)
        kv_fetch(cache, self._records, (listed, layer * of_layer), (self._layers[later], later * of_layer))

    def join(self) -> None:
        """The step's end may come: it waits for all that was begun."""
        join(self._lanes, {_SIDE})
        self._due.clear()

    def forget(self) -> None:
        """Refine nothing in the next step: what was selected or fetched is of another sequence, or may be torn."""
        for layer in self._layers:
            layer.forget()
