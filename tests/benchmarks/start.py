"""Time to the first collective, by three ways to start ranks.

    python tests/benchmarks/start.py [--ranks 2,4,8] [--repeat 3]

Each start is a whole process: Python, `import torch`, the ranks, one AllReduce, the end. Least of `--repeat` runs.
`scaling.launch` forks its ranks; torchrun and torch.multiprocessing.spawn start a Python each.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from report import options, show

OURS = """
import torch
from scaling.collectives import all_reduce
from scaling.launch import run

def first(mesh):
    return float(all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh))

assert run(first, {"X": RANKS}, checked=False) == [RANKS] * RANKS
"""
PLAIN = """
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def first(rank=None, store=None):
    where = {"store": dist.FileStore(store, RANKS), "rank": rank, "world_size": RANKS} if store else {}
    dist.init_process_group("gloo", **where)
    x = torch.ones(())
    dist.all_reduce(x)
    assert x == RANKS
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
"""
SPAWN = """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(first, (folder + "/store",), nprocs=RANKS)
"""
WAYS = {"scaling.launch": OURS, "torchrun": PLAIN + "    first()", "mp.spawn": PLAIN + SPAWN}


def seconds(way: str, ranks: int, folder: str) -> float:
    """Wall time of a program, which must end well."""
    script = Path(folder, f"{way}-{ranks}.py")
    script.write_text(WAYS[way].replace("RANKS", str(ranks)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if way == "torchrun" else []), str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else ""}
    start = perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return perf_counter() - start


if __name__ == "__main__":
    args, lines = options(__doc__, ranks=(2, 4, 8), repeat=3).parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            least = [min(seconds(way, n, folder) for _ in range(args.repeat)) for n in args.ranks]
            lines.append([way, *(f"{each:.1f}" for each in least)])
    show(lines, ["seconds to the first collective", *(f"{n} ranks" for n in args.ranks)])
