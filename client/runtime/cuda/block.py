"""The attach block on the device: one array that captured kernels keep a pointer to, whoever is attached.

States: *nobody* (every look-up misses, and a step's begin and end touch only memory of this object) → *somebody*
(:meth:`DeviceBlock.show`) → *nobody* again. Contents change between launches only, with the device drained or on the
stream that launches.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from strataflux.client import attach_block as ab
from strataflux.proto import layout

__all__ = ["MOST_CHUNKS", "DeviceBlock"]

MOST_CHUNKS = layout.MAX_SEGMENTS * layout.SEGMENT_MAX_BYTES // layout.SEGMENT_MIN_BYTES
"""Chunks of 16 MiB that a cache's address range has at most."""


class DeviceBlock:
    """The block's cells as int64 on ``device``, long enough for any attachment."""

    def __init__(self, device: torch.device) -> None:
        """Nobody is attached yet."""
        self.tensor = torch.zeros(ab.BASES + MOST_CHUNKS + 1, dtype=torch.int64, device=device)
        self._pages = torch.zeros(3, 4096, dtype=torch.uint8, device=device)
        self.show_nobody()

    def show_nobody(self) -> None:
        """Let every look-up miss and every step end where nobody looks."""
        cells = np.zeros(self.tensor.numel(), np.uint64)
        cells[ab.DAEMON_PAGE : ab.PAGE + 1] = [self._pages[i].data_ptr() for i in range(3)]
        tables = cells[ab.TABLES : ab.BASES].reshape(-1, ab.TABLE_CELLS)
        tables[:, 2] = ab.WEIGHT_LOOKUPS  # where misses are counted; a 0 would be the cell ENABLED
        self._write(cells, 0)

    def show(self, block: ab.Block, bases: NDArray[np.uint64]) -> None:
        """Take over another attachment's block, with these bases, so that the next launch is the step it is in."""
        cells = np.zeros(self.tensor.numel(), np.uint64)
        cells[: ab.BASES] = block[: ab.BASES]
        cells[ab.BASES : ab.BASES + bases.size] = bases
        # The graph's first node counts the step that the host has begun already.
        cells[ab.STEP] = (int(block[ab.STEP]) - 1) & 0xFFFFFFFF
        self._write(cells, 0)

    def set_bases(self, bases: NDArray[np.uint64]) -> None:
        """Other parts of the cache are reachable now: u64 [chunks + 1], as in the client's block."""
        self._write(bases, ab.BASES)

    def set_enabled(self, enabled: bool) -> None:
        """Let look-ups hit, or all of them miss."""
        self._write(np.array([enabled], np.uint64), ab.ENABLED)

    def weight_lookups(self) -> tuple[int, int]:
        """Look-ups of weights that kernels counted since somebody was shown, and hits among them."""
        lookups, hits = self.tensor[ab.WEIGHT_LOOKUPS : ab.WEIGHT_LOOKUPS + 2].tolist()
        return lookups, hits

    def _write(self, cells: NDArray[np.uint64], at: int) -> None:
        self.tensor[at : at + cells.size].copy_(torch.from_numpy(cells.view(np.int64)))
