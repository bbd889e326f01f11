"""What the kernel knows of this process: bytes sent over its sockets, and how fast they may be; memory held."""

import ctypes
import math
import os
import platform
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

TCP_INFO, BYTES_SENT = 11, 200  # of linux/tcp.h: a struct tcp_info, and its member tcpi_bytes_sent (Linux 4.19)
MAX_PACING_RATE = 47  # of asm-generic/socket.h: SO_MAX_PACING_RATE


def tcp_sockets() -> Iterator[tuple[socket.socket, bytes]]:
    """This process's TCP sockets, each with its struct tcp_info."""
    if platform.system() != "Linux":
        raise OSError("only Linux counts what its sockets send, and paces them\n  fix: run it there")
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as s:
                yield s, s.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        except OSError:  # closed since, or not TCP
            continue


def bytes_sent() -> float:
    """Payload bytes that this process has sent over its TCP sockets so far; NaN where the kernel does not tell.

    Each socket's own counter, not the interface's: other processes on this machine do not count.
    """
    infos = [info for _, info in tcp_sockets()]
    if any(len(info) < BYTES_SENT + 8 for info in infos):
        return math.nan
    return sum(struct.unpack_from("Q", info, BYTES_SENT)[0] for info in infos)


def speed(wire: float) -> str:
    return f"{wire:.0f} MB/s" if wire else "loopback"


def slow_wire(wire: float) -> None:
    """Let the kernel send on each of this process's TCP connections no faster than so many MB/s; 0: as fast as it can.

    Loopback is as fast as the cores copy: to send takes their time. On a slowed wire it takes time, but not theirs.
    """
    for s, _ in tcp_sockets():
        s.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, struct.pack("Q", int(wire * 1e6 or 1e12)))


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most since `reset_peak`; on a GPU of its tensors there."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not peak:
        trim()
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    if torch.cuda.is_initialized():
        return torch.cuda.reset_peak_memory_stats()
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give the allocator's free memory back, where it is glibc's: what was freed must not count as held."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
