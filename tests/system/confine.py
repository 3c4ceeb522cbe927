"""Run a command under a seccomp filter: ``python confine.py deny|allow NUMBERS COMMAND…``, numbers of system calls.

``deny``: these fail with EPERM. ``allow``: all but these fail with EPERM.
"""

import ctypes
import os
import sys

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]


def confine(numbers: list[int], named: int, others: int) -> None:
    """Give this process and its children the filter, for good."""
    lines = [Instruction(_LOAD_NUMBER, 0, 0, 0)]
    for number in numbers:
        lines += [Instruction(_JUMP_EQUAL, 0, 1, number), Instruction(_RETURN, 0, 0, named)]
    lines.append(Instruction(_RETURN, 0, 0, others))
    program = Program(len(lines), (Instruction * len(lines))(*lines))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    mode, words, *command = sys.argv[1:]
    found = [int(word) for word in words.split(",")]
    confine(found, *((_REFUSE, _ALLOW) if mode == "deny" else (_ALLOW, _REFUSE)))
    os.execvp(command[0], command)
