"""What is done beside attention for refinement to come: select, ask for records, and bring them.

A group that matters at one token mostly matters at the next. So what is refined may be selected a step before, and then
nothing of it needs to be waited for: its record is asked for at once (a *prefetch* of FORMAT.md: no look-up), has a
step's time to come, and is looked up and copied to the device shortly before the layer that needs it. Attention takes
it from there (:func:`~strataflux.kernels.gpu.kv_attend.kv_attend`). Records stay for some steps and go on refining:
that costs little, and what mattered lately may matter again. What is there already needs no look-up. Look-ups are
counted, stamped and, where something is absent still, asked for as in :mod:`strataflux.kernels.gpu.kv_refine`.

All of it is *errands* of an attention's launch, for other layers: some blocks more, and no launch and no stream of its
own. Products and attention fill a device; what ran beside them would hold up a block of theirs, and so all of them. A
selection takes three launches in a row. The fast path is CUDA C++ (kv_beside.cuh), where an errand is a row of 64-bit
numbers in device memory; on the portable one errands are launches of their own. Ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from strataflux.kernels.cuda_build import has_fast_path, load_function
from strataflux.kernels.gpu.kv_attend import ERRAND_BLOCKS
from strataflux.kernels.gpu.kv_fetch import ask_portable, bring_portable
from strataflux.kernels.gpu.kv_select import kv_select
from strataflux.kernels.gpu.kv_work import Fetched, KvRecords, KvTiles, KvWork, Listed
from strataflux.kernels.kv_encode import KvFormat

__all__ = ["Beside", "instance_name"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_THREADS: Final = 128


@dataclass(frozen=True, eq=False)
class Beside:
    """The errands of one launch; what is None is not done. What one leaves is for a later launch.

    Attributes:
        positions: as given to attention.
        cache: of any layer: its table, its format and its heads are read.
        records: where records are found.
        fraction: how many of the groups in tiles are selected, above 0 and at most 1.
        shares: attention with refiners left sums of groups there, in a launch before; its shares are overwritten.
        rank: shares were made there, in a launch before; its floors are overwritten.
        list: they were ranked there, in a launch before; and the list that is overwritten with the strongest groups.
        ask: a list, and the layer's first record in a block: ``layer · kv_heads · groups_per_tile``.
        bring: a layer's list is brought, into the rows whose turn it is by the step's number; and its first record.
    """

    positions: Tensor
    cache: KvTiles
    records: KvRecords
    fraction: Fraction
    shares: KvWork | None = None
    rank: KvWork | None = None
    list: tuple[KvWork, Listed] | None = None
    ask: tuple[Listed, int] | None = None
    bring: tuple[Fetched, int] | None = None

    def row(self) -> Tensor:
        """The errands as kv_beside.cuh reads them, int64 on the device. Not while a graph is captured."""
        cells = [*self._common(), *self._share_cells(), *self._rank_cells(), *self._list_cells(), *self._ask_cells()]
        cells += self._bring_cells()
        records = self.records
        cells += [records.block.data_ptr(), records.thresholds.data_ptr(), records.bases.data_ptr(), records.table]
        lists, stride = 1, 0
        if self.bring is not None:
            to = self.bring[0]
            lists, stride = to.numbers.shape[1] // to.listed.groups.shape[1], to.rows.shape[2]
        return torch.tensor([*cells, lists, stride], dtype=torch.int64).to(self.positions.device)

    def launch(self, row: Tensor | None = None, *, path: Literal["cuda", "triton"] | None = None) -> None:
        """Run them in launches of their own; ``row`` is what :meth:`row` gave, which the fast path needs. Queued on the
        current stream.
        """
        if path == "triton" or (path is None and not has_fast_path(self.positions)):
            self._run_portable()
            return
        assert row is not None
        heads = 1 if self.shares is None else self.shares.heads // self.cache.kv_heads
        owners = self.cache.table.shape[0] * self.cache.kv_heads
        function = load_function(_SOURCE, instance_name(self.cache.form, heads), self.positions.get_device())
        function.launch(ERRAND_BLOCKS * owners, _THREADS, [np.uint64(row.data_ptr()), np.int32(owners)], early=False)

    def _run_portable(self) -> None:
        if self.list is not None:  # shares are made and ranked on the way
            kv_select(self.positions, self.list[0], self.fraction, self.list[1], path="triton")
        if self.ask is not None:
            ask_portable(self.cache, self.records, *self.ask)
        if self.bring is not None:
            bring_portable(self.cache, self.records, *self.bring)

    def _common(self) -> Sequence[int]:
        work, table = self.shares, self.cache.table
        parts = (0, 0) if work is None else (work.splits, work.splits + work.refiners)
        return self.positions.data_ptr(), table.data_ptr(), self.cache.kv_heads, *parts, table.shape[1], self._room()

    def _room(self) -> int:
        """Groups that a list has room for: all lists the same."""
        if self.list is not None:
            return self.list[1].groups.shape[1]
        if self.ask is not None:
            return self.ask[0].groups.shape[1]
        return 0 if self.bring is None else self.bring[0].listed.groups.shape[1]

    def _share_cells(self) -> Sequence[int]:
        if self.shares is None:
            return [0] * 6
        work = self.shares
        return [t.data_ptr() for t in (work.sums, work.tops, work.totals, work.tile_tops, work.shares, work.bins)]

    def _rank_cells(self) -> Sequence[int]:
        fraction = self.fraction.numerator, self.fraction.denominator
        if self.rank is None:
            return [0, 0, 0, *fraction]
        return [*(t.data_ptr() for t in (self.rank.shares, self.rank.bins, self.rank.floors)), *fraction]

    def _list_cells(self) -> Sequence[int]:
        if self.list is None:
            return [0] * 5
        work, to = self.list
        return [t.data_ptr() for t in (work.shares, work.floors, *to)]

    def _ask_cells(self) -> Sequence[int]:
        return [0, 0, 0, 0] if self.ask is None else [*(t.data_ptr() for t in self.ask[0]), self.ask[1]]

    def _bring_cells(self) -> Sequence[int]:
        if self.bring is None:
            return [0] * 8
        to, first = self.bring
        return [*(t.data_ptr() for t in (*to.listed, to.numbers, to.held, to.where, to.rows)), first]


def instance_name(form: KvFormat, group: int) -> str:
    """The fast path's template instance for errands in a launch of their own."""
    return f"kv_beside<{group}, {form.groups_per_tile}, {form.record_bytes // 16}>"
