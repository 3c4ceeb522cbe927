"""Attention of one position to a float16 cache, its own key and value included.

Formula. For each query head, ``out = Σ_j softmax_j(q · k_j / sqrt(d)) v_j`` over positions 0 … now, where key head
``h // group`` belongs to query head h. This position's key and value come beside the cache and are stored into it. A
cache that is a *ring* of W rows holds position j in row j mod W, and positions now - W + 1 … now are attended to.

A program handles one key head (all its query heads are rows of one small matrix) and every ``splits``-th block of
positions; sums are float32, probabilities meet values as float16. Programs leave their part, and the one that comes
last merges the parts in the order of splits, so equal inputs give equal bits. The position is read on the device: one
captured launch serves every length, and splits that have nothing to do end at once.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options

__all__ = ["HEAD_DIMS", "MAX_GROUP", "AttentionScratch", "attend", "attend_reference"]

HEAD_DIMS: Final = (16, 32, 64, 128, 256)
"""Head sizes that have a kernel."""
MAX_GROUP: Final = 16
"""Query heads that may share a key head."""
_BLOCK: Final = 64
_ROWS = tl.constexpr(16)


class AttentionScratch:
    """What programs of one launch leave for each other; made once, shared by all layers of a step."""

    def __init__(self, kv_heads: int, head_dim: int, splits: int, device: torch.device) -> None:
        self.splits = splits
        self.parts = torch.zeros(kv_heads, splits, 16, head_dim, dtype=torch.float32, device=device)
        self.totals = torch.zeros(kv_heads, splits, 2, 16, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(kv_heads, dtype=torch.int32, device=device)


def attend_reference(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values [heads, head_dim] float64 for queries [heads, head_dim] and all keys and values [kv_heads, n,
    head_dim], by definition.
    """
    group = queries.shape[0] // keys.shape[0]
    all_keys, all_values = (t.double().repeat_interleave(group, 0) for t in (keys, values))
    scores = torch.einsum("hd,hnd->hn", queries.double(), all_keys) * queries.shape[1] ** -0.5
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), all_values)


