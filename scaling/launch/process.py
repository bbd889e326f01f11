"""What a process needs before it is forked into ranks, or is one: ends, memory, threads, imports."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from scaling.common.torch_private import import_compiler

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # glibc: see keep_freed_memory
OMP_PAUSE_HARD = 2  # OpenMP 5.0


def ready_to_fork() -> None:
    """What this process does once, so that the ranks forked from it need not, or do not hang.

    The first gradient of torch.func imports the compiler, 840 modules in all, which ranks that share the cores do more
    slowly by as many times.
    """
    import_compiler()
    give_threads_back()


def give_threads_back() -> None:
    """End OpenMP's threads, which whoever computes next starts again. A process that is forked inherits the record of
    them, but not the threads: it would wait for them for ever."""
    if sys.platform == "linux":
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        for library in loaded:
            if os.path.basename(library).startswith(("libgomp", "libiomp", "libomp")):
                with contextlib.suppress(AttributeError, OSError):
                    ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


def autograd_has_threads() -> bool:
    """Whether autograd has begun a thread here for each GPU, as it does at a process's first gradient where there are
    GPUs: a forked process would not have them, and torch refuses gradients in it."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            names.append(task.read_text())
    return any(name.startswith("pt_autograd") for name in names)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for its next tensors, as torch does on a GPU.

    glibc gives large blocks back to the system at once, and each new one is then filled with zeros page by page: a
    tenth of the time of a step that, being a pure function, makes its gradients anew.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # glibc before 2.35
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def end_with_parent(parent: int) -> None:
    """Let this process die with the one that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
