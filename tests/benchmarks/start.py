"""Time to the first collective, by three ways to start ranks; and the wall time of every chapter.

    python tests/benchmarks/start.py [--ranks 2,4,8] [--repeat 3] [--chapters '05*.py'] [--json FILE]

Each start is a whole process: Python, `import torch`, the ranks, one AllReduce, the end. Least of `--repeat` runs.
`scaling.launch` forks its ranks; torchrun and torch.multiprocessing.spawn start a Python each.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from report import options, show, write

OURS = """
import torch
from scaling.collectives import all_reduce
from scaling.launch import run

def first(mesh):
    return float(all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh))

assert run(first, {"X": RANKS}, checked=False) == [RANKS] * RANKS
"""
TORCHRUN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(())
dist.all_reduce(x)
assert x == RANKS
dist.destroy_process_group()
"""
SPAWN = """
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def first(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    x = torch.ones(())
    dist.all_reduce(x)
    assert x == RANKS
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(first, (folder + "/store",), nprocs=RANKS)
"""
WAYS = {"scaling.launch": OURS, "torchrun": TORCHRUN, "mp.spawn": SPAWN}
LIMIT = 600  # seconds


def seconds(command: list[str], cwd=None) -> tuple[float, int]:
    """(wall time, exit code) of a program; its output is shown if it fails."""
    start = perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else ""}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)
    took = perf_counter() - start
    if done.returncode:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}", file=sys.stderr)
    return took, done.returncode


def start(way: str, ranks: int, folder: str) -> tuple[float, int]:
    script = Path(folder, f"{way}-{ranks}.py")
    script.write_text(WAYS[way].replace("RANKS", str(ranks)))
    if way == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return seconds([*torchrun, "--nproc-per-node", str(ranks), str(script)])
    return seconds([sys.executable, str(script)])


def main() -> None:
    parser = options(__doc__, json=None)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chapters", default="[0-9]*.py", help="which to time; none: ''. Default: %(default)s")
    args = parser.parse_args()
    counts, failed = [int(n) for n in args.ranks.split(",")], 0
    found = {"start": {}, "chapters": {}}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            for n in counts:
                runs = [start(way, n, folder) for _ in range(args.repeat)]
                failed += any(code for _, code in runs)
                found["start"].setdefault(way, {})[n] = min(took for took, _ in runs)
    lines = [[way, *(f"{took:.1f}" for took in times.values())] for way, times in found["start"].items()]
    show(lines, ["seconds to the first collective", *(f"{n} ranks" for n in counts)])
    if args.chapters:
        root, lines = Path(__file__).parents[2], []
        for chapter in sorted((root / "chapters").glob(args.chapters)):
            took, code = seconds([sys.executable, str(chapter)], cwd=root)
            failed += code != 0
            found["chapters"][chapter.name] = took
            lines.append([chapter.name, f"{took:.1f}", "" if code == 0 else f"exit code {code}"])
        show(lines, ["chapter", "seconds", ""])
    write(args.json, found)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