@triton.jit
def _merge(
    parts: tl.tensor,
    totals: tl.tensor,
    first: tl.tensor,
    active: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """The parts of one key head as one: [16, D]. Volatile: never from a cache that holds what was there before."""
    most = tl.full((_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((_ROWS,), tl.float32)
    mixed = tl.zeros((_ROWS, D), tl.float32)
    for part in range(active):
        at = (first + part) * 2 * _ROWS + row
        highest = tl.load(totals + at, volatile=True)
        new = tl.maximum(most, highest)
        keep, take = tl.exp(most - new), tl.exp(highest - new)
        total = total * keep + tl.load(totals + at + _ROWS, volatile=True) * take
        own = tl.load(parts + ((first + part) * _ROWS + row)[:, None] * D + i[None, :], volatile=True)
        mixed = mixed * keep[:, None] + own * take[:, None]
        most = new
    return mixed / total[:, None]


@triton.jit
def _attend(
    queries: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    position: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    totals: tl.tensor,
    tickets: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
    RING: tl.constexpr,
) -> None:
    head, split = tl.program_id(0), tl.program_id(1)
    row, i = tl.arange(0, _ROWS), tl.arange(0, D)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(position)
    q = tl.load(queries + (head * GROUP + row)[:, None] * D + i[None, :], mask=(row < GROUP)[:, None], other=0.0)
    own_key = tl.load(new_keys + head * D + i)
    own_value = tl.load(new_values + head * D + i)
    past = head.to(tl.int64) * context * D
    blocks, begin, mine = now // BLOCK + 1, 0, now
    if RING:
        begin = tl.maximum(now - context + 1, 0) // BLOCK
        mine = now % context
    if (blocks - 1 - begin) % SPLITS == split:
        tl.store(keys + past + mine * D + i, own_key)
        tl.store(values + past + mine * D + i, own_value)

    most = tl.full((_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((_ROWS,), tl.float32)
    mixed = tl.zeros((_ROWS, D), tl.float32)
    for block in range(begin + split, blocks, SPLITS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        seen, before, held = at <= now, at < now, at
        if RING:
            near = at > now - context
            seen, before, held = seen & near, before & near, at % context
        where = past + held[:, None] * D + i[None, :]
        earlier, this = before[:, None], (at == now)[:, None]
        key = tl.where(this, own_key[None, :], tl.load(keys + where, mask=earlier, other=0.0))
        value = tl.where(this, own_value[None, :], tl.load(values + where, mask=earlier, other=0.0))
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(key)) * scale, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        share, keep = tl.exp(scores - new[:, None]), tl.exp(most - new)
        total = total * keep + tl.sum(share, 1)
        # Probabilities lie in 0…1: float16 keeps 11 bits of each, and the tensor core takes nothing wider beside it.
        mixed = mixed * keep[:, None] + tl.dot(share.to(tl.float16), value)
        most = new

    to = out + (head * GROUP + row)[:, None] * D + i[None, :]
    if SPLITS == 1:
        tl.store(to, mixed / total[:, None], mask=(row < GROUP)[:, None])
    else:
        first = head * SPLITS
        if split < blocks - begin:
            tl.store(parts + ((first + split) * _ROWS + row)[:, None] * D + i[None, :], mixed)
            tl.store(totals + (first + split) * 2 * _ROWS + row, most)
            tl.store(totals + (first + split) * 2 * _ROWS + _ROWS + row, total)
        tl.debug_barrier()  # every thread has stored its share before one of them takes the ticket
        if tl.atomic_add(tickets + head, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(tickets + head, 0)
            merged = _merge(parts, totals, first, tl.minimum(blocks - begin, SPLITS), row, i, D)
            tl.store(to, merged, mask=(row < GROUP)[:, None])


def attend(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    *,
    early: bool = False,
    ring: bool = False,
) -> None:
    """Store this position's key and value, and attend to all so far, or as many as a ring holds. Queued on the current
    stream; no allocation.

    Args:
        queries: [heads, head_dim] float16.
        new_keys: [kv_heads, head_dim] float16, this position's; ``new_values`` likewise.
        new_values: see there.
        keys: [kv_heads, context, head_dim] float16, the cache; ``values`` likewise.
        values: see there.
        position: [1] int32 on the device, below ``context`` unless the cache is a ring.
        out: [heads · head_dim] float16 or bfloat16, overwritten.
        scratch: of the same heads.
        early: start while the kernel before still runs.
        ring: the cache is one, of ``context`` rows.

    Raises:
        ValueError: a head size or group without a kernel, or shapes that contradict each other.
    """
    kv_heads, context, d = keys.shape
    group, rest = divmod(queries.shape[0], kv_heads)
    if d not in HEAD_DIMS or rest or group > MAX_GROUP:
        raise ValueError(
            f"heads of {d} and {queries.shape[0]} queries for {kv_heads} keys: sizes {HEAD_DIMS} and groups of 1 to "
            f"{MAX_GROUP} have a kernel"
        )
    if new_keys.shape != (kv_heads, d) or out.numel() != queries.numel() or values.shape != keys.shape:
        raise ValueError(f"new keys {list(new_keys.shape)}, out {list(out.shape)}: not those of {list(keys.shape)}")
    _attend[(kv_heads, scratch.splits)](
        queries,
        new_keys,
        new_values,
        keys,
        values,
        position,
        out,
        scratch.parts,
        scratch.totals,
        scratch.tickets,
        context,
        d**-0.5,
        GROUP=group,
        D=d,
        BLOCK=_BLOCK,
        SPLITS=scratch.splits,
        RING=ring,
        num_warps=4,
        num_stages=2,  # with three, heads of 128 take more shared memory than some devices give a block
        **early_options(out, early),
    )
