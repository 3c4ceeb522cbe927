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

import torch
from torch import Tensor

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
    words = torch.zeros(rows, inputs // 8, dtype=torch.int64)
    for position in range(8):
        words |= codes[:, position::8].long() << bits * position
    return torch.stack([words >> 8 * byte & 255 for byte in range(bits)], -1).to(torch.uint8).view(rows, width)


def unpack_codes(packed: Tensor, bits: int, inputs: int) -> Tensor:
    """Codes [rows, inputs] uint8 of ``packed`` [rows, inputs · bits / 8] uint8; undoes :func:`pack_codes`.

    Raises:
        ValueError: as :func:`packed_bytes`, or the packed rows have another length.
    """
    rows, width = packed.shape
    if width != packed_bytes(inputs, bits):
        raise ValueError(f"packed rows hold {width} bytes; {inputs} codes of {bits} bits take {inputs * bits // 8}")
    groups = packed.view(rows, inputs // 8, bits).long()
    words = torch.zeros(rows, inputs // 8, dtype=torch.int64)
    for byte in range(bits):
        words |= groups[..., byte] << 8 * byte
    mask = (1 << bits) - 1
    codes = torch.stack([words >> bits * position & mask for position in range(8)], -1)
    return codes.to(torch.uint8).view(rows, inputs)


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
    return ((codes.float() - zeros.float()[..., None]) * scales.float()[..., None]).view(rows, groups * group)


def matvec_reference(packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, x: Tensor) -> Tensor:
    """``y`` [rows] float32 of packed weights and ``x`` [inputs] float32; see :func:`dequantize`."""
    return dequantize(packed, scales, zeros, bits, group) @ x
