"""Start ranks: torchrun's if there are several, otherwise this file forks them on this machine.

`run(fn, {"X": 4, "Y": 2}, *args)` calls `fn(mesh, *args)` on eight ranks and returns their results. A rank that raises,
exits, is killed or times out ends the run within seconds, with its number and its traceback; no process stays behind.
A process that is to be forked into ranks, or to be one, is prepared here too: its end, its memory, its threads.
"""

import contextlib
import ctypes
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import record

from scaling.common.console import complain
from scaling.common.torch_private import import_compiler
from scaling.common.torchrun import as_rank, this_rank, without_torchrun, world_size
from scaling.launch.watch import LEFT, Rank, RankError, blame_of, watch, watch_self
from scaling.mesh import TIMEOUT, AbstractMesh, Mesh, check_device, join_world
from scaling.mesh.lost import RankEnded, naming, with_own_frames
from scaling.mesh.meeting import agree
from scaling.spec import ShardingError

WAIT = 5.0  # seconds in which torchrun may end a rank whose own error says nothing new
WAIT_OF_MANY = 2.0  # the same with several nodes, where torchrun ends no rank of another node


def run(
    fn: Callable,
    sizes: Mapping[str, int],
    *args,
    device: str = "cpu",
    checked: bool = True,
    timeout: float = TIMEOUT,
    threads: int = 1,
) -> list:
    """Call `fn(mesh, *args)` on every rank of a mesh of these sizes; return the results in rank order.

    Ranks are forked on Linux, so that closures are fine. They are spawned elsewhere, for CUDA, and after a gradient in
    a process that sees GPUs; there fn must be importable. Results are pickled. A mesh of one device runs in this
    process.

    Args:
        fn: the function that each rank calls.
        sizes: the mesh's axes and their sizes.
        *args: passed on to fn.
        device: "cpu" or "cuda".
        checked: whether the ranks compare every collective before it runs (`scaling.collectives.checked`).
        timeout: seconds that a collective waits for the other ranks.
        threads: the intra-op threads of each rank.

    Raises:
        RankError: a rank has failed.
        ShardingError: the sizes make no mesh, or this process is itself a rank.
    """
    check_device(device)
    world = AbstractMesh(sizes).size()
    if world == 1:
        return [fn(Mesh(sizes, device, checked, timeout), *args)]
    if dist.is_initialized():
        raise ShardingError(
            f"launch.run cannot start {world} ranks from a process that is a rank itself\n"
            f"  fix: call it from the program that starts the ranks, or use this run's mesh"
        )
    if (running := world_size()) > 1:
        raise ShardingError(
            f"launch.run cannot start {world} ranks in each of torchrun's {running} (WORLD_SIZE={running})\n"
            f"  fix: launch.start(fn, sizes, ...), for which torchrun's ranks are the mesh, or use python"
        )
    context = mp.get_context("fork" if can_fork(device) else "spawn")
    if context.get_start_method() == "fork":
        ready_to_fork()
    else:
        _check_importable(fn, args)
    ranks = []
    with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
        work = (os.getpid(), listener.getsockname()[1], world, fn, dict(sizes), args, device, checked, timeout, threads)
        try:
            for number in range(world):
                ranks.append(Rank(number, context, _rank, None if number else listener, *work))
            return [pickle.loads(result) for result in watch(ranks, timeout, torch.device(device).type == "cpu")]
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.end()


def can_fork(device: str) -> bool:
    """Return whether ranks are forked from this process, so that they can run any of its functions.

    Otherwise they import its main module.
    """
    return sys.platform == "linux" and torch.device(device).type == "cpu" and not autograd_has_threads()


def _check_importable(fn: Callable, args: tuple) -> None:
    """Raise a ValueError unless fn and its arguments can be sent to a process that is not forked from this one."""
    try:
        pickle.dumps((fn, args))
    except Exception as error:
        why = "for CUDA, outside Linux, and after a gradient in a process that sees GPUs, ranks cannot be forked"
        raise ValueError(
            f"{getattr(fn, '__qualname__', fn)} cannot be given to ranks: {error}\n  rule: {why}\n"
            "  fix: define it at the top of a module, or start ranks before the first gradient, or by torchrun"
        ) from error


def start_by_torchrun(sizes: Mapping[str, int], device: str) -> None:
    """Start this script again as torchrun's ranks if ranks cannot be forked; it ends with their exit code.

    A script whose top-level statements start ranks needs this, since spawned ranks could not import it, and ranks
    cannot be forked where there are GPUs and the script has computed a gradient. If ranks can be forked, nothing
    happens.
    """
    world = AbstractMesh(sizes).size()
    if world == 1 or (can_fork(device) and not torch.cuda.is_available()) or world_size() > 1:
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    os.execve(sys.executable, [*torchrun, *sys.argv], {"OMP_NUM_THREADS": "1", **without_torchrun(os.environ)})


