"""Matrix-vector products with low-bit weights on a GPU: ``y[b, o] = Σ_i w[o, i] · x[b, i]`` for 1 to 16 inputs.

Formula. *Scaled* (rtn, awq): ``w[o, i] = scale[o, g] · (code[o, i] - zero[o, g])`` with ``g = i // group``, group 64
or 128, scale float16, zero an integer in 0…2^bits - 1. *Codebook* (sqllm, lnq): ``w[o, i] = table[o, code[o, i]]``,
table float16. Codes have 2, 3 or 4 bits. Inputs are float16, products exact, sums and outputs float32.

Bytes. Rows are padded to a multiple of 32 and inputs to strips of 256 channels, with weights that the product never
uses. ``words`` int32 [rows / 16, strips, bits, 32, 4]: a tile of 16 rows and a strip is 32 lanes of 4·bits words, so
that each of a warp's ``bits`` 16-byte loads covers 512 consecutive bytes. Lane ``4g + t`` holds rows g and g + 8 and
of each 32 channels the eight from 8t on. In strip order its codes make 16 *nibble words* of eight codes: word ``4j +
2a + b`` has row ``8h + g``, channel ``64j + 32a + 8t + 4b + 2c + d`` in nibble ``h + 2c + 4d`` (scaled) or ``4h + 2c
+ d`` (codebook). Of a quarter strip, four nibble words n0…n3, there are stored: at 4 bits the words themselves; at 2
bits ``n0 | n1 << 2`` and ``n2 | n3 << 2``; at 3 bits their low two bits like that, then their third bits: word i's at
bit i of each nibble.

``meta``, scaled: int32 [rows / 16, strips, 8, 256 / group, 2], row ``8h + g`` of a group at […, g, group, h]: scale
in the low half, zero in the high half. Codebook: int32 [rows, 2^bits / 2], the low bytes of the table in code order,
then the high.

The fast path is CUDA C++ (lowbit_gemv.cu, and lowbit_gemv_stream.cu for one input), the portable one Triton
(lowbit_gemv_triton.py); all read the same bytes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strataflux.kernels.cuda_build import device_capability, has_fast_path, load_function, multiprocessors

if TYPE_CHECKING:
    from strataflux.kernels.gpu.errands import Errands

__all__ = [
    "MAX_BATCH",
    "STRIP",
    "LowbitWeights",
    "Plan",
    "StreamPlan",
    "block_plan",
    "default_plan",
    "gemv",
    "gemv_reference",
    "instance_name",
    "pack_codebook",
    "pack_scaled",
    "unpack",
]

STRIP: Final = 256
MAX_BATCH: Final = 16

_SOURCE = Path(__file__).with_suffix(".cu")
_ROWS = 32  # padded to this, so that a warp may take two tiles of 16


class LowbitWeights(NamedTuple):
    """Packed weights of one projection set; see the module for the bytes. ``group`` is 0 for codebooks."""

    words: Tensor
    meta: Tensor
    rows: int
    inputs: int
    bits: int
    group: int

    @property
    def bytes(self) -> int:
        """Device memory it takes, padding included: what one product has to move."""
        return 4 * (self.words.numel() + self.meta.numel())


class Plan(NamedTuple):
    """How the fast path spreads a product: tiles of 16 rows a block, warps that share a block's strips, strips a warp
    has in flight; whether it may start, and fetch its first weights, while the kernel before it still runs; and strips
    (up to 32) beyond those in flight that each warp asks the device's cache for when it begins.
    """

    tiles: int
    warps: int
    depth: int
    early: bool = True
    ahead: int = 0


class StreamPlan(NamedTuple):
    """How the fast path streams weights for one input: warps that share a block's strips, strips in each warp's
    ring, blocks a multiprocessor; ``early`` and ``ahead`` as of :class:`Plan`.
    """

    warps: int = 16
    stages: int = 2
    share: int = 1
    early: bool = True
    ahead: int = 0


def pack_scaled(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int) -> LowbitWeights:
    """Pack group-scaled weights, on the device of ``codes``.

    Args:
        codes: [rows, inputs] uint8, 0…2^bits - 1.
        scales: [rows, inputs / group] float16.
        zeros: [rows, inputs / group] uint8, 0…2^bits - 1.
        bits: 2, 3 or 4.
        group: 64 or 128.

    Raises:
        ValueError: a width, group or shape without a kernel.
    """
    rows, inputs = codes.shape
    _check_width(bits, inputs)
    if group not in (64, 128) or inputs % group:
        raise ValueError(
            f"groups of {group} in {inputs} inputs: groups of 64 or 128 that divide the inputs have a kernel"
        )
    if scales.shape != (rows, inputs // group) or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {list(scales.shape)} and zeros {list(zeros.shape)}: expected {[rows, inputs // group]} each"
        )
    words = _pack_words(codes, bits, codebook=False)
    pairs = _halves(scales.half()) | zeros.int() << 16
    tiles, strips = words.shape[:2]
    padded = torch.zeros(16 * tiles, strips * STRIP // group, dtype=torch.int32, device=codes.device)
    padded[:rows, : pairs.shape[1]] = pairs
    meta = padded.view(tiles, 2, 8, strips, STRIP // group).permute(0, 3, 2, 4, 1).contiguous()
    return LowbitWeights(words, meta, rows, inputs, bits, group)


def pack_codebook(codes: Tensor, tables: Tensor, bits: int) -> LowbitWeights:
    """Pack codebook weights: ``codes`` [rows, inputs] uint8 and ``tables`` [rows, 2^bits] float16.

    Raises:
        ValueError: a width or shape without a kernel.
    """
    rows, inputs = codes.shape
    _check_width(bits, inputs)
    if tables.shape != (rows, 1 << bits):
        raise ValueError(f"tables {list(tables.shape)}: expected {[rows, 1 << bits]}")
    words = _pack_words(codes, bits, codebook=True)
    padded = torch.zeros(16 * words.shape[0], 1 << bits, dtype=torch.float16, device=codes.device)
    padded[:rows] = tables
    halves = _halves(padded)
    planes = torch.cat((halves & 255, halves >> 8), dim=1).to(torch.uint8)
    return LowbitWeights(words, planes.view(torch.int32), rows, inputs, bits, 0)


def _check_width(bits: int, inputs: int) -> None:
    if bits not in (2, 3, 4):
        raise ValueError(f"codes of {bits} bits: 2, 3 and 4 have a kernel")
    if inputs % 8:
        raise ValueError(f"{inputs} inputs: the kernel loads eight at a time; pad them to a multiple of 8")


def _halves(values: Tensor) -> Tensor:
    return values.view(torch.int16).int() & 0xFFFF


def _pack_words(codes: Tensor, bits: int, *, codebook: bool) -> Tensor:
    rows, inputs = codes.shape
    tiles, strips = 2 * -(-rows // _ROWS), -(-inputs // STRIP)
    padded = torch.zeros(16 * tiles, STRIP * strips, dtype=torch.uint8, device=codes.device)
    padded[:rows, :inputs] = codes
    # [tile, h, g, strip, j, a, t, b, c, d] as in the module's text.
    parts = padded.view(tiles, 2, 8, strips, 4, 2, 4, 2, 2, 2)
    nibbles = torch.zeros(tiles, 8, strips, 4, 2, 4, 2, dtype=torch.int32, device=codes.device)
    for h in range(2):
        for c in range(2):
            for d in range(2):
                nibble = 4 * h + 2 * c + d if codebook else h + 2 * c + 4 * d
                nibbles |= parts[:, h, :, :, :, :, :, :, c, d].int() << 4 * nibble
    # [tile, strip, j, 2a + b, lane = 4g + t]
    quarter = nibbles.permute(0, 2, 3, 4, 6, 1, 5).reshape(tiles, strips, 4, 4, 32)
    stored = _planes(quarter, bits)
    return stored.reshape(tiles, strips, bits, 4, 32).transpose(-1, -2).contiguous()


def _planes(quarter: Tensor, bits: int) -> Tensor:
    """What is stored of the four nibble words [..., 4, lane] of each quarter: [..., bits, lane]."""
    if bits == 4:
        return quarter
    low = quarter & 0x33333333
    pairs = low[..., 0::2, :] | low[..., 1::2, :] << 2
    if bits == 2:
        return pairs
    third = sum(((quarter[..., i, :] >> 2) & 0x11111111) << i for i in range(4))
    return torch.cat((pairs, torch.as_tensor(third).unsqueeze(-2)), dim=-2)


def unpack(weights: LowbitWeights) -> Tensor:
    """The weights [rows, inputs] float64 that ``weights`` stand for: the values that the product uses."""
    tiles, strips = weights.words.shape[:2]
    bits, codebook = weights.bits, weights.group == 0
    stored = weights.words.transpose(-1, -2).reshape(tiles, strips, 4, bits, 32)
    words = [_nibble_word(stored, i, bits) for i in range(4)]
    quarter = torch.stack(words, dim=3).view(tiles, strips, 4, 2, 2, 8, 4)
    codes = torch.empty(tiles, 2, 8, strips, 4, 2, 4, 2, 2, 2, dtype=torch.int64, device=stored.device)
    for h in range(2):
        for c in range(2):
            for d in range(2):
                nibble = 4 * h + 2 * c + d if codebook else h + 2 * c + 4 * d
                value = (quarter >> 4 * nibble) & 15  # [tile, strip, j, a, b, g, t]
                codes[:, h, :, :, :, :, :, :, c, d] = value.permute(0, 5, 1, 2, 3, 6, 4)
    codes = codes.view(16 * tiles, STRIP * strips)
    if codebook:
        planes = weights.meta.view(torch.uint8).view(16 * tiles, 2, 1 << bits).int()
        tables = (planes[:, 0] | planes[:, 1] << 8).to(torch.int16).view(torch.float16).double()
        values = tables.gather(1, codes)
    else:
        pairs = weights.meta.permute(0, 4, 2, 1, 3).reshape(16 * tiles, -1)
        scales = (pairs & 0xFFFF).to(torch.int16).view(torch.float16).double()
        zeros = (pairs >> 16).double()
        grouped = codes.double().view(*pairs.shape, weights.group)
        values = ((grouped - zeros[..., None]) * scales[..., None]).view(16 * tiles, -1)
    return values[: weights.rows, : weights.inputs]


def _nibble_word(stored: Tensor, i: int, bits: int) -> Tensor:
    if bits == 4:
        return stored[..., i, :]
    low = (stored[..., i // 2, :] >> 2 * (i % 2)) & 0x33333333
    return low if bits == 2 else low | ((stored[..., 2, :] >> i) & 0x11111111) << 2


def gemv_reference(weights: LowbitWeights, x: Tensor) -> Tensor:
    """``y`` [batch, rows] float64 for ``x`` [batch, inputs], by definition."""
    return x.double() @ unpack(weights).t()


def gemv(
    weights: LowbitWeights,
    x: Tensor,
    y: Tensor,
    *,
    add: bool = False,
    plan: Plan | StreamPlan | None = None,
    path: Literal["cuda", "triton"] | None = None,
    errands: "Errands | None" = None,
) -> None:
    """Multiply: ``y = w x``, or ``y += w x``. Queued on the current stream; no allocation, so it can be captured.

    Each output is the sum of its products in a fixed order: equal operands give equal bits.

    Args:
        weights: on the device of ``x``.
        x: [batch, inputs] float16, contiguous, batch 1…16.
        y: [batch, rows] float32, contiguous, overwritten or added to.
        add: add to ``y``. The addition is atomic: another kernel may add to ``y`` at the same time.
        plan: how the fast path spreads the work; chosen from the shape where None. Beside errands, and where a block of
            the device has too little shared memory for it, nothing streams.
        path: ``"cuda"`` or ``"triton"``; where None the first that this machine has.
        errands: to run beside it: in blocks of the same launch, or on the portable path before it.

    Raises:
        ValueError: a shape or type without a kernel.
        CudaError: the fast path was asked for and cannot be.
    """
    batch = x.shape[0]
    if not 1 <= batch <= MAX_BATCH or x.shape != (batch, weights.inputs) or y.shape != (batch, weights.rows):
        raise ValueError(
            f"x {list(x.shape)} and y {list(y.shape)}: expected [batch, {weights.inputs}] and [batch, {weights.rows}] "
            f"with a batch of 1 to {MAX_BATCH}"
        )
    if x.dtype != torch.float16 or y.dtype != torch.float32 or not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"x {x.dtype} and y {y.dtype}: expected contiguous float16 and float32")
    if path == "triton" or (path is None and not has_fast_path(x)):
        from strataflux.kernels.lowbit_gemv_triton import gemv_triton

        if errands is not None:
            errands.run()
        gemv_triton(weights, x, y, add=add)
        return
    plan = plan or default_plan(weights, batch)
    if isinstance(plan, StreamPlan):
        from strataflux.kernels.lowbit_gemv_stream import fits, gemv_stream

        if errands is None and fits(weights, plan, x.get_device()):
            gemv_stream(weights, x, y, add=add, plan=plan)
            return
        plan = block_plan(weights)._replace(early=plan.early)
    _launch(weights, x, y, add, plan, errands)


def _launch(weights: LowbitWeights, x: Tensor, y: Tensor, add: bool, plan: Plan, errands: "Errands | None") -> None:
    tiles, strips = weights.words.shape[:2]
    device, grid, threads = x.get_device(), tiles // plan.tiles, 32 * plan.warps
    name = instance_name(weights, plan, x.shape[0], add=add, beside=errands is not None)
    function = load_function(_SOURCE, name, device)
    pointers = [np.uint64(tensor.data_ptr()) for tensor in (weights.words, weights.meta, x, y)]
    sizes = [np.int32(size) for size in (weights.rows, weights.inputs, strips, x.shape[0], plan.ahead)]
    early = plan.early and device_capability(device) >= (9, 0)
    table, count, beside = 0, 0, 0
    if errands is not None:
        made, beside = errands.table(threads, _room(grid, threads, device), x.device)
        table, count = made.data_ptr(), len(errands.items)
    arguments: list[np.generic] = [*pointers, *sizes, np.uint64(table), np.int32(count), np.int32(beside)]
    function.launch(beside + grid, threads, arguments, early=early)


def _room(grid: int, threads: int, device: int) -> int:
    """Blocks for which the device has room while its last blocks of a product run: a multiprocessor holds 512 threads
    of this kernel. At least four, however much that costs.
    """
    slots = multiprocessors(device) * max(1, 512 // threads)
    return max(4, -grid % slots)


def instance_name(weights: LowbitWeights, plan: Plan, batch: int, *, add: bool, beside: bool = False) -> str:
    """The C++ template instance that a product with this plan runs, with errands beside it or without."""
    groups = STRIP // weights.group if weights.group else 0
    columns = -(-batch // 8)
    numbers = weights.bits, groups, plan.tiles, plan.warps, plan.depth, columns, int(add), int(beside)
    return f"lowbit_gemv<{','.join(map(str, numbers))}>"


def default_plan(weights: LowbitWeights, batch: int = 1) -> Plan | StreamPlan:
    """The plan for a shape: what did best on an H200 (docs/PERFORMANCE.md). One input streams, but for codebooks of 16
    values: those take longer to choose from than to come.
    """
    if batch > 1 or (weights.group == 0 and weights.bits == 4):
        return block_plan(weights)
    plan = StreamPlan()
    while plan.warps > max(weights.words.shape[1], 1):
        plan = plan._replace(warps=plan.warps // 2)
    return plan


def block_plan(weights: LowbitWeights) -> Plan:
    """The plan in blocks for a shape: what a sweep on an H200 found best or within 5 % of it, one input.

    Few rows leave the device idle unless more warps share a block's strips; two tiles a warp use each input twice.
    Codebooks of 16 values need registers and shared memory for their tables, and do better with one tile and more in
    flight.
    """
    tiles, strips = weights.words.shape[:2]
    if weights.group == 0 and weights.bits == 4:
        plan = Plan(1, 4, 2) if tiles >= 1024 else Plan(1, 4, 4) if tiles >= 320 else Plan(1, 8, 2)
    else:
        plan = Plan(2, 4 if tiles >= 1024 else 8 if tiles >= 320 else 16, 1)
    while plan.warps > max(strips, 1):
        plan = plan._replace(warps=plan.warps // 2)
    return plan
