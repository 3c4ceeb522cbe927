"""Loads, stores and fences on raw addresses, for compiled code that shares memory with another process.

Two processes share segments whose addresses are known only at run time, so every function here takes an
address (u64) rather than an array. All are LLVM intrinsics: no call, no Python, usable without the GIL, correct on
x86-64 and aarch64 alike (there ``acquire`` and ``release`` are real instructions).

The caller owns bounds and alignment: an address must lie inside a live mapping and be a multiple of the width.
Names say the order: plain ``load``/``store`` are *monotonic* (single-copy atomic, unordered), ``_acquire`` and
``_release`` pair with each other under one ``SYNC:`` label, and :func:`fence` is sequentially consistent: the only one
that keeps a store before a later load, which the grace protocol needs (FORMAT.md, "Grace").
"""

import platform
from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "U8",
    "U32",
    "U64",
    "Codegen",
    "add_u64",
    "copy_bytes",
    "fence",
    "fence_acquire",
    "load_acquire_u32",
    "load_acquire_u64",
    "load_f32",
    "load_u8",
    "load_u16",
    "load_u32",
    "load_u64",
    "pause",
    "store_release_u32",
    "store_release_u64",
    "store_u8",
    "store_u16",
    "store_u32",
    "store_u64",
]

U8: TypeAlias = Any
U32: TypeAlias = Any
U64: TypeAlias = Any
"""Machine words in compiled code: unsigned integers there, int or np.uint64 for whoever calls from Python."""

_WIDTHS = {types.uint8: 1, types.uint16: 2, types.uint32: 4, types.uint64: 8}
_LLVM_INT = {1: ir.IntType(8), 2: ir.IntType(16), 4: ir.IntType(32), 8: ir.IntType(64)}

Codegen = Callable[..., Any]


def _intrinsic(fn: Codegen) -> Any:
    """Numba's decorator, untyped: checkers would otherwise ask callers for the typing context."""
    return intrinsic(fn)


def _pointer(builder: Any, address: Any, width: int) -> Any:
    return builder.inttoptr(address, _LLVM_INT[width].as_pointer())


def _make_load(name: str, result: Any, order: str, doc: str) -> Any:
    width = _WIDTHS[result]

    def load(typing_context: Any, address: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = context.cast(builder, args[0], signature.args[0], types.uint64)
            return builder.load_atomic(_pointer(builder, wide, width), order, width)

        return result(address), codegen

    load.__name__ = load.__qualname__ = name
    load.__doc__ = doc
    return _intrinsic(load)


def _make_store(name: str, stored: Any, order: str, doc: str) -> Any:
    width = _WIDTHS[stored]

    def store(typing_context: Any, address: Any, value: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = context.cast(builder, args[0], signature.args[0], types.uint64)
            cast = context.cast(builder, args[1], signature.args[1], stored)
            builder.store_atomic(cast, _pointer(builder, wide, width), order, width)
            return context.get_dummy_value()

        return types.void(address, value), codegen

    store.__name__ = store.__qualname__ = name
    store.__doc__ = doc
    return _intrinsic(store)


load_u8 = _make_load("load_u8", types.uint8, "monotonic", "Load u8 at an address, unordered.")
load_u16 = _make_load("load_u16", types.uint16, "monotonic", "Load u16 at an address, unordered.")
load_u32 = _make_load("load_u32", types.uint32, "monotonic", "Load u32 at an address, unordered.")
load_u64 = _make_load("load_u64", types.uint64, "monotonic", "Load u64 at an address, unordered.")
load_acquire_u32 = _make_load("load_acquire_u32", types.uint32, "acquire", "Load u32; later accesses stay after it.")
load_acquire_u64 = _make_load("load_acquire_u64", types.uint64, "acquire", "Load u64; later accesses stay after it.")
store_u8 = _make_store("store_u8", types.uint8, "monotonic", "Store u8 at an address, unordered.")
store_u16 = _make_store("store_u16", types.uint16, "monotonic", "Store u16 at an address, unordered.")
store_u32 = _make_store("store_u32", types.uint32, "monotonic", "Store u32 at an address, unordered.")
store_u64 = _make_store("store_u64", types.uint64, "monotonic", "Store u64 at an address, unordered.")
store_release_u32 = _make_store(
    "store_release_u32", types.uint32, "release", "Store u32; earlier accesses stay before it."
)
store_release_u64 = _make_store(
    "store_release_u64", types.uint64, "release", "Store u64; earlier accesses stay before it."
)


@_intrinsic
def load_f32(typing_context: Any, address: Any) -> tuple[Any, Codegen]:
    """Load an f32 at an address, unordered (plain: the compiler may vectorise it)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = context.cast(builder, args[0], signature.args[0], types.uint64)
        return builder.load(builder.inttoptr(wide, ir.FloatType().as_pointer()), align=4)

    return types.float32(address), codegen


@_intrinsic
def add_u64(typing_context: Any, address: Any, value: Any) -> tuple[Any, Codegen]:
    """Atomically add to a u64 and return the value before (sequentially consistent). Host threads only:
    GPUs on PCIe have no atomics on host memory, so nothing that a GPU writes uses it.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = context.cast(builder, args[0], signature.args[0], types.uint64)
        cast = context.cast(builder, args[1], signature.args[1], types.uint64)
        return builder.atomic_rmw("add", _pointer(builder, wide, 8), cast, "seq_cst")

    return types.uint64(address, value), codegen


def _make_fence(name: str, order: str, doc: str) -> Any:
    def make(typing_context: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), codegen

    make.__name__ = make.__qualname__ = name
    make.__doc__ = doc
    return _intrinsic(make)


fence = _make_fence("fence", "seq_cst", "Full fence: no access moves across it, store-then-load included.")
fence_acquire = _make_fence("fence_acquire", "acquire", "Earlier loads stay before every later access.")


@_intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> tuple[Any, Codegen]:
    """Copy ``count`` bytes between two addresses that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = [context.cast(builder, a, t, types.uint64) for a, t in zip(args, signature.args, strict=True)]
        pointers = [builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in wide[:2]]
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder, pointers[0], pointers[1], wide[2], 1
        )
        return context.get_dummy_value()

    return types.void(target, source, count), codegen


@_intrinsic
def pause(typing_context: Any) -> tuple[Any, Codegen]:
    """Tell the core that this is a spin loop (x86 ``pause``, Arm ``yield``); a no-op elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        hint = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}
        if platform.machine() in hint:
            name, numbers = hint[platform.machine()]
            words = [ir.Constant(ir.IntType(32), n) for n in numbers]
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(words))
            builder.call(builder.module.declare_intrinsic(name, fnty=kind), words)
        return context.get_dummy_value()

    return types.void(), codegen
