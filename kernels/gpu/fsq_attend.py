"""Attention of one new token a sequence to discrete codes, on Hopper GPUs: logits, then sums of codes by parts.

Formula (:mod:`strataflux.kernels.fsq_attention`). The tensor cores rebuild keys from codes that are unpacked in
registers (:mod:`strataflux.kernels.gpu.fsq_decoder`): one head's decoder stays in shared memory, and neither keys nor
values reach device memory. Positions are ``64 · block + place``: keys are turned by their place, whose cosines and
sines stay in registers, and queries back by the block's first position:

    l_t = (R(place) k_t) · (R(-first) q) / sqrt(mean(k²) + ε)

All kernels start while the one before still runs, and wait before they touch anything but the decoder.
Logits (float32) go through device memory to a second kernel, which does softmax and sums of 16 heads at once: heads
share codes, so these are unpacked once. It sums q - 8 with weights in float16.
"""

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strataflux.kernels.cuda_build import CudaFunction, compile_instance, cuda_available, device_capability
from strataflux.kernels.fsq_attention import BLOCK_TOKENS
from strataflux.kernels.gpu.fsq_decoder import FsqDecoder
from strataflux.kernels.gpu.fsq_work import FsqWork
from strataflux.kernels.gpu.kv_work import check_heads

__all__ = [
    "MOST_SHARED",
    "FsqPlan",
    "compile_fsq",
    "default_plan",
    "fsq_attend",
    "fsq_mix",
    "fsq_scores",
    "has_fsq_path",
    "join_instance",
    "mix_instance",
    "scores_instance",
    "shared_bytes",
]

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = {"fsq_scores": "fsq_attend.cu", "fsq_join": "fsq_attend.cu", "fsq_mix": "fsq_mix.cu"}
MOST_SHARED: Final = 232448
"""Bytes that a block of threads may have on these GPUs."""
_MOST_TEAMS: Final = 3  # more leave each thread too few registers
_MOST_FP8_TEAMS: Final = 4  # their sums take half the registers
_FEW, _FEWEST = 292, 160
"""Coordinates up to which four teams were faster than three, and one stage faster than two, both in fp8."""


class FsqPlan(NamedTuple):
    """How the first kernel works."""

    teams: int
    """Groups of 128 threads in a block, which take turns at the tensor cores: while one multiplies, the others turn."""
    stages: int
    """Blocks of codes that each team has: 2 copy the next while this one is read."""


def has_fsq_path(x: Tensor) -> bool:
    """Whether the kernel runs where ``x`` lies: on GPUs of compute capability 9.0."""
    return x.is_cuda and cuda_available() and device_capability(x.get_device()) == (9, 0)


def shared_bytes(decoder: FsqDecoder, heads: int, plan: FsqPlan) -> int:
    """Shared memory of a block of threads: a KV head's decoder, and for each team its blocks of codes with what turns
    queries, and room for the queries of that head among ``heads``.
    """
    d, sets = decoder.heads.head_dim, 2 if heads // decoder.heads.kv_heads > 4 else 1
    staged = plan.teams * plan.stages * (BLOCK_TOKENS * decoder.heads.grid.nbytes + 2 * d + 8)
    return decoder.images.shape[1] + staged + plan.teams * sets * 16 * d // decoder.shares + 8 * d + 256 + 8


def default_plan(decoder: FsqDecoder, heads: int) -> FsqPlan:
    """As many teams as fit, then as many stages, for ``heads`` query heads.

    Raises:
        ValueError: not even one fits.
    """
    fp8, width = decoder.kind == "fp8", decoder.heads.grid.width
    most = _MOST_FP8_TEAMS if fp8 and width <= _FEW else _MOST_TEAMS
    for teams in range(most, 0, -1):
        for stages in (1,) if fp8 and width <= _FEWEST else (2, 1):
            if shared_bytes(decoder, heads, FsqPlan(teams, stages)) <= MOST_SHARED:
                return FsqPlan(teams, stages)
    raise ValueError(
        f"codes of {width} coordinates take {shared_bytes(decoder, heads, FsqPlan(1, 1))} bytes of shared memory as "
        f"{decoder.kind}, {MOST_SHARED} are there; int8 and fp8 take half as much, and so do two shares"
    )


def scores_instance(decoder: FsqDecoder, work: FsqWork, plan: FsqPlan) -> str:
    """The template instance that leaves logits."""
    d = decoder.heads.head_dim
    group = check_heads(d, work.heads, decoder.heads.kv_heads)
    norm = "false" if decoder.heads.key_norm is None else "true"
    kind = {"half": "HALF", "int8": "INT8", "fp8": "FP8"}[decoder.kind]
    sizes = f"{d}, {work.grid.nbytes}, {group}, {plan.teams}, {plan.stages}"
    return f"fsq_scores<{kind}, {sizes}, {norm}, {decoder.shares}>"


