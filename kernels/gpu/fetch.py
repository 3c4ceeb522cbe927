"""Fetch selected records from host memory into device memory, ahead of the product that uses them (fetch lead).

Formula. Record i of a selection is copied to row i of a staging area, and its address becomes that row's; an absent
record keeps address 0. What refines afterwards reads device memory and needs no link.

The link is full from about 80 KiB in flight: a program copies pieces of 4 KiB, each as one block of 16-byte loads.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from strataflux.kernels.gpu.select import Selection

__all__ = ["Staging", "fetch"]

_WORDS: Final = 1024


class Staging:
    """Room for one selection's records on the device, and the selection as the product will see it.

    Attributes:
        rows: [selected, words] int32, a record a row.
        selection: channels as selected; addresses of rows, 0 where a record was absent.
    """

    def __init__(self, k: int, width: int, record_bytes: int, device: torch.device) -> None:
        self.selection = Selection(k, width, device)
        words = -(-record_bytes // 256) * 64  # rows begin at multiples of 256 bytes, as slots do
        self.rows = torch.zeros(self.selection.channels.numel(), words, dtype=torch.int32, device=device)


@triton.jit
def _fetch(
    channels: tl.tensor,
    addresses: tl.tensor,
    rows: tl.tensor,
    staged_channels: tl.tensor,
    staged_addresses: tl.tensor,
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
            tl.store(staged_channels + record, tl.load(channels + record))
            tl.store(staged_addresses + record, tl.where(address != 0, row.to(tl.int64), 0))


def fetch(selection: Selection, staging: Staging, record_bytes: int, programs: int) -> None:
    """Copy the records of ``selection`` that are present. Queued on the current stream; no allocation.

    Args:
        selection: of this step; its records stay where they are until the step ends.
        staging: overwritten; of the same budget and width.
        record_bytes: of each record.
        programs: at most so many programs.

    Raises:
        ValueError: the staging area is another selection's.
    """
    count = selection.channels.numel()
    if staging.selection.channels.numel() != count or 4 * staging.rows.shape[1] < record_bytes:
        raise ValueError(
            f"{count} records of {record_bytes} bytes: the staging area has {list(staging.rows.shape)} words"
        )
    if not count:
        return
    used = -(-record_bytes // 4)
    units = count * triton.cdiv(used, _WORDS)
    _fetch[(min(programs, units),)](
        selection.channels,
        selection.addresses,
        staging.rows,
        staging.selection.channels,
        staging.selection.addresses,
        count,
        staging.rows.shape[1],
        used,
        WORDS=_WORDS,
        num_warps=4,
    )
