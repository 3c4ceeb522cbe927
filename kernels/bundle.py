"""Neuron bundles on a CPU: the selected neurons of an MLP anew, from records read in place.

Formula. For a selected neuron j with gate output g_j, up output u_j, input x of the MLP and ``h_j = silu(g_j) · u_j``:

    h'_j = silu(g_j + cg_j · x) · (u_j + cu_j · x)
    y   += d_j · (h'_j - h_j) + cd_j · h_j

Bytes. A record holds the codes of cg_j, cu_j, cd_j and of d_j, a copy of the whole down column: four times d_model
nibbles ``code + 8``, least significant first, codes -7…7; then three little-endian float32, the scales of cg_j, cu_j
and d_j. cd_j has one scale an output, shared by all neurons, which stays with the resident weights. d_model is even.

Sums are float32 in the order of the neurons given, so equal lists give equal bits.
"""

import math

import numpy as np
import torch
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from strataflux.kernels.pointer import bytes_at
from strataflux.proto.compiled import compiled

__all__ = ["add_bundles", "bundle_bytes", "bundle_reference", "pack_bundles", "unpack_bundles"]


def bundle_bytes(d_model: int) -> int:
    """Bytes of one record for a model of ``d_model`` channels."""
    return 2 * d_model + 12


def pack_bundles(codes: Tensor, scales: Tensor) -> Tensor:
    """Records [neurons, bundle_bytes] uint8.

    Args:
        codes: [neurons, 4, d_model] int8 in -7…7: cg, cu, cd and d.
        scales: [neurons, 3] float32: of cg, cu and d.

    Raises:
        ValueError: ``d_model`` is odd, or the shapes contradict each other.
    """
    neurons, parts, d_model = codes.shape
    if d_model % 2 or parts != 4 or scales.shape != (neurons, 3):
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)}: expected [n, 4, even number] and [n, 3]"
        )
    pairs = (codes.to(torch.int16) + 8).view(neurons, -1, 2)
    nibbles = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    return torch.cat((nibbles, scales.contiguous().view(torch.uint8).view(neurons, 12)), 1)


def unpack_bundles(records: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [neurons, 4, d_model] int8 and scales [neurons, 3] float32; undoes :func:`pack_bundles`."""
    neurons, width = records.shape
    d_model = (width - 12) // 2
    packed = records[:, : 2 * d_model]
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).view(neurons, 4, d_model)
    return nibbles.to(torch.int8) - 8, records[:, 2 * d_model :].contiguous().view(torch.float32)


def bundle_reference(x: Tensor, g: Tensor, u: Tensor, records: Tensor, down_scale: Tensor) -> Tensor:
    """What bundles add to ``y``, by definition: [d_model] float64.

    Args:
        x: [d_model].
        g: [n] gate outputs of the neurons that are refined.
        u: [n] their up outputs.
        records: [n, bundle_bytes] uint8.
        down_scale: [d_model].
    """
    codes, scales = unpack_bundles(records)
    gate, up, down, copy = codes.double().unbind(1)
    scales = scales.double()
    g, u, x = g.double(), u.double(), x.double()
    h = torch.nn.functional.silu(g) * u
    refined = torch.nn.functional.silu(g + scales[:, 0] * (gate @ x)) * (u + scales[:, 1] * (up @ x))
    return (scales[:, 2] * (refined - h)) @ copy + down_scale.double() * (h @ down)


@compiled
def add_bundles(
    y: NDArray[np.float32],
    x: NDArray[np.float32],
    gate_up: NDArray[np.float32],
    neurons: NDArray[np.int64],
    addresses: NDArray[np.uint64],
    down_scale: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> int:
    """Add to ``y`` the bundles that are present, reading their records in place.

    Args:
        y: [d_model] float32, changed in place.
        x: [d_model] float32, the MLP's input.
        gate_up: [2 · d_ff] float32, all gate outputs, then all up outputs.
        neurons: [selected] int64.
        addresses: [selected] uint64, where each neuron's record lies, at a multiple of 4; 0 where it is absent. The
            caller keeps every record mapped and unchanged until this returns.
        down_scale: [d_model] float32.
        sums: scratch of at least ``2 · d_model`` float32, overwritten.

    Returns:
        How many bundles were added.
    """
    half, d_ff = y.size // 2, gate_up.size // 2
    # Low and high nibbles are summed apart: loops then run over consecutive memory. Residuals first, then copies.
    sums[: 4 * half] = 0
    added = 0
    for i in range(neurons.size):
        if addresses[i] != 0:
            codes = carray(bytes_at(addresses[i]), (4, half))
            tail = carray(bytes_at(addresses[i] + np.uint64(4 * half)), 12)
            g, u = gate_up[neurons[i]], gate_up[d_ff + neurons[i]]
            h = _silu(g) * u
            refined = _silu(g + _scale(tail, 0) * _dot(codes[0], x)) * (u + _scale(tail, 4) * _dot(codes[1], x))
            _add(sums[:half], sums[half : 2 * half], codes[2], h)
            factor = _scale(tail, 8) * (refined - h)
            _add(sums[2 * half : 3 * half], sums[3 * half : 4 * half], codes[3], factor)
            added += 1
    if added > 0:
        for j in range(half):
            y[2 * j] += down_scale[2 * j] * sums[j] + sums[2 * half + j]
            y[2 * j + 1] += down_scale[2 * j + 1] * sums[half + j] + sums[3 * half + j]
    return added


@compiled
def _silu(value: np.float32) -> np.float32:
    return np.float32(value / (np.float32(1) + np.float32(math.exp(-value))))


@compiled
def _scale(tail: NDArray[np.uint8], first: int) -> np.float32:
    return np.float32(tail[first : first + 4].view(np.float32)[0])


@compiled
def _dot(codes: NDArray[np.uint8], x: NDArray[np.float32]) -> np.float32:
    total = np.float32(0)
    for j in range(codes.size):
        pair = np.int32(codes[j])
        total += np.float32(np.int32(pair & 15) - np.int32(8)) * x[2 * j]
        total += np.float32(np.int32(pair >> 4) - np.int32(8)) * x[2 * j + 1]
    return total


@compiled
def _add(low: NDArray[np.float32], high: NDArray[np.float32], codes: NDArray[np.uint8], weight: np.float32) -> None:
    for j in range(codes.size):
        pair = np.int32(codes[j])
        low[j] += weight * np.float32(np.int32(pair & 15) - np.int32(8))
        high[j] += weight * np.float32(np.int32(pair >> 4) - np.int32(8))
