"""What the kernels over discrete codes leave for each other: device memory that never moves.

:func:`~strataflux.kernels.gpu.fsq_attend.fsq_attend` leaves logits and *parts*
(:mod:`strataflux.kernels.fsq_attention`); :func:`~strataflux.kernels.gpu.fsq_merge.fsq_merge` puts them together. How
long a sequence is both read on the device: one captured chain serves every length.
"""

from typing import Final

import torch
from torch import Tensor

from strataflux.kernels.fsq import FsqGrid
from strataflux.kernels.fsq_attention import BLOCK_TOKENS

__all__ = ["MIX_HEADS", "FsqWork"]

MIX_HEADS: Final = 16
"""Heads that a block of threads of the second kernel has."""

_SPAN: Final = 64
_MIX_WARPS: Final = 6  # of a block of threads: two blocks take the registers of a multiprocessor
_MIX_SHARED: Final = 110 << 10  # two blocks of threads a multiprocessor


class FsqWork:
    """Shared by all layers of a step.

    Attributes:
        scores: [batch, blocks, heads, 64] float32, logits for powers of two, each kernel's in an order of its own.
        parts: [batch, heads, mix_splits, spans · 64] float32, sums of q - 8 relative to 2^tops; ``tops`` and ``totals``
            lack the last axis. A part without tokens has the top -inf.
        sums: [batch, shares, heads · blocks · 64] float32, logits before they are joined and normed, and ``squares``
            likewise; empty for one share.
        latent: [batch, heads, spans · 64] float32, the merged mean of q - 8.
    """

    def __init__(
        self, batch: int, heads: int, grid: FsqGrid, blocks: int, device: torch.device, *,
        shares: int = 1, score_splits: int | None = None, mix_splits: int | None = None,
    ) -> None:  # fmt: skip
        """Allocate for ``heads`` query heads and codes of ``grid``.

        Args:
            batch: sequences.
            heads: query heads.
            grid: of the codes.
            blocks: the most blocks of 64 tokens of a sequence.
            device: of everything.
            shares: of the decoder.
            score_splits: blocks of threads that share a KV head's tokens; None: as many as fill the device once.
            mix_splits: likewise those that share a sequence's tokens; None: two for each multiprocessor.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        # fixed after construction
        self.blocks, self.grid, self.shares = blocks, grid, shares
        self._processors, self._score_splits = processors, score_splits
        self.spans = -(-grid.width // _SPAN)
        self.spans_a_warp = min(2, self.spans)
        self.lanes = -(-self.spans // self.spans_a_warp)
        self.turns = max(1, _MIX_WARPS // self.lanes)
        self._stage = BLOCK_TOKENS * grid.nbytes + 4 * BLOCK_TOKENS * MIX_HEADS
        self.stages = max(1, min(4, _MIX_SHARED // (self._stage * self.turns)))
        filling = max(1, 2 * processors // batch)
        self.mix_splits = min(blocks, filling if mix_splits is None else mix_splits)
        # device memory

        def room(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.scores = room(batch, heads, blocks * BLOCK_TOKENS)
        self.sums, self.squares = (
            room(batch, shares if shares > 1 else 0, heads, blocks * BLOCK_TOKENS) for _ in range(2)
        )
        self.parts = room(batch, heads, self.mix_splits, self.spans * _SPAN)
        self.tops, self.totals = room(batch, heads, self.mix_splits), room(batch, heads, self.mix_splits)
        self.latent = room(batch, heads, self.spans * _SPAN)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.scores.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.scores.shape[1]

    @property
    def mix_blocks(self) -> int:
        """Blocks of threads of the second kernel."""
        return -(-self.heads // MIX_HEADS) * self.batch * self.mix_splits

    @property
    def mix_threads(self) -> int:
        """Threads of each."""
        return 32 * self.lanes * self.turns

    @property
    def mix_shared(self) -> int:
        """Bytes of shared memory of each: codes and logits on their way, later what warps that take turns leave."""
        kept = 4 * (32 * self.spans_a_warp + 5) * 32 * self.lanes * (self.turns - 1)
        return max(self.turns * self.stages * (self._stage + 8), kept)

    def score_splits(self, images: int) -> int:
        """Blocks of threads that share the tokens of a sequence for one of ``images`` decoders."""
        if self._score_splits is not None:
            return self._score_splits
        return max(1, min(self.blocks, self._processors // (images * self.batch)))
