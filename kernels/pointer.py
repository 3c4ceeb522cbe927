"""Bytes at an address, for compiled code that reads records where they lie."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["bytes_at"]


def _pointer(_typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = context.cast(builder, args[0], signature.args[0], types.uint64)
        return builder.inttoptr(wide, ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(address), codegen  # type: ignore[no-untyped-call]


bytes_at: Any = intrinsic(_pointer)
"""In compiled code: the address (any integer) as a pointer to u8, to be wrapped by ``carray``."""
