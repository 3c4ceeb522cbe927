"""The compiled loops of the race: touching records where they lie."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = ["Addresses", "compile_loops", "touch_addresses", "touch_mapped"]

Addresses = NDArray[np.uint64]


def _loading(_typing_context: Any, _address: Any) -> tuple[Any, Any]:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.uint64(types.uint64), codegen


_load: Any = intrinsic(_loading)


@numba.njit(nogil=True, error_model="numpy")
def touch_addresses(addresses: Addresses, words: int) -> int:
    """Load the first ``words`` words of each record that is there (address not 0); their exclusive or."""
    found = np.uint64(0)
    for i in range(addresses.size):
        if addresses[i] != np.uint64(0):
            for j in range(words):
                found ^= _load(addresses[i] + np.uint64(8 * j))
    return np.int64(found >> np.uint64(1))  # type: ignore[return-value]


@numba.njit(nogil=True, error_model="numpy")
def touch_mapped(base: int, stride: int, keys: NDArray[np.int64], words: int) -> int:
    """The same of records ``keys`` that lie ``stride`` bytes apart from ``base`` on."""
    found = np.uint64(0)
    for i in range(keys.size):
        at = np.uint64(base) + np.uint64(keys[i]) * np.uint64(stride)
        for j in range(words):
            found ^= _load(at + np.uint64(8 * j))
    return np.int64(found >> np.uint64(1))  # type: ignore[return-value]


def compile_loops() -> None:
    """Now, not within a measurement."""
    data = np.zeros(4, np.uint64)
    touch_addresses(np.array([0, data.ctypes.data], np.uint64), 1)
    touch_mapped(data.ctypes.data, 8, np.zeros(2, np.int64), 1)
