"""Random layers of discrete codes, as kernels take them, and their attention by definition."""

from typing import NamedTuple

import torch
from torch import Tensor

from strataflux.kernels.fsq import FsqGrid
from strataflux.kernels.fsq_attention import FsqHeads, attend_codes, block_codes

__all__ = ["FsqCase", "make_fsq_case", "random_heads"]


class FsqCase(NamedTuple):
    """A batch of sequences in one layer."""

    heads: FsqHeads
    levels: Tensor
    """[batch, tokens, width] uint8."""
    codes: Tensor
    """[batch, blocks, 64 · bytes] uint8, of ``levels``."""
    lengths: Tensor
    """[batch] int32."""
    queries: Tensor
    """[batch, heads, head_dim] float16."""

    def exactly(self) -> Tensor:
        """[batch, heads, head_dim] float64."""
        rows = []
        for query, levels, length in zip(self.queries, self.levels, self.lengths.tolist(), strict=True):
            positions = torch.arange(length, device=levels.device)
            rows.append(attend_codes(query, levels[:length], positions, self.heads))
        return torch.stack(rows)


def random_heads(
    grid: FsqGrid, kv_heads: int, head_dim: int, normed: bool, device: torch.device, seed: int = 0
) -> FsqHeads:
    """Decoders whose keys have a few strong channels; frequencies of base 10,000."""
    made = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    strong = 1 + 3 * (torch.rand(kv_heads, head_dim, 1, generator=made) < 0.1)
    steps = 16 / grid.levels / (4.6 * grid.width**0.5)
    frequencies = 10000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    decoders = [noise(kv_heads, head_dim, grid.width) * steps * factor for factor in (strong, 1)]
    biases = [noise(kv_heads, head_dim) for _ in range(2)]
    norm = 1 + 0.2 * noise(head_dim) if normed else None
    return FsqHeads(grid, decoders[0], biases[0], decoders[1], biases[1], frequencies, norm).to(device)


def make_fsq_case(
    grid: FsqGrid,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
    head_dim: int,
    normed: bool,
    device: torch.device,
) -> FsqCase:
    """Random levels for sequences of ``lengths`` tokens; what lies beyond them is rubbish, not zero."""
    heads = random_heads(grid, kv_heads, head_dim, normed, device)
    made = torch.Generator().manual_seed(1)
    tokens = -(-max(lengths) // 64) * 64
    levels = (torch.rand(len(lengths), tokens, grid.width, generator=made) * grid.levels).to(torch.uint8).to(device)
    queries = (2 * torch.randn(len(lengths), kv_heads * group, head_dim, generator=made)).half().to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    return FsqCase(heads, levels, block_codes(grid.pack(levels)), counts, queries)
