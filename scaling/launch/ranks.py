"""Starting ranks: torchrun's if there are several, otherwise this file forks them on this machine.

`run(fn, {"X": 4, "Y": 2}, *args)` calls `fn(mesh, *args)` on eight ranks and returns their results. A rank that raises,
exits, is killed or waits in vain ends the run within seconds, with its number and its traceback; none stays behind.
"""

import ctypes
import math
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import record

from scaling.collectives.checked import agree
from scaling.launch.watch import CLOSED, RankError, report, show_stack_on_request, watch
from scaling.mesh import TIMEOUT, AbstractMesh, Mesh, join_world
from scaling.spec import ShardingError

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # glibc: see keep_freed_memory


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

    Ranks are forked on Linux (closures are fine), spawned for CUDA and elsewhere (fn must be importable); results are
    pickled. A mesh of one device runs in this process. `checked`: ranks compare every collective before it runs
    (`scaling.collectives.checked`). `timeout`: seconds that a collective waits for other ranks. `threads`: intra-op
    threads of a rank.
    Raises RankError if a rank fails, ShardingError for sizes that make no mesh.
    """
    world = AbstractMesh(sizes).size()
    if world == 1:
        return [fn(Mesh(sizes, device, checked, timeout), *args)]
    context = mp.get_context("fork" if sys.platform == "linux" and torch.device(device).type == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = (os.getpid(), world, folder, fn, dict(sizes), args, device, checked, timeout, threads)
        ranks = [context.Process(target=_rank, args=(rank, *work)) for rank in range(world)]
        try:
            for process in ranks:
                process.start()
            watch(ranks, Path(folder))
            return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]
        finally:
            started = [process for process in ranks if process.pid is not None]
            for process in started:
                process.kill()
            for process in started:
                process.join()


def start(fn: Callable, sizes: Mapping[str, int], *args, device: str = "cpu", checked: bool = True, **options):
    """The entry of a script: under torchrun with several ranks this process is one of them; otherwise as `run`.

    Returns this rank's result, of rank 0 where the ranks were started here. A script that fails ends with exit code 1,
    and with the failing rank's traceback alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_parent(os.getppid())
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is cleaned up
        try:
            AbstractMesh(sizes)
        except ShardingError as error:
            sys.exit(f"ShardingError: {error}")
        try:
            return run(fn, sizes, *args, device=device, checked=checked, **options)[0]
        except RankError as error:
            sys.exit(f"RankError: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    keep_freed_memory()
    torch.set_num_threads(options.pop("threads", 1))
    return _as_rank(lambda: fn(Mesh(sizes, device, checked, **options), *args))


@record  # so that torchrun's report holds the traceback
def _as_rank(main: Callable):
    try:
        result = main()
    except RuntimeError as error:
        if CLOSED in str(error):  # another rank has failed: let torchrun see that one first, and end this one
            time.sleep(2)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def fit(sizes: Mapping[str, int]) -> dict[str, int]:
    """A script's default mesh, made to fit the number of ranks that torchrun started by changing its first axis."""
    world, first = int(os.environ.get("WORLD_SIZE", 1)), next(iter(sizes))
    rest = math.prod(size for axis, size in sizes.items() if axis != first)
    if world == 1 or world % rest:
        return dict(sizes)
    return {**sizes, first: world // rest}


def _rank(rank: int, parent: int, world: int, folder: str, *work) -> None:
    """The life of one started rank: what ends it before it is through goes to a file in the folder."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with_parent(parent)
        show_stack_on_request(Path(folder), rank)
        _work(rank, world, folder, *work)
    except BaseException as error:  # also sys.exit: the others wait for this rank
        report(Path(folder), rank, error)
        sys.stdout.flush()
        os._exit(1)


def _work(rank: int, world: int, folder: str, fn, sizes, args, device, checked, timeout, threads) -> None:
    keep_freed_memory()
    torch.set_num_threads(threads)  # before any computing: a forked child inherits the pool's size, not its threads
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    join_world(device, timeout, dist.FileStore(f"{folder}/store", world), rank, world)
    mesh = Mesh(sizes, device, checked, timeout)
    result = pickle.dumps(fn(mesh, *args))
    if checked:  # a rank that is through, while others still call collectives, disagrees with them as well
        agree(mesh.group(tuple(sizes)), "the end of the run", torch.empty(0))
    Path(folder, f"result-{rank}").write_bytes(result)
    dist.barrier()  # nobody leaves while another one may still need it
    dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for its next tensors, as torch does on a GPU.

    glibc gives large blocks back to the system at once, and each new one is then filled with zeros page by page: a
    tenth of the time of a step that, being a pure function, makes its gradients anew.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # glibc before 2.35
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def _end_with_parent(parent: int) -> None:
    """Let this process die with the one that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
