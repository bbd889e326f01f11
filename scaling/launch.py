"""Starting ranks: torchrun's if there are several, otherwise this file forks them on this machine.

`run(fn, {"X": 4, "Y": 2}, *args)` calls `fn(mesh, *args)` on eight ranks and returns their results. A rank that raises,
exits, is killed or waits in vain ends the run within seconds, with its number and its traceback; none stays behind.
"""

import ctypes
import math
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from scaling.mesh import TIMEOUT, AbstractMesh, Mesh, join_world
from scaling.spec import ShardingError

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies


class RankError(RuntimeError):
    """A rank raised or died; the message says which one and holds its traceback."""


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
    pickled. A mesh of one device runs in this process. `checked`: ranks compare every collective before it runs (see
    `scaling.agree`). `timeout`: seconds that a collective waits for other ranks. `threads`: intra-op threads of a rank.
    Raises RankError if a rank fails, ShardingError for sizes that make no mesh.
    """
    world = AbstractMesh(sizes).size()
    if world == 1:
        return [fn(Mesh(sizes, device, checked, timeout), *args)]
    method = "fork" if sys.platform == "linux" and torch.device(device).type == "cpu" else "spawn"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = (os.getpid(), world, folder, fn, dict(sizes), args, device, checked, timeout, threads)
        context = mp.start_processes(_rank, args=work, nprocs=world, join=False, start_method=method)
        try:
            while not context.join():
                pass
        except mp.ProcessRaisedException as error:
            text = str(error).split("\n\n", 1)[-1].removeprefix(f"-- Process {error.error_index} terminated")
            text = text.removeprefix(" with the following error:\n")
            raise RankError(f"rank {error.error_index} of {world} raised:\n{text}") from None
        except mp.ProcessExitedException as error:
            why = f"was killed by {error.signal_name}" if error.signal_name else f"exited with code {error.exit_code}"
            raise RankError(f"rank {error.error_index} of {world} {why}, so the other ranks were ended") from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
            for process in context.processes:
                process.join()
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]


def start(fn: Callable, sizes: Mapping[str, int], *args, device: str = "cpu", checked: bool = True, **options):
    """The entry of a script: under torchrun with several ranks this process is one of them; otherwise as `run`.

    Returns this rank's result, of rank 0 where the ranks were started here. A script that fails ends with exit code 1,
    and with the failing rank's traceback alone.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        try:
            return run(fn, sizes, *args, device=device, checked=checked, **options)[0]
        except (RankError, ShardingError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    torch.set_num_threads(options.pop("threads", 1))
    try:
        return fn(Mesh(sizes, device, checked, **options), *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parse_mesh(text: str) -> dict[str, int]:
    """`X=4,Y=2` -> {"X": 4, "Y": 2}, as given to --mesh."""
    sizes = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*([0-9]+)\s*", part)):
            raise ShardingError(f"--mesh {text}: cannot read {part!r}; write axes and sizes as in X=4,Y=2")
        if match[1] in sizes:
            raise ShardingError(f"--mesh {text}: axis {match[1]} is given twice")
        sizes[match[1]] = int(match[2])
    return AbstractMesh(sizes).sizes


def fit(sizes: Mapping[str, int]) -> dict[str, int]:
    """A script's default mesh, made to fit the number of ranks that torchrun started by changing its first axis."""
    world, first = int(os.environ.get("WORLD_SIZE", 1)), next(iter(sizes))
    rest = math.prod(size for axis, size in sizes.items() if axis != first)
    if world == 1 or world % rest:
        return dict(sizes)
    return {**sizes, first: world // rest}


def _rank(rank: int, parent: int, world: int, folder: str, fn, sizes, args, device, checked, timeout, threads) -> None:
    """The life of one started rank."""
    _end_with_parent(parent)
    torch.set_num_threads(threads)  # before any computing: a forked child inherits the pool's size, not its threads
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    join_world(device, timeout, dist.FileStore(f"{folder}/store", world), rank, world)
    result = fn(Mesh(sizes, device, checked, timeout), *args)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # nobody leaves while another one may still need it
    dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    """Let this process die with the one that started it, however that ends; Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
