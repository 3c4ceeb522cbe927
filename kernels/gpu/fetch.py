"""Fetch selected records from host memory into device memory, ahead of the product that uses them.

Formula. Record i of a selection is copied to row i of a staging area, and its address becomes that row's; an absent
record keeps address 0. What refines afterwards reads device memory and needs no link.

The link is full from about 80 KiB in flight: a program copies pieces of 4 KiB, each as one block of 16-byte loads.
This is the portable path; beside a product the same is an errand (:mod:`strataflux.kernels.gpu.errands`).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.gpu.select import Selection

__all__ = ["PIECE_BYTES", "Staging", "copy_records", "fetch"]

PIECE_BYTES: Final = 16
"""Slots, records in them and rows are whole pieces of so many bytes."""
_WORDS: Final = 1024


class Staging:
    """A selection, and room for its records on the device.

    Attributes:
        selection: of ``k`` of ``width`` channels.
        rows: [selected, words] int32, a record a row.
        fetched: channels as selected; addresses of rows, 0 where a record was absent.
    """

    def __init__(self, k: int, width: int, record_bytes: int, device: torch.device) -> None:
        self.record_bytes = record_bytes
        self.selection, self.fetched = Selection(k, width, device), Selection(k, width, device)
        self.fetched.channels = self.selection.channels
        words = -(-record_bytes // 256) * 64  # rows begin at multiples of 256 bytes, as slots do
        self.rows = torch.zeros(self.selection.channels.numel(), words, dtype=torch.int32, device=device)

    @property
    def record_pieces(self) -> int:
        """Pieces of one record."""
        return -(-self.record_bytes // PIECE_BYTES)

    @property
    def pieces(self) -> int:
        """Pieces of all records."""
        return self.selection.channels.numel() * self.record_pieces


@triton.jit
def _fetch(
    addresses: tl.tensor,
    rows: tl.tensor,
    fetched: tl.tensor,
    selected: tl.tensor,
    words: tl.tensor,
    used: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    pieces = tl.cdiv(used, WORDS)
    for unit in range(tl.program_id(0), selected * pieces, tl.num_programs(0)):
        record, piece = unit // pieces, unit % pieces
        address = tl.load(addresses + record)
        word = piece * WORDS + tl.arange(0, WORDS)
        # Slots and rows begin at multiples of 256 bytes, which the compiler cannot know.
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 256)
        row = tl.multiple_of(rows + record.to(tl.int64) * words, 64)
        inside = (word < used) & (address != 0)
        tl.store(row + word, tl.load(source + word, mask=inside, other=0), mask=inside)
        if piece == 0:
            tl.store(fetched + record, tl.where(address != 0, row.to(tl.int64), 0))


def fetch(staging: Staging, programs: int) -> None:
    """Copy the records of the staging area's selection that are present. Queued on the current stream; no allocation.

    Args:
        staging: its selection is of this step; the records stay where they are until the step ends.
        programs: at most so many programs.
    """
    count = staging.selection.channels.numel()
    if not count:
        return
    used = -(-staging.record_bytes // 4)
    _fetch[(min(programs, count * triton.cdiv(used, _WORDS)),)](
        staging.selection.addresses,
        staging.rows,
        staging.fetched.addresses,
        count,
        staging.rows.shape[1],
        used,
        WORDS=_WORDS,
        num_warps=4,
    )


@triton.jit
def _copy(sources: tl.tensor, targets: tl.tensor, words: tl.tensor, WORDS: tl.constexpr) -> None:
    # Slots begin at multiples of 256 bytes, which the compiler cannot know.
    source = tl.multiple_of(tl.load(sources + tl.program_id(0)).to(tl.pointer_type(tl.int32)), 256)
    target = tl.multiple_of(tl.load(targets + tl.program_id(0)).to(tl.pointer_type(tl.int32)), 256)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


def copy_records(sources: Tensor, targets: Tensor, size: int) -> None:
    """Copy whole slots, between steps. Queued on the current stream.

    Args:
        sources: [records] int64 addresses that the device reaches: of slots.
        targets: [records] int64 addresses in device memory, likewise; all different.
        size: bytes of a slot, a multiple of 256.
    """
    if sources.numel():
        _copy[(sources.numel(),)](sources, targets, size // 4, WORDS=_WORDS, num_warps=4)
