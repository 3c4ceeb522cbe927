"""Sleep on a word of shared memory until another process changes it."""

import ctypes
import errno
import os
import platform
from typing import Final

__all__ = [
    "wait",
]

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT: Final = 0  # not FUTEX_PRIVATE: the waker is another process
_NUMBER: Final = _NUMBERS.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, timeout_nanoseconds: int) -> None:
    """Sleep while the u32 at ``address`` equals ``value``, at most so long; may return early for no reason.

    The GIL is released meanwhile. A read-only mapping will do.

    Raises:
        OSError: the address is not mapped, or this machine's kernel has no futex(2) known here.
    """
    if _NUMBER is None:
        raise OSError(errno.ENOSYS, f"futex(2) on {platform.machine()}")
    timeout = _Timespec(*divmod(max(timeout_nanoseconds, 0), 1_000_000_000))
    expected = ctypes.c_uint32(value)
    if _libc.syscall(_NUMBER, ctypes.c_void_p(address), _FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))
