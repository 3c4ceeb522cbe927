"""Queries, keys and values of one position from the outputs of ``qkv``: norms of heads, and rotation by position.

Formula. ``h`` is a head of ``y + late``. Query and key heads are normed where the model does that (``h / sqrt(mean(h²)
+ epsilon) ⊙ weight``), then turned by halves: ``h ⊙ cosine + h rolled by d/2 ⊙ sine`` with the rows of the rotary table
at this position. Values are taken as they are. ``late`` is set back to zero once it was read. Arithmetic is float32.

A program handles one head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options

__all__ = ["Heads", "split_heads", "split_heads_reference"]


class Heads(NamedTuple):
    """How the outputs of ``qkv`` are cut, and what turns them."""

    heads: int
    kv_heads: int
    cosine: Tensor
    """[positions, head_dim] float32."""
    sine: Tensor
    """[positions, head_dim] float32, first half negated."""
    query_norm: Tensor | None
    """[head_dim] float32; None where heads are not normed."""
    key_norm: Tensor | None
    epsilon: float


def split_heads_reference(y: Tensor, late: Tensor | None, form: Heads, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values), each [heads, head_dim] float64, by definition; nothing is changed."""
    d = form.cosine.shape[1]
    whole = y.double() if late is None else y.double() + late.double()
    parts = list(torch.split(whole.view(-1, d), [form.heads, form.kv_heads, form.kv_heads]))
    cosine, sine = form.cosine[position].double(), form.sine[position].double()
    for i, norm in enumerate((form.query_norm, form.key_norm)):
        if norm is not None:
            mean = parts[i].square().mean(-1, keepdim=True)
            parts[i] = parts[i] * torch.rsqrt(mean + form.epsilon) * norm.double()
        parts[i] = parts[i] * cosine + parts[i].roll(d // 2, -1) * sine
    return parts[0], parts[1], parts[2]


@triton.jit
def _split(
    y: tl.tensor,
    late: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    position: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    epsilon: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LATE: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < D
    other = (i + D // 2) % D
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.load(y + head * D + i, mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(y + head * D + other, mask=inside, other=0.0).to(tl.float32)
    if LATE:
        own += tl.load(late + head * D + i, mask=inside, other=0.0)
        pair += tl.load(late + head * D + other, mask=inside, other=0.0)
        tl.debug_barrier()  # all of the head is read before any of it is cleared
        tl.store(late + head * D + i, tl.zeros_like(own), mask=inside)
    if head >= heads + kv_heads:
        tl.store(values + (head - heads - kv_heads) * D + i, own, mask=inside)
    else:
        if NORM:
            norm = query_norm if head < heads else key_norm
            factor = 1.0 / tl.sqrt_rn(tl.sum(own * own, 0) / D + epsilon)
            own = own * factor * tl.load(norm + i, mask=inside, other=0.0)
            pair = pair * factor * tl.load(norm + other, mask=inside, other=0.0)
        row = tl.load(position).to(tl.int64) * D
        turned = own * tl.load(cosine + row + i, mask=inside) + pair * tl.load(sine + row + i, mask=inside)
        out = queries + head * D if head < heads else keys + (head - heads) * D
        tl.store(out + i, turned, mask=inside)


def split_heads(
    y: Tensor,
    late: Tensor | None,
    form: Heads,
    position: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    early: bool = False,
) -> None:
    """Cut ``y`` into heads. Queued on the current stream; no allocation.

    Args:
        y: [(heads + 2 · kv_heads) · head_dim] floats of any width.
        late: as long, float32, added and set to zero; or None.
        form: the model's.
        position: [1] int32 on the device, below the table's length.
        queries: [heads, head_dim] float16, overwritten; ``keys`` and ``values`` [kv_heads, head_dim] likewise.
        keys: see there.
        values: see there.
        early: start while the kernel before still runs.

    Raises:
        ValueError: shapes contradict each other.
    """
    d = form.cosine.shape[1]
    count = form.heads + 2 * form.kv_heads
    if y.numel() != count * d or queries.shape != (form.heads, d) or keys.shape != (form.kv_heads, d):
        raise ValueError(f"y {list(y.shape)}, queries {list(queries.shape)}, keys {list(keys.shape)}: not {form[:2]}")
    _split[(count,)](
        y,
        y if late is None else late,
        form.cosine,
        form.sine,
        form.cosine if form.query_norm is None else form.query_norm,
        form.cosine if form.key_norm is None else form.key_norm,
        position,
        queries,
        keys,
        values,
        form.heads,
        form.kv_heads,
        form.epsilon,
        D=d,
        BLOCK=triton.next_power_of_2(d),
        LATE=late is not None,
        NORM=form.query_norm is not None,
        num_warps=1,
        **early_options(y, early),
    )