def start(fn: Callable, sizes: Mapping[str, int], *args, device: str = "cpu", checked: bool = True, **options):
    """Run a script's function on a mesh: as one of torchrun's ranks if there are several, otherwise as `run` does.

    Returns this rank's result, or rank 0's if the ranks were started here. A script that fails ends with exit code 1
    and only the failing rank's traceback.
    """
    try:
        this = this_rank()
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
    if this.by_torchrun:
        end_with_parent(os.getppid())
    if this.size == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started ranks are cleaned up
        try:
            AbstractMesh(sizes)
        except ShardingError as error:
            sys.exit(f"ShardingError: {error}")
        try:
            return run(fn, sizes, *args, device=device, checked=checked, **options)[0]
        except RankError as error:
            sys.exit(f"RankError: {error}")
        except KeyboardInterrupt:
            complain("interrupted")
            sys.exit(130)
    keep_freed_memory()
    torch.set_num_threads(options.pop("threads", 1))
    with watch_self(options.get("timeout", TIMEOUT)):
        return _as_rank(fn, sizes, args, device, checked, **options)


@record  # puts the traceback into torchrun's report
def _as_rank(fn: Callable, sizes: Mapping[str, int], args, device: str, checked: bool, **options):
    try:
        with naming("a call of torch.distributed", None):
            mesh = Mesh(sizes, device, checked, **options)
            result = fn(mesh, *args)
            end_alike(mesh)
    except Exception as error:
        this = this_rank()
        alike = isinstance(error, ShardingError) and this.rank != 0  # usually all ranks raise it
        if alike or blame_of(error) == LEFT:  # let torchrun see first the rank whose end caused this, and end this one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(WAIT if this.local_size == this.size else WAIT_OF_MANY)
        if isinstance(error, (TimeoutError, RankEnded)):  # the message says all that the library's own frames would
            raise with_own_frames(error) from None
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def fit_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a script's default mesh with its first axis changed to fit the number of ranks that torchrun started."""
    world, first = world_size(), next(iter(sizes))
    rest = math.prod(size for axis, size in sizes.items() if axis != first)
    if world == 1 or world % rest:
        return dict(sizes)
    return {**sizes, first: world // rest}


def _rank(number: int, voice, listener, parent: int, *work) -> None:
    """Run one started rank; whatever ends it early is sent to its parent."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(parent)
        voice.show_stack_on_request()
        _work(number, voice, listener, *work)
    except BaseException as error:  # also sys.exit, since the others wait for this rank
        try:
            voice.failure(number, error)
            sys.stdout.flush()
        finally:
            os._exit(1)


def _work(
    rank: int, voice, listener, port: int, world: int, fn, sizes, args, device, checked, timeout, threads
) -> None:
    keep_freed_memory()
    torch.set_num_threads(threads)  # must come before any computing
    environment = as_rank(os.environ, rank, world, port)
    os.environ.clear()
    os.environ |= environment
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    fd = listener.fileno() if listener is not None else None  # rank 0 keeps the store that all meet at
    store = dist.TCPStore(
        "127.0.0.1", port, world, rank == 0, timedelta(seconds=timeout), wait_for_workers=False, master_listen_fd=fd
    )
    join_world(device, timeout, store, rank, world)
    mesh = Mesh(sizes, device, checked, timeout)
    result = _pickled(fn(mesh, *args))
    end_alike(mesh)
    voice.result(result)
    dist.barrier()  # no rank leaves while another may still need it
    dist.destroy_process_group()


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"what the function returned, a {type(result).__name__}, cannot be pickled: {error}"
            "\n  fix: return tensors, numbers, texts, or lists and dicts of them"
        ) from None


def end_alike(mesh: Mesh) -> None:
    """Check that all ranks end together: a rank that ends while others still call collectives disagrees with them."""
    if mesh.checked and mesh.size() > 1:
        agree(mesh.group(tuple(mesh.sizes)), "the end of the run")


PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # glibc's options of mallopt: see keep_freed_memory
OMP_PAUSE_HARD = 2  # OpenMP 5.0


def ready_to_fork() -> None:
    """Import the compiler once for all ranks before the fork, and end the threads that a fork does not copy.

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


def free_memory(device: str, ranks: int = 1) -> float:
    """Return the bytes that are free for each rank, of its GPU, or of the machine that `ranks` ranks share."""
    check_device(device)
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if not (info := Path("/proc/meminfo")).exists():
        return math.inf
    free = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    here = this_rank().local_size if world_size() > 1 else 0  # torchrun's only rank starts all ranks on this machine
    return int(free.split()[1]) * 1024 / (here or ranks)


@contextlib.contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call act(number) during the block, in the main thread of a process."""
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    before = [signal.signal(number, lambda number, _: act(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Let this process die with the one that started it, however that one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
