"""Low-bit weights with a codebook of its own for every output row.

Formula. ``w[o, i] = codebook[o, code[o, i]]``; codes are integers in 0…2^bits - 1, codebooks float16, ascending.

Bytes. Codes lie in bit planes, ``planes[p, o, i // 8]`` bit ``i % 8`` = bit ``bits - 1 - p`` of the code: the most
significant plane first, so that the first planes alone are the codes of a coarser codebook (Any-Precision LLM, Park et
al. 2024). A row of ``inputs`` (a multiple of 8) takes ``bits · inputs / 8`` bytes and ``2^bits`` float16 values.
"""

import torch
from torch import Tensor

__all__ = ["dequantize_codebook", "pack_planes", "unpack_planes"]


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Planes [bits, rows, inputs / 8] uint8 of ``codes`` [rows, inputs] uint8.

    Raises:
        ValueError: a code does not fit, or ``inputs`` is not a multiple of 8.
    """
    rows, inputs = codes.shape
    if inputs % 8:
        raise ValueError(f"a row of {inputs} codes does not fill bytes; its length must be a multiple of 8")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"codes up to {int(codes.max())} do not fit {bits} bits")
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    eights = codes.view(rows, inputs // 8, 8)
    planes = [((eights >> (bits - 1 - plane) & 1) << shifts).sum(-1, dtype=torch.uint8) for plane in range(bits)]
    return torch.stack(planes)


def unpack_planes(planes: Tensor) -> Tensor:
    """Codes [rows, inputs] uint8 of ``planes`` [bits, rows, inputs / 8] uint8; undoes :func:`pack_planes`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
    bits = (planes[..., None] >> shifts & 1).flatten(-2)
    codes = torch.zeros_like(bits[0])
    for plane in bits:
        codes = codes << 1 | plane
    return codes


def dequantize_codebook(planes: Tensor, codebook: Tensor) -> Tensor:
    """Float32 weights [rows, inputs] of ``planes`` [bits, rows, inputs / 8] and ``codebook`` [rows, 2^bits] float16.

    Raises:
        ValueError: the shapes contradict each other.
    """
    if codebook.shape != (planes.shape[1], 1 << planes.shape[0]):
        raise ValueError(f"codebooks {tuple(codebook.shape)} do not belong to planes {tuple(planes.shape)}")
    return codebook.float().gather(1, unpack_planes(planes).long())
