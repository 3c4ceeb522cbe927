"""Parts of attention to discrete codes as one output a head: merged in code space, then decoded once.

Formula. With m the largest top, ``latent = Σ 2^(m_s - m) a_s / Σ 2^(m_s - m) z_s`` and ``out = D_V latent + b_V``
(:mod:`strataflux.kernels.fsq_attention`); parts are added in their order, so equal parts give equal bits.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.fsq_decoder import FsqValues
from strataflux.kernels.gpu.fsq_work import FsqWork

__all__ = ["fsq_merge"]

_COLUMNS = tl.constexpr(32)  # of a program: many small ones, each with all parts in flight at once
_SPAN = tl.constexpr(64)


@triton.jit
def _merge(
    parts: tl.tensor, tops: tl.tensor, totals: tl.tensor, latent: tl.tensor, pieces: tl.tensor, spans: tl.tensor,
    PIECES: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    head, piece = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    i = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = head * pieces
    top = tl.load(tops + first + piece, mask=piece < pieces, other=float("-inf"))
    most = tl.max(top, 0)
    total = tl.sum(tl.exp2(top - most) * tl.load(totals + first + piece, mask=top > float("-inf"), other=0.0), 0)
    mixed = tl.zeros((ROWS, _COLUMNS), tl.float32)
    for start in range(0, pieces, ROWS):
        row = start + tl.arange(0, ROWS)
        own = tl.load(tops + first + row, mask=row < pieces, other=float("-inf"))
        held = (own > float("-inf"))[:, None]
        part = tl.load(parts + (first + row)[:, None] * (spans * _SPAN) + i[None, :], mask=held, other=0.0)
        mixed += part * tl.exp2(own - most)[:, None]
    tl.store(latent + head * (spans * _SPAN) + i, tl.sum(mixed, 0) / total)


@triton.jit
def _decode(
    latent: tl.tensor, decoder: tl.tensor, bias: tl.tensor, out: tl.tensor, heads: tl.tensor, spans: tl.tensor,
    D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = (head % heads // GROUP) * D + row
    width = spans * _SPAN
    i = tl.arange(0, WIDTH)
    rows = tl.load(decoder + at[:, None] * width + i[None, :], mask=(i < width)[None, :], other=0.0)
    added = tl.load(bias + at)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    mean = tl.load(latent + head * width + i, mask=i < width, other=0.0)
    tl.store(out + head * D + row, tl.sum(rows * mean[None, :], 1) + added)


def fsq_merge(work: FsqWork, values: FsqValues, out: Tensor) -> None:
    """Merge all parts and decode. Queued on the current stream; no allocation.

    Args:
        work: parts of this step's attention in one layer.
        values: of that layer's decoder.
        out: floats of any width, [batch, heads, head_dim], overwritten.

    Raises:
        ValueError: ``out`` has another size.
    """
    kv_heads, d, _ = values.decoder.shape
    if out.numel() != work.batch * work.heads * d:
        raise ValueError(f"out {list(out.shape)} for {work.batch} sequences of {work.heads} heads of {d} channels")
    count, pieces = work.batch * work.heads, work.mix_splits
    most, options = triton.next_power_of_2(pieces), early_options(out, True)
    _merge[(count, 2 * work.spans)](
        work.parts, work.tops, work.totals, work.latent, pieces, work.spans,
        PIECES=most, ROWS=min(most, 512), num_warps=8, **options,
    )  # fmt: skip
    _decode[(count, d // 8)](
        work.latent, values.decoder, values.bias, out, work.heads, work.spans,
        D=d, GROUP=work.heads // kv_heads, ROWS=8, WIDTH=triton.next_power_of_2(64 * work.spans),
        num_warps=4, **options,
    )  # fmt: skip
