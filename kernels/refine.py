"""Refinement of one projection: ``y += scale ⊙ Σ_i x_i · (code_i - 8)`` over the selected input channels.

A record holds the codes of one input channel for all outputs of a projection set: an output is a nibble q + 8 with q in
-7…7 (so nibble 0 never occurs), least significant first. Byte j holds output 2j in bits 0-3 and output 2j + 1 in bits
4-7; a record takes ``ceil(outputs / 2)`` bytes. With an odd number of outputs the last high nibble is 8, a zero. Scales
are one float32 per output, shared by all channels, and stay with the resident weights.

The compiled path reads records where they lie (their addresses in this process) and sums in float32 in the order of the
addresses given, so equal inputs give equal bits. Address 0 means the record is absent: its channel adds nothing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from strataflux.proto.compiled import compiled

__all__ = ["code_columns", "pack_records", "record_bytes", "refine_addresses", "refine_reference"]


def record_bytes(outputs: int) -> int:
    """Bytes of one record for a projection set with ``outputs`` outputs."""
    return (outputs + 1) // 2


def pack_records(codes: Tensor) -> Tensor:
    """Records [channels, record_bytes] uint8 of ``codes`` [outputs, channels] int8 in -7…7."""
    records = np.empty((codes.shape[1], record_bytes(codes.shape[0])), np.uint8)
    _pack(codes.contiguous().numpy(), records)
    return torch.from_numpy(records)


@compiled
def _pack(codes: NDArray[np.int8], records: NDArray[np.uint8]) -> None:
    outputs, channels = codes.shape
    # A transposition: 64 channels at a time keep the lines being written in the first-level cache.
    for start in range(0, channels, 64):
        for j in range(outputs // 2):
            for i in range(start, min(start + 64, channels)):
                records[i, j] = np.uint8((codes[2 * j, i] + 8) | (codes[2 * j + 1, i] + 8) << 4)
        if outputs % 2:
            for i in range(start, min(start + 64, channels)):
                records[i, outputs // 2] = np.uint8((codes[outputs - 1, i] + 8) | 8 << 4)


def code_columns(records: Tensor, outputs: int) -> Tensor:
    """Codes [outputs, channels] int8 of ``records`` [channels, record_bytes] uint8."""
    nibbles = torch.stack((records & 15, records >> 4), dim=-1).flatten(1)[:, :outputs]
    return nibbles.t().to(torch.int8) - 8


def refine_reference(y: Tensor, x: Tensor, indices: Tensor, records: Tensor, scale: Tensor) -> None:
    """Add the refinement of the selected channels to ``y`` by definition.

    Args:
        y: [outputs] float32, changed in place.
        x: [width] float32.
        indices: [selected] int64 channels.
        records: [selected, record_bytes] uint8, the records of those channels.
        scale: [outputs] float32.
    """
    codes = code_columns(records, y.numel()).float()
    y += scale * (codes @ x[indices])


def _pointer(_typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = context.cast(builder, args[0], signature.args[0], types.uint64)
        return builder.inttoptr(wide, ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(address), codegen  # type: ignore[no-untyped-call]


_bytes_at: Any = intrinsic(_pointer)


@compiled
def refine_addresses(
    y: NDArray[np.float32],
    x: NDArray[np.float32],
    indices: NDArray[np.int64],
    addresses: NDArray[np.uint64],
    scale: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> int:
    """Add the refinement of the channels whose records are present to ``y``, reading the records in place.

    Args:
        y: [outputs] float32, changed in place.
        x: [width] float32.
        indices: [selected] int64 channels.
        addresses: [selected] uint64, where each channel's record lies; 0 where it is absent. The caller
            keeps every record mapped and unchanged until this returns.
        scale: [outputs] float32.
        sums: scratch of at least ``2 · record_bytes`` float32, overwritten.

    Returns:
        How many records were added.
    """
    half = (y.size + 1) // 2
    # Low and high nibbles are summed apart: both loops then run over consecutive memory and are vectorised.
    low, high = sums[:half], sums[half : 2 * half]
    low[:] = 0
    high[:] = 0
    added = 0
    for i in range(addresses.size):
        if addresses[i] != 0:
            record = carray(_bytes_at(addresses[i]), half)
            _add_record(low, high, record, x[indices[i]])
            added += 1
    if added > 0:
        for j in range(y.size // 2):
            y[2 * j] += scale[2 * j] * low[j]
            y[2 * j + 1] += scale[2 * j + 1] * high[j]
        if y.size % 2:
            y[y.size - 1] += scale[y.size - 1] * low[half - 1]
    return added


@compiled
def _add_record(
    low: NDArray[np.float32], high: NDArray[np.float32], record: NDArray[np.uint8], weight: np.float32
) -> None:
    for j in range(record.size):
        pair = np.int32(record[j])
        low[j] += weight * np.float32(np.int32(pair & 15) - np.int32(8))
        high[j] += weight * np.float32(np.int32(pair >> 4) - np.int32(8))
