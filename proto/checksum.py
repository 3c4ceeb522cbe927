"""CRC-32C (Castagnoli), the checksum of every record: on arrays for writers, fused with the copy for the reader.

The hardware instruction of x86-64 (SSE 4.2) and aarch64 (crc32 extension) is used where this processor has it, else
a table of 256 entries; :data:`HARDWARE` says which. Both give RFC 3720's values (``123456789`` → ``0xE3069283``).

:func:`copy_crc32c` reads each source byte once: the bytes that are stored are the bytes that were summed, so a source
that changes meanwhile (a DMA that is still running, a hostile writer) cannot be served under a good checksum.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from strataflux.proto.atomics import U32, U64, load_u8, load_u64, store_u8, store_u64
from strataflux.proto.compiled import compiled

__all__ = ["HARDWARE", "copy_crc32c", "crc32c", "crc32c_rows"]

_X86 = {8: ("llvm.x86.sse42.crc32.64.64", 64, 64), 1: ("llvm.x86.sse42.crc32.32.8", 32, 8)}
_ARM = {8: ("llvm.aarch64.crc32cx", 32, 64), 1: ("llvm.aarch64.crc32cb", 32, 32)}


def _instructions() -> dict[int, tuple[str, int, int]]:
    """{bytes a step: (LLVM intrinsic, checksum width, data width)}; empty where the processor has none."""
    features = binding.get_host_cpu_features()
    if platform.machine() == "x86_64" and features.get("sse4.2"):
        return _X86
    if platform.machine() == "aarch64" and features.get("crc", True):
        return _ARM
    return {}


_INSTRUCTIONS = _instructions()
HARDWARE = bool(_INSTRUCTIONS)
"""True when checksums use the processor's CRC-32C instruction."""


def _make_step(width: int) -> Any:
    def step(typing_context: Any, checksum: Any, data: Any) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            name, sum_bits, data_bits = _INSTRUCTIONS[width]
            value = context.cast(builder, args[0], signature.args[0], types.uint64)
            piece = context.cast(builder, args[1], signature.args[1], types.uint64)
            sum_type, data_type = ir.IntType(sum_bits), ir.IntType(data_bits)
            function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(sum_type, [sum_type, data_type]))
            if sum_bits < 64:
                value = builder.trunc(value, sum_type)
            if data_bits < 64:
                piece = builder.trunc(piece, data_type)
            result = builder.call(function, [value, piece])
            return builder.zext(result, ir.IntType(64)) if sum_bits < 64 else result

        return types.uint64(checksum, data), codegen

    step.__name__ = step.__qualname__ = f"_step{width}"
    return intrinsic(step)


def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


if HARDWARE:
    _step8, _step1 = _make_step(8), _make_step(1)
else:
    _TABLE = _table()

    @compiled
    def _step1(checksum: U64, data: U64) -> U64:
        return np.uint64(_TABLE[(checksum ^ data) & 0xFF]) ^ (np.uint64(checksum) >> np.uint64(8))

    @compiled
    def _step8(checksum: U64, data: U64) -> U64:
        value = np.uint64(checksum)
        for shift in range(0, 64, 8):
            value = _step1(value, (np.uint64(data) >> np.uint64(shift)) & np.uint64(0xFF))
        return value


@compiled
def copy_crc32c(target: U64, source: U64, count: U64) -> U32:
    """Copy ``count`` bytes from ``source`` to ``target`` (addresses) and return their CRC-32C as a u32 value."""
    value = np.uint64(0xFFFFFFFF)
    step = np.uint64(8)
    words = np.uint64(count) // step
    from_, to = np.uint64(source), np.uint64(target)
    for _ in range(words):
        piece = load_u64(from_)
        store_u64(to, piece)
        value = _step8(value, piece)
        from_ += step
        to += step
    for _ in range(np.uint64(count) - words * step):
        byte = load_u8(from_)
        store_u8(to, byte)
        value = _step1(value, byte)
        from_ += np.uint64(1)
        to += np.uint64(1)
    return np.uint32(value ^ np.uint64(0xFFFFFFFF))


@compiled
def _crc_of(data: NDArray[np.uint8]) -> U32:
    value = np.uint64(0xFFFFFFFF)
    words = data[: data.size // 8 * 8].view(np.uint64)
    for i in range(words.size):
        value = _step8(value, words[i])
    for i in range(words.size * 8, data.size):
        value = _step1(value, np.uint64(data[i]))
    return np.uint32(value ^ np.uint64(0xFFFFFFFF))


@compiled
def crc32c_rows(rows: NDArray[np.uint8], out: NDArray[np.uint32]) -> None:
    """CRC-32C of each row of ``rows`` (u8 [n, bytes], C order) into ``out`` (u32 [n])."""
    for i in range(rows.shape[0]):
        out[i] = _crc_of(rows[i])


def crc32c(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """CRC-32C of a buffer."""
    return int(_crc_of(np.frombuffer(data, dtype=np.uint8)))
