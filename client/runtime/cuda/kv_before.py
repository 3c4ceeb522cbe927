"""Refinement of a low-bit KV cache by groups that steps before selected: nothing of it is waited for.

A layer is one launch of attention and one that merges. Attention refines from records that are in device memory, and
takes errands along for other layers (:mod:`~strataflux.kernels.gpu.kv_beside`): by the time of layer L the shares of
layer L - 1 are made, the groups of L - 2 are ranked, those of L - 3 listed, those of L - 4 asked for, and the records
of L + 1 brought, which its last step selected. So each record has most of a step to come. What the last layers leave to
be done, and the first one's records, are launches of their own at the end of the step, beside the head's product.

What was looked up inside a step and lies in device memory stays, whatever becomes of its slot.

States of a layer's list: empty → *listed* (its step's selection) → *fetched* (its groups refine from their rows) →
listed anew. What was fetched goes on refining until so many lists came since. :meth:`SelectedBefore.forget` empties
all.
"""

from fractions import Fraction
from typing import Final

from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda.kv_now import NewToken
from strataflux.client.runtime.cuda.lanes import MAIN, InlineLanes, Lanes, StreamLanes, join
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.cuda_build import has_fast_path
from strataflux.kernels.gpu.kv_attend import ERRAND_BLOCKS, kv_attend
from strataflux.kernels.gpu.kv_beside import Beside
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_work import Fetched, KvRecords, KvTiles, KvWork, default_splits
from strataflux.kernels.kv_encode import KvFormat

__all__ = ["SelectedBefore"]

_SIDE: Final = 1
_TURNS: Final = 4
"""Launches from attention to a listed selection, its own included: so many working memories take turns."""
_REFINERS: Final = 4
"""Programs that share a KV head's groups on the portable path."""


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
        splits = max(1, default_splits(device, owners, tiles, config.heads // owners) - ERRAND_BLOCKS)
        shape = (form, 1, config.heads, owners, tiles, device)
        # fixed after construction
        self._fraction, self._records, self._fast = fraction, records, has_fast_path(records.bases)
        self._lanes: Lanes = StreamLanes(device, 2, early=False) if device.type == "cuda" else InlineLanes()
        # device memory
        self._works = [KvWork(*shape, splits=splits, refiners=_REFINERS) for _ in range(_TURNS)]
        room = self._works[0].selected_groups(fraction, tiles)
        sizes = (owners, tiles * form.groups_per_tile, room, steps, form.record_bytes, device)
        self._layers = [Fetched.empty(*sizes) for _ in range(config.layers)]
        self._errands: dict[int, tuple[Beside, Tensor | None]] = {}

    def attend(self, layer: int, cache: KvTiles, new: NewToken, position: Tensor, out: Tensor) -> None:
        """As :meth:`SelectedNow.attend <strataflux.client.runtime.cuda.kv_now.SelectedNow.attend>`, refined by what the
        layer's last steps selected; do what is due for other layers.

        Raises:
            MisuseError: ``position`` is not the memory that it was before.
        """
        work, (beside, row) = self._works[layer % _TURNS], self._due(layer, cache, position)
        if not self._fast:
            beside.launch()
        kv_attend(*new, position, cache, work, self._layers[layer], row)
        kv_merge(work, out)
        if layer == len(self._layers) - 1:
            self._lanes.wait(_SIDE, self._lanes.mark(MAIN))
            for number in range(layer + 1, layer + 1 + _TURNS):
                rest, row = self._due(number, cache, position)
                self._lanes.run(_SIDE, lambda _, rest=rest, row=row: rest.launch(row))  # type: ignore[misc]

    def join(self) -> None:
        """The step's end may come: it waits for all that was begun."""
        join(self._lanes, {_SIDE})

    def forget(self) -> None:
        """Refine nothing in the next step: what was selected or fetched is of another sequence, or may be torn."""
        for layer in self._layers:
            layer.forget()

    def _due(self, number: int, cache: KvTiles, position: Tensor) -> tuple[Beside, Tensor | None]:
        """The errands of a layer's launch, and of those that follow the last one; made when they are first run."""
        if number not in self._errands:
            made = self._make(number, cache, position)
            self._errands[number] = made, made.row() if self._fast else None
        found = self._errands[number]
        if found[0].positions.data_ptr() != position.data_ptr():
            raise MisuseError("position", "another tensor than before", "the same memory in each step", "reuse it")
        return found

    def _make(self, number: int, cache: KvTiles, position: Tensor) -> Beside:
        layers, of_layer = self._layers, cache.kv_heads * cache.form.groups_per_tile

        def first(layer: int) -> int:
            return layer * of_layer

        def there(layer: int) -> bool:
            return 0 <= layer < len(layers)

        shared, ranked, listed, asked, brought = number - 1, number - 2, number - 3, number - 4, number + 1
        if number == len(layers) - 1 + _TURNS:
            brought = 0
        return Beside(
            position,
            cache,
            self._records,
            self._fraction,
            self._works[shared % _TURNS] if there(shared) else None,
            self._works[ranked % _TURNS] if there(ranked) else None,
            (self._works[listed % _TURNS], layers[listed].listed) if there(listed) else None,
            (layers[asked].listed, first(asked)) if there(asked) else None,
            (layers[brought], first(brought)) if there(brought) else None,
        )
