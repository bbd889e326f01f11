"""Sleeping until another process changes a word in shared memory: Linux's futex; elsewhere short naps."""

import ctypes
import mmap
import platform
import sys
import time

NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}  # of the system call
WAIT, WAKE = 0, 1
NAP = 2e-4  # seconds

_call, _number = None, NUMBERS.get(platform.machine())
if sys.platform == "linux" and _number is not None:
    _call = ctypes.CDLL(None).syscall
    _call.argtypes = [ctypes.c_long, ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 2, ctypes.c_long]
    _call.restype = ctypes.c_long


def has_futex() -> bool:
    return _call is not None


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """32 bits of shared memory that processes set, and wait to be set."""

    def __init__(self, memory: mmap.mmap, offset: int):
        self.word = ctypes.c_uint32.from_buffer(memory, offset)
        self.address = ctypes.addressof(self.word)

    @property
    def value(self) -> int:
        return self.word.value

    def set(self, value: int) -> None:
        """Set it, and wake all that wait."""
        self.word.value = value
        if _call is not None:
            _call(_number, self.address, WAKE, 1 << 30, None, None, 0)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until it is not `seen` any more, or has been set since, or for so many seconds."""
        if _call is None:
            time.sleep(min(NAP, seconds))
        else:
            time_ = _Time(int(seconds), int(seconds % 1 * 1e9))
            _call(_number, self.address, WAIT, seen, ctypes.byref(time_), None, 0)
