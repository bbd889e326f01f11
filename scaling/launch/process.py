"""Prepare a process to be forked into ranks, or to be one: its end, its memory, its threads and its imports."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from scaling.common.torch_private import import_compiler

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # glibc's options of mallopt: see keep_freed_memory
OMP_PAUSE_HARD = 2  # OpenMP 5.0


def ready_to_fork() -> None:
    """Spare the ranks forked from this process work that each would have to do, or would hang without.

    The first gradient of torch.func imports the compiler, 840 modules in all. Ranks that share the cores would take
    several times as long for it.
    """
    import_compiler()
    give_threads_back()


def give_threads_back() -> None:
    """End OpenMP's threads; whoever computes next starts them again.

    A forked process inherits the record of these threads but not the threads. It would wait for them for ever.
    """
    if sys.platform == "linux":
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        for library in loaded:
            if os.path.basename(library).startswith(("libgomp", "libiomp", "libomp")):
                with contextlib.suppress(AttributeError, OSError):
                    ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


def autograd_has_threads() -> bool:
    """Return whether autograd has started a thread for each GPU, as it does at a process's first gradient.

    A forked process would not have these threads, and torch refuses gradients in it.
    """
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread may have just ended
            names.append(task.read_text())
    return any(name.startswith("pt_autograd") for name in names)


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees for its next tensors, as torch does on a GPU.

    glibc returns large blocks to the system at once, and each new block is then filled with zeros page by page. That
    takes a tenth of the time of a step which, being a pure function, allocates its gradients anew.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # glibc before 2.35
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def end_with_parent(parent: int) -> None:
    """Let this process die with the one that started it, however that one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
