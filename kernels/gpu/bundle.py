"""Refinement by neuron bundles: the selected neurons of an MLP anew, in two launches.

Formula. For a selected neuron j with gate output g_j, up output u_j, input x of the MLP and ``h_j = silu(g_j) · u_j``:

    h'_j = silu(g_j + cg_j · x) · (u_j + cu_j · x)
    y   += d_j · (h'_j - h_j) + cd_j · h_j

A record holds the codes of cg_j, cu_j, cd_j and of d_j, a copy of the whole down column, d_model nibbles ``code + 8``
each, then three float32 scales: of cg_j, cu_j and d_j. cd_j has one scale an output, shared by all neurons.

The first launch reads the rows, one program a neuron, and leaves two factors each: ``h_j``, and ``h'_j - h_j`` times
the scale of d_j. The second reads the columns, one program for some outputs, and adds neurons in list order: equal
lists give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strataflux.kernels.gpu.select import Selection

__all__ = ["BundlePlan", "bundle_reference", "bundle_scratch", "record_bytes", "refine_bundles"]

BundlePlan = tuple[int, int, int]
"""``(rows, words, warps)`` of the second launch: neurons and words of eight outputs that are read at once."""


def record_bytes(d_model: int) -> int:
    """Bytes of one record for a model of ``d_model`` channels."""
    return 2 * d_model + 12


def bundle_reference(x: Tensor, g: Tensor, u: Tensor, records: Tensor, down_scale: Tensor) -> Tensor:
    """What bundles add to ``y``, by definition: [d_model] float64.

    Args:
        x: [d_model].
        g: [n] gate outputs of the neurons that are refined.
        u: [n] their up outputs.
        records: [n, record_bytes] uint8.
        down_scale: [d_model].
    """
    d_model, count = x.numel(), records.shape[0]
    scales = records[:, 2 * d_model :].contiguous().view(torch.float32).double()
    nibbles = torch.stack((records[:, : 2 * d_model] & 15, records[:, : 2 * d_model] >> 4), dim=-1)
    gate, up, down, copy = (nibbles.view(count, 4, d_model).double() - 8).unbind(1)
    g, u, x = g.double(), u.double(), x.double()
    h = torch.nn.functional.silu(g) * u
    refined = torch.nn.functional.silu(g + scales[:, 0] * (gate @ x)) * (u + scales[:, 1] * (up @ x))
    return (scales[:, 2] * (refined - h)) @ copy + down_scale.double() * (h @ down)


def bundle_scratch(selection: Selection) -> Tensor:
    """Device memory for the two factors of each selected neuron."""
    return torch.zeros(2, selection.channels.numel(), device=selection.channels.device)


@triton.jit
def _silu(v: tl.tensor) -> tl.tensor:
    return v / (1.0 + tl.exp(-v))


@triton.jit
def _dot(words: tl.tensor, x: tl.tensor, d_model: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """Sum over all channels of (nibble - 8) · x, for the words from ``words`` on."""
    nibble = tl.arange(0, 8)[None, :]
    total = tl.zeros((WORDS,), tl.float32)
    for first in range(0, d_model // 8, WORDS):
        word = first + tl.arange(0, WORDS)
        inside = 8 * word < d_model
        codes = tl.load(words + word, mask=inside, other=0)
        value = tl.load(x + 8 * word[:, None] + nibble, mask=inside[:, None], other=0.0).to(tl.float32)
        total += tl.sum((((codes[:, None] >> (4 * nibble)) & 15) - 8).to(tl.float32) * value, 1)
    return tl.sum(total, 0)


@triton.jit
def _factors(
    factors: tl.tensor,
    x: tl.tensor,
    g: tl.tensor,
    u: tl.tensor,
    channels: tl.tensor,
    addresses: tl.tensor,
    selected: tl.tensor,
    d_model: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    address = tl.load(addresses + row)
    if address == 0:
        tl.store(factors + row, 0.0)
        tl.store(factors + selected + row, 0.0)
    else:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 256)
        scales = (address + 2 * d_model).to(tl.pointer_type(tl.float32))
        neuron = tl.load(channels + row)
        gate, up = tl.load(g + neuron).to(tl.float32), tl.load(u + neuron).to(tl.float32)
        h = _silu(gate) * up
        gate += tl.load(scales) * _dot(words, x, d_model, WORDS)
        up += tl.load(scales + 1) * _dot(words + d_model // 8, x, d_model, WORDS)
        tl.store(factors + row, h)
        tl.store(factors + selected + row, (_silu(gate) * up - h) * tl.load(scales + 2))


@triton.jit
def _weighted(codes: tl.tensor, weight: tl.tensor) -> tl.tensor:
    nibble = tl.arange(0, 8)[None, None, :]
    values = ((codes[:, :, None] >> (4 * nibble)) & 15) - 8
    return tl.sum(values.to(tl.float32) * weight[:, None, None], 0)


@triton.jit
def _add_columns(
    y: tl.tensor,
    factors: tl.tensor,
    addresses: tl.tensor,
    down_scale: tl.tensor,
    selected: tl.tensor,
    d_model: tl.tensor,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = 8 * word < d_model
    down = tl.zeros((WORDS, 8), tl.float32)
    copy = tl.zeros((WORDS, 8), tl.float32)
    for first in range(0, selected, ROWS):
        row = first + tl.arange(0, ROWS)
        address = tl.load(addresses + row, mask=row < selected, other=0)
        words = tl.multiple_of(address[:, None].to(tl.pointer_type(tl.int32)), (256, 256)) + word[None, :]
        present = (address != 0)[:, None] & inside[None, :]
        third = tl.load(words + d_model // 4, mask=present, other=0)
        fourth = tl.load(words + d_model // 8 * 3, mask=present, other=0)
        down += _weighted(third, tl.load(factors + row, mask=row < selected, other=0.0))
        copy += _weighted(fourth, tl.load(factors + selected + row, mask=row < selected, other=0.0))
    output = 8 * word[:, None] + tl.arange(0, 8)[None, :]
    scale = tl.load(down_scale + output, mask=inside[:, None], other=0.0)
    tl.atomic_add(y + output, scale * down + copy, mask=inside[:, None], sem="relaxed")


def refine_bundles(
    y: Tensor,
    x: Tensor,
    g: Tensor,
    u: Tensor,
    selection: Selection,
    down_scale: Tensor,
    factors: Tensor,
    plan: BundlePlan = (16, 32, 4),
) -> None:
    """Add the refinement of the selected neurons to ``y``. Queued on the current stream; no allocation.

    Args:
        y: [d_model] float32, added to atomically.
        x: [d_model] any float: the input of the MLP.
        g: [neurons] any float: gate outputs before the activation function.
        u: [neurons] any float: up outputs.
        selection: of this step, selected from h; its records stay where they are until the step ends.
        down_scale: [d_model] float32.
        factors: :func:`bundle_scratch` of the selection, overwritten.
        plan: how the second launch is spread.

    Raises:
        ValueError: ``d_model`` is not a multiple of 8, or shapes contradict each other.
    """
    d_model, selected = x.numel(), selection.channels.numel()
    if d_model % 8:
        raise ValueError(f"bundles of {d_model} channels have no kernel: their number must be a multiple of 8")
    if y.shape != x.shape or down_scale.shape != x.shape or g.shape != (selection.width,) or u.shape != g.shape:
        raise ValueError(
            f"y {list(y.shape)}, down_scale {list(down_scale.shape)}, g {list(g.shape)}, u {list(u.shape)}: expected "
            f"[{d_model}] twice and [{selection.width}] twice"
        )
    if not selected:
        return
    rows, words, warps = plan
    channels, addresses = selection.channels, selection.addresses
    _factors[(selected,)](factors, x, g, u, channels, addresses, selected, d_model, WORDS=256, num_warps=4)
    _add_columns[(-(-d_model // (8 * words)),)](
        y, factors, addresses, down_scale, selected, d_model, ROWS=rows, WORDS=words, num_warps=warps
    )
