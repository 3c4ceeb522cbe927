"""What a product's launch does beside it: a graph with one stream, where refinement costs no launch and no join.

A product leaves the link and some room on the device idle. Its launch takes a few blocks more, and those run errands
for products to come: they *select* channels and look them up (:mod:`~strataflux.kernels.gpu.select` gives the formula),
*fetch* the records of an earlier selection into device memory (:mod:`~strataflux.kernels.gpu.fetch`), or *add* what was
fetched: ``y += scale ⊙ Σ x_i · (code_i - 8)`` over the records that were present (:mod:`strataflux.kernels.refine`).
Errands of one launch know nothing of each other: what one leaves is for a later launch.

An errand is 16 int64 in device memory: kind, its first block, its blocks, and the fields below in their order. Where
blocks are few, all errands share them, one after another. The fast path is CUDA C++ (errands.cuh, part of
lowbit_gemv.cu); where there is none, errands are launches of their own before the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strataflux.kernels.gpu.fetch import Staging, fetch
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, select_and_look_up
from strataflux.kernels.topk import CHUNK, quota

__all__ = ["Add", "Errand", "Errands", "Fetch", "Select"]

_FIELDS: Final = 13
_FETCHING_THREADS: Final = 2048
"""With 128 bytes under way in each they fill a link twice over."""
_COLUMN: Final = 512
"""Outputs that a block adds to at a time."""


@dataclass(frozen=True, eq=False)
class Select:
    """Select from ``x`` [width] float16, or from ``x ⊙ gain``, both float32; arguments as of
    :func:`~strataflux.kernels.gpu.select.select_and_look_up`.
    """

    x: Tensor
    gain: Tensor | None
    block: Tensor
    thresholds: Tensor
    selection: Selection
    table: int
    first_oid: int

    def __post_init__(self) -> None:
        expected = torch.float16 if self.gain is None else torch.float32
        if self.x.shape != (self.selection.width,) or self.x.dtype != expected or not self.x.is_contiguous():
            raise ValueError(f"x {list(self.x.shape)} {self.x.dtype}: expected [{self.selection.width}] {expected}")

    def wanted(self, threads: int) -> int:  # noqa: ARG002 (whatever its threads)
        """Blocks: one for each chunk."""
        return -(-self.selection.width // CHUNK)

    def kind_and_fields(self) -> tuple[int, ...]:
        """As errands.cuh reads them."""
        width, k = self.selection.width, self.selection.k
        gain = 0 if self.gain is None else self.gain.data_ptr()
        pointers = (self.block, self.thresholds, self.selection.channels, self.selection.addresses)
        last = quota(k, (width - 1) % CHUNK + 1)
        addresses = (self.x.data_ptr(), gain, *(t.data_ptr() for t in pointers))
        return 0, *addresses, self.first_oid, width, self.table, quota(k, CHUNK), last

    def run(self) -> None:
        """As launches of its own."""
        x = self.x if self.gain is None else self.x * self.gain
        select_and_look_up(x, self.block, self.thresholds, self.selection, self.table, self.first_oid, early=False)


@dataclass(frozen=True, eq=False)
class Fetch:
    """Fetch pieces ``begin`` … ``end`` - 1 of the records of an earlier selection, counted through all of them."""

    staging: Staging
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.staging.pieces:
            raise ValueError(f"pieces {self.begin} to {self.end}: there are {self.staging.pieces}")

    def wanted(self, threads: int) -> int:
        """Blocks of ``threads`` threads that fill the link."""
        return max(1, _FETCHING_THREADS // threads)

    def kind_and_fields(self) -> tuple[int, ...]:
        """As errands.cuh reads them."""
        staging = self.staging
        pointers = staging.selection.addresses.data_ptr(), staging.rows.data_ptr()
        return 1, *pointers, staging.record_pieces, staging.rows.shape[1] // 4, self.begin, self.end

    def run(self) -> None:
        """As launches of its own."""
        if self.begin == 0:  # nothing hinders a launch of its own from taking all of it
            fetch(self.staging, 64)


@dataclass(frozen=True, eq=False)
class Add:
    """Add the refinement of the input ``x`` [width] float16 to ``y`` [outputs] float32, which nothing else does
    meanwhile, from records that were fetched; ``scale`` [outputs] float32.
    """

    x: Tensor
    staging: Staging
    scale: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float16 or self.y.dtype != torch.float32 or self.y.shape != self.scale.shape:
            raise ValueError(
                f"x {self.x.dtype}, y {list(self.y.shape)} {self.y.dtype}, scale {list(self.scale.shape)}: expected "
                "float16, and twice [outputs] float32"
            )

    def wanted(self, threads: int) -> int:  # noqa: ARG002 (whatever its threads)
        """Blocks: one for each column of outputs."""
        return -(-self.y.numel() // _COLUMN)

    def kind_and_fields(self) -> tuple[int, ...]:
        """As errands.cuh reads them."""
        staging = self.staging
        selection, rows = staging.selection, staging.rows
        pointers = (self.x, selection.channels, selection.addresses, rows)
        counts = rows.shape[1], selection.channels.numel()
        return 2, *(t.data_ptr() for t in pointers), *counts, self.scale.data_ptr(), self.y.data_ptr(), self.y.numel()

    def run(self) -> None:
        """As launches of its own."""
        refine(self.y, self.x, self.staging.fetched, self.scale, RefinePlan(4096))


Errand = Select | Fetch | Add


class Errands:
    """The errands of one launch, in any order."""

    def __init__(self, items: Sequence[Errand]) -> None:
        """Keep them, and what they point to."""
        self.items = tuple(items)
        self._table: Tensor | None = None
        self._laid_out = (0, 0)
        self._blocks = 0

    def table(self, threads: int, room: int, device: torch.device) -> tuple[Tensor, int]:
        """The errands [count, 16] int64 on ``device`` as blocks of ``threads`` threads run them, and how many blocks
        those are: at most ``room``. Made on the first call; a captured graph needs it to be the same ever after.

        Raises:
            ValueError: another call had other threads or room.
        """
        if self._table is None:
            self._laid_out = threads, room
            rows, self._blocks = _lay_out(self.items, threads, room)
            self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        if self._laid_out != (threads, room):
            raise ValueError(f"{threads} threads, room {room}: these errands were laid out for {self._laid_out}")
        return self._table, self._blocks

    def run(self) -> None:
        """Run them as launches of their own. Queued on the current stream."""
        for item in self.items:
            item.run()


def _lay_out(items: Sequence[Errand], threads: int, room: int) -> tuple[list[list[int]], int]:
    wanted = [item.wanted(threads) for item in items]
    shared = sum(wanted) > room
    rows, first = [], 0
    for item, count in zip(items, wanted, strict=True):
        blocks = min(count, room)
        kind, *fields = item.kind_and_fields()
        rows.append([kind, 0 if shared else first, blocks, *fields, *[0] * (_FIELDS - len(fields))])
        first += blocks
    return rows, min(room, max(wanted)) if shared else first
