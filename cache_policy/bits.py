"""Three machine instructions that compiled Python has no word for; LLVM intrinsics, alike on x86-64 and aarch64."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["count_ones", "octave", "prefetch"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_READ, _NEAREST, _DATA = 0, 3, 1

_Codegen = Callable[..., Any]


def _intrinsic(fn: _Codegen) -> Any:
    """Numba's decorator, untyped: checkers would otherwise ask callers for the typing context."""
    return intrinsic(fn)


@_intrinsic
def count_ones(typing_context: Any, value: Any) -> tuple[Any, _Codegen]:  # noqa: ARG001 - Numba's signature
    """How many bits of the 64-bit integer ``value`` are set, as i64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(context.cast(builder, args[0], signature.args[0], types.int64))

    return types.int64(value), codegen


@_intrinsic
def octave(typing_context: Any, value: Any) -> tuple[Any, _Codegen]:  # noqa: ARG001 - Numba's signature
    """The whole part of log2 of the positive integer ``value``, as i64; -1 of 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.sub(ir.Constant(_I64, 63), builder.ctlz(wide, ir.Constant(ir.IntType(1), 0)))

    return types.int64(value), codegen


@_intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, _Codegen]:  # noqa: ARG001 - Numba's signature
    """Ask for the cache line of ``array[index]`` (one dimension, contiguous) before it is needed; changes nothing, and
    an index outside the array does no harm.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        wide = context.cast(builder, args[1], signature.args[1], types.int64)
        item = builder.bitcast(builder.gep(data, [wide]), ir.IntType(8).as_pointer())
        void = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
        fn = builder.module.declare_intrinsic("llvm.prefetch", [ir.IntType(8).as_pointer()], void)
        builder.call(fn, [item, *(ir.Constant(_I32, word) for word in (_READ, _NEAREST, _DATA))])
        return context.get_dummy_value()

    return types.none(array, index), codegen
