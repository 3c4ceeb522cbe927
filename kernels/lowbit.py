"""Low-bit weights: codes of 2, 3 or 4 bits packed densely, one scale and one zero-point per group of inputs.

Formula. ``w[o, i] = scale[o, g] · (code[o, i] - zero[o, g])`` with ``g = i // group``. Codes and
zero-points are integers in 0…2^bits - 1; scales are float16, zero-points uint8.

Bytes. A row is one little-endian bit string: code i occupies bits ``i·bits … i·bits + bits - 1``, so eight
codes fill exactly ``bits`` bytes and a row of ``inputs`` (a multiple of 8) takes ``inputs · bits / 8``
bytes with no padding.

On a CPU the decoder expands resident weights to float32 once, when it loads them: a multiplication by
packed codes is bound by unpacking there. Sizes are nevertheless reported as packed, which is what a device
with its own kernel holds.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.proto.compiled import compiled

__all__ = ["BITS", "dequantize", "matvec_reference", "pack_codes", "packed_bytes", "unpack_codes"]

BITS = (2, 3, 4)
"""Supported code widths."""


def packed_bytes(inputs: int, bits: int) -> int:
    """Bytes of one packed row of ``inputs`` codes.

    Raises:
        ValueError: ``bits`` is not 2, 3 or 4, or ``inputs`` is not a multiple of 8.
    """
    if bits not in BITS:
        raise ValueError(f"codes of {bits} bits asked for; 2, 3 and 4 are supported")
    if inputs % 8:
        raise ValueError(f"a row of {inputs} codes cannot be packed densely; its length must be a multiple of 8")
    return inputs * bits // 8


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` [rows, inputs] (any integer type, 0…2^bits - 1) into [rows, inputs · bits / 8] uint8.

    Raises:
        ValueError: as :func:`packed_bytes`, or a code does not fit.
    """
    rows, inputs = codes.shape
    width = packed_bytes(inputs, bits)
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
        raise ValueError(f"codes from {int(codes.min())} to {int(codes.max())} do not fit {bits} bits")
    packed = np.empty((rows, width), np.uint8)
    _pack(codes.to(torch.uint8).contiguous().numpy(), bits, packed)
    return torch.from_numpy(packed)


@compiled
def _pack(codes: NDArray[np.uint8], bits: int, packed: NDArray[np.uint8]) -> None:
    for row in range(codes.shape[0]):
        for eight in range(codes.shape[1] // 8):
            word = np.uint64(0)
            for position in range(8):
                word |= np.uint64(codes[row, 8 * eight + position]) << np.uint64(position * bits)
            for byte in range(bits):
                packed[row, eight * bits + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


def unpack_codes(packed: Tensor, bits: int, inputs: int) -> Tensor:
    """Codes [rows, inputs] uint8 of ``packed`` [rows, inputs · bits / 8] uint8; undoes :func:`pack_codes`.

    Raises:
        ValueError: as :func:`packed_bytes`, or the packed rows have another length.
    """
    rows, width = packed.shape
    if width != packed_bytes(inputs, bits):
        raise ValueError(f"packed rows hold {width} bytes; {inputs} codes of {bits} bits take {inputs * bits // 8}")
    codes = np.empty((rows, inputs), np.uint8)
    _unpack(packed.contiguous().numpy(), bits, codes)
    return torch.from_numpy(codes)


@compiled
def _unpack(packed: NDArray[np.uint8], bits: int, codes: NDArray[np.uint8]) -> None:
    mask = np.uint64((1 << bits) - 1)
    for row in range(codes.shape[0]):
        for eight in range(codes.shape[1] // 8):
            word = np.uint64(0)
            for byte in range(bits):
                word |= np.uint64(packed[row, eight * bits + byte]) << np.uint64(8 * byte)
            for position in range(8):
                codes[row, 8 * eight + position] = np.uint8((word >> np.uint64(position * bits)) & mask)


def dequantize(packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int) -> Tensor:
    """Float32 weights [rows, inputs] of packed codes.

    Args:
        packed: [rows, inputs · bits / 8] uint8.
        scales: [rows, inputs / group] float16.
        zeros: [rows, inputs / group] uint8.
        bits: 2, 3 or 4.
        group: inputs that share a scale.

    Raises:
        ValueError: the shapes contradict each other.
    """
    rows, groups = scales.shape
    codes = unpack_codes(packed, bits, groups * group).view(rows, groups, group)
    weights = codes.float().sub_(zeros.float()[..., None]).mul_(scales.float()[..., None])
    return weights.view(rows, groups * group)


def matvec_reference(packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, x: Tensor) -> Tensor:
    """``y`` [rows] float32 of packed weights and ``x`` [inputs] float32; see :func:`dequantize`."""
    return dequantize(packed, scales, zeros, bits, group) @ x
