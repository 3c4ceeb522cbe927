"""Parts of one token's attention as one output a head, turned back.

Formula. Parts are sums ``o_s`` of weighted values and totals ``z_s`` of weights relative to ``2^m_s``; with m the
largest m_s, ``out = Σ 2^(m_s - m) o_s / Σ 2^(m_s - m) z_s``, times the Hadamard matrix. A part that corrects others
(:mod:`strataflux.kernels.gpu.kv_refine`) has what it adds minus what it replaces, and goes in like any other.

A program handles one query head of a sequence. Parts are added in their order: equal parts give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.kv_turn import turn_head
from strataflux.kernels.gpu.kv_work import KvWork

__all__ = ["kv_merge", "merge_reference"]


def merge_reference(parts: Tensor, tops: Tensor, totals: Tensor) -> Tensor:
    """Outputs [..., D] float64 of parts [..., pieces, D], by definition; not turned back."""
    weights = torch.exp2(tops.double() - tops.double().amax(-1, keepdim=True))
    mixed = (parts.double() * weights[..., None]).sum(-2)
    return mixed / (totals.double() * weights).sum(-1, keepdim=True)


@triton.jit
def _merge(
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    changes: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    i, piece = tl.arange(0, D), tl.arange(0, PIECES)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = head * pieces
    top = tl.load(tops + first + piece, mask=piece < pieces, other=float("-inf"))
    most = tl.max(top, 0)
    there = top > float("-inf")
    total = tl.load(totals + first + piece, mask=there, other=0.0)
    total += tl.load(changes + first + piece, mask=there, other=0.0)
    total = tl.sum(tl.exp2(top - most) * total, 0)
    mixed = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, pieces, ROWS):
        row = start + tl.arange(0, ROWS)
        own = tl.load(tops + first + row, mask=row < pieces, other=float("-inf"))
        held = (own > float("-inf"))[:, None]
        part = tl.load(parts + (first + row)[:, None] * D + i[None, :], mask=held, other=0.0)
        mixed += part * tl.exp2(own - most)[:, None]
    turned = turn_head(tl.sum(mixed, 0)[None, :] / total, 1, D)
    tl.store(out + head * D + i, tl.reshape(turned, (D,)))


def kv_merge(work: KvWork, out: Tensor, *, early: bool = False) -> None:
    """Merge all parts. Queued on the current stream; no allocation.

    Args:
        work: parts of this step's attention in one layer.
        out: floats of any width, as many as queries: [batch, heads, head_dim], overwritten.
        early: start while the kernel before still runs.

    Raises:
        ValueError: ``out`` has another size.
    """
    if out.numel() != work.queries.numel():
        raise ValueError(f"out {list(out.shape)} for queries {list(work.queries.shape)}")
    pieces = work.splits + work.refiners
    _merge[(work.batch * work.heads,)](
        work.parts,
        work.tops,
        work.totals,
        work.changes,
        out,
        pieces,
        D=work.form.head_dim,
        PIECES=triton.next_power_of_2(pieces),
        ROWS=32,
        num_warps=4,
        **early_options(out, early),
    )
