"""Look the selected groups up, and leave what their refinement changes: a part for the merge.

Formula. For each token of a selected group that is present, with u the code and d how far its refinement code moves it
on the code axis (:func:`~strataflux.kernels.kv_encode.code_offsets`: the outermost codes own half a step):

    l' = l + scale · B_K[t] · Σ_d (Q_d A_K[d]) d_K[d, t]        v' = v + A_V[t] · B_V[d] · d_V[t, d]

The part is ``Σ 2^(l' - m) v' - 2^(l - m) v`` with the total ``Σ 2^(l' - m) - 2^(l - m)`` and m the largest l or l'.
Merged with the parts of resident precision it gives attention with the refined tokens in their places. l is computed
anew from the resident codes, which d needs anyway. All is float32, since it subtracts.

Each selected group is looked up; what is present is stamped and read in place, what is not is asked for
(:mod:`strataflux.kernels.gpu.select`). The fast path is CUDA C++ (kv_refine.cu): a warp a group, from the list that
selection left. The portable one is Triton (:mod:`strataflux.kernels.gpu.kv_refine_triton`).
"""

from pathlib import Path
from typing import Final, Literal

import numpy as np
from torch import Tensor

from strataflux.kernels.cuda_build import device_capability, has_fast_path, load_function
from strataflux.kernels.gpu.kv_refine_triton import refine_portable
from strataflux.kernels.gpu.kv_work import KvTiles, KvWork, halves_of
from strataflux.kernels.kv_encode import KvFormat

__all__ = ["instance_name", "kv_refine"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")


def instance_name(form: KvFormat, group: int) -> str:
    """The fast path's template instance for ``group`` query heads of a KV head."""
    bits = f"{form.key_bits}, {form.value_bits}, {form.refine_key_bits}, {form.refine_value_bits}"
    return f"kv_refine<{form.head_dim}, {bits}, {group}, {form.group_tokens}>"


def kv_refine(
    positions: Tensor,
    cache: KvTiles,
    work: KvWork,
    block: Tensor,
    thresholds: Tensor,
    bases: Tensor,
    table: int,
    first_oid: int,
    *,
    path: Literal["cuda", "triton"] | None = None,
    early: bool = False,
) -> None:
    """Look up the groups that :func:`~strataflux.kernels.gpu.kv_select.kv_select` chose, inside a step, and leave parts
    that correct what attention left. Queued on the current stream; no allocation.

    Args:
        positions: as given to attention.
        cache: likewise.
        work: of this layer's attention and selection; the refiners' parts are overwritten.
        block: int64, the attach block on the device (:mod:`~strataflux.kernels.gpu.cells`).
        thresholds: :func:`~strataflux.kernels.gpu.select.score_thresholds` of the device.
        bases: [blocks] int64: object id of each block's first record, -1 where it has no records.
        table: number of the KV table.
        first_oid: this layer's first record in a block: ``layer · kv_heads · groups_per_tile``.
        path: ``"cuda"`` or ``"triton"``, as selection took; where None the first that this machine has.
        early: start while the kernel before still runs.

    Raises:
        CudaError: the fast path cannot be.
    """
    where = block, thresholds, bases
    if path == "triton" or (path is None and not has_fast_path(positions)):
        refine_portable(positions, cache, work, where, (table, first_oid), early=early)
        return
    form, owners, device = cache.form, work.shares.shape[0], positions.get_device()
    lists = cache.table, work.shares, work.listed.groups, work.listed.counts
    tensors = (work.queries, *halves_of(cache), *lists, work.parts, work.tops, work.totals, *where)
    sizes = (table, cache.kv_heads, work.splits, work.refiners, work.tiles, work.listed.groups.shape[1])
    arguments: list[np.generic] = [np.uint64(tensor.data_ptr()) for tensor in tensors]
    arguments += [np.int64(first_oid), *(np.int32(size) for size in sizes)]
    group = work.heads // cache.kv_heads
    function = load_function(_SOURCE, instance_name(form, group), device)
    threads, starts_early = 128 if group > 4 else 256, early and device_capability(device) >= (9, 0)
    function.launch(owners * work.refiners, threads, arguments, early=starts_early)