def join_instance(decoder: FsqDecoder, work: FsqWork) -> str:
    """The template instance that joins shares."""
    norm = "false" if decoder.heads.key_norm is None else "true"
    d, group = decoder.heads.head_dim, work.heads // decoder.heads.kv_heads
    return f"fsq_join<{d}, {group}, {norm}, {decoder.shares}>"


def mix_instance(work: FsqWork) -> str:
    """The template instance that leaves parts."""
    return f"fsq_mix<{work.grid.nbytes}, {work.spans_a_warp}, {work.turns}, {work.stages}>"


def fsq_attend(
    queries: Tensor, codes: Tensor, lengths: Tensor, decoder: FsqDecoder, work: FsqWork, plan: FsqPlan | None = None
) -> None:
    """Leave parts of each sequence's attention. Queued on the current stream; no allocation.

    Args:
        queries: [batch, heads, head_dim] float16, normed and rotated; contiguous, as all of these.
        codes: [batch, blocks, 64 · bytes] uint8, as :func:`~strataflux.kernels.fsq_attention.block_codes` leaves them;
            token i of a sequence has position i.
        lengths: [batch] int32 on the device: tokens of each sequence; at least 1.
        decoder: of this layer, for as many blocks.
        work: of the same sizes; overwritten.
        plan: of the first kernel; None: :func:`default_plan`.

    Raises:
        ValueError: shapes that contradict each other or have no kernel. CudaError: this device has no such kernel.
    """
    heads = decoder.heads
    expected = (work.batch, work.heads, heads.head_dim), (work.batch, work.blocks, BLOCK_TOKENS * heads.grid.nbytes)
    sizes = (heads.grid, decoder.shares, min(decoder.blocks, work.blocks))
    if (queries.shape, codes.shape) != expected or sizes != (work.grid, work.shares, work.blocks):
        raise ValueError(
            f"queries {list(queries.shape)} and codes {list(codes.shape)}: the work memory is for {list(expected[0])} "
            f"and {list(expected[1])}, codes of {work.grid.nbytes} bytes and {work.shares} shares; the decoder for "
            f"{decoder.blocks} blocks and {decoder.shares}"
        )
    fsq_scores(queries, codes, lengths, decoder, work, plan or default_plan(decoder, work.heads))
    fsq_mix(codes, lengths, work)


def fsq_scores(
    queries: Tensor, codes: Tensor, lengths: Tensor, decoder: FsqDecoder, work: FsqWork, plan: FsqPlan
) -> None:
    """The first half of :func:`fsq_attend`: logits of all tokens; its arguments are not checked again."""
    kv_heads, images, device = decoder.heads.kv_heads, len(decoder.images), queries.get_device()
    splits, size = work.score_splits(images), shared_bytes(decoder, work.heads, plan)
    prepared = (decoder.images, decoder.affine, decoder.scalars, decoder.base, decoder.eighth, decoder.inner)
    left = (work.scores if decoder.shares == 1 else work.sums, work.squares)
    given = _arguments(codes, *prepared, queries, lengths, *left, kv_heads, splits, work.blocks)
    function = _function(scores_instance(decoder, work, plan), size, device)
    function.launch(work.batch * splits * images, 128 * plan.teams, given, early=True, shared_bytes=size)
    if decoder.shares > 1:
        given = _arguments(work.sums, work.squares, decoder.scalars, lengths, work.scores, kv_heads, work.blocks)
        function = _function(join_instance(decoder, work), 0, device)
        function.launch(work.batch * work.heads * -(-work.blocks // 4), 256, given, early=True)


def fsq_mix(codes: Tensor, lengths: Tensor, work: FsqWork) -> None:
    """The second half of :func:`fsq_attend`: parts, from logits."""
    left = (work.parts, work.tops, work.totals)
    given = _arguments(codes, work.scores, lengths, *left, work.heads, work.mix_splits, work.blocks)
    function = _function(mix_instance(work), work.mix_shared, codes.get_device())
    function.launch(work.mix_blocks, work.mix_threads, given, early=True, shared_bytes=work.mix_shared)


def _arguments(*values: Tensor | int) -> list[np.generic]:
    return [np.uint64(v.data_ptr()) if isinstance(v, Tensor) else np.int32(v) for v in values]


def compile_fsq(instance: str) -> tuple[bytes, str]:
    """Machine code of an instance, and its symbol; needs no GPU, and may run in several threads at once.

    Raises:
        CudaError: it does not compile.
    """
    return compile_instance(_FOLDER / _SOURCES[instance.partition("<")[0]], instance, "sm_90a")


@cache
def _function(instance: str, shared: int, device: int) -> CudaFunction:
    with torch.cuda.device(device):
        function = CudaFunction(*compile_fsq(instance))
        if shared:
            function.allow_shared(shared)
    return function
