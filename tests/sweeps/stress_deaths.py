"""Ranks that die or go wrong at random, many times: is every one noticed, soon, and by its number?

    python tests/sweeps/stress_deaths.py [--deaths 1000] [--faults 200] [--seed 0]

A death: one of two to four ranks exits, is killed by a signal, or runs out of memory (RLIMIT_AS), at a random moment,
while the others compute, sleep or wait for it in a collective. A fault: it raises, makes another call than the others,
ends early, or hangs; or all hang. Prints how long after a death `launch.run` raised; exits with 1 if one was missed,
blamed on another rank, or noticed later than `--limit` seconds, times the load of each core where that is above 1: on
a busy machine who dies, who notices and who is ended all wait for their turn. Takes some ten minutes; no part of the
suite.
"""

import ctypes
import faulthandler
import mmap
import os
import random
import re
import resource
import signal
import statistics
import struct
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from scaling import collectives as c
from scaling.common.console import Parser
from scaling.launch import RankError, run

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU]


def total(mesh, shape=(), dtype=torch.float32):
    return c.all_reduce(
        "A[] {U_X} -> A[]" if shape == () else "A[I] {U_X} -> A[I]", torch.ones(shape, dtype=dtype), mesh
    )


# Deaths: each is called in the rank that dies; `stamp` notes the time


def exits(rng, stamp):
    stamp()
    os._exit(rng.choice([0, 1, 3, 77, 255]))


def leaves(rng, stamp):
    stamp()
    sys.exit(rng.choice([0, 1, "words"]))


def is_killed(rng, stamp):
    stamp()
    faulthandler.disable()
    how = rng.choice(SIGNALS)
    signal.signal(how, signal.SIG_DFL) if how != signal.SIGKILL else None
    os.kill(os.getpid(), how)
    time.sleep(60)


def reads_nothing(rng, stamp):
    stamp()
    faulthandler.disable()
    ctypes.string_at(0)


def runs_out_of_memory(rng, stamp):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (rng.choice([1, 16, 256]) << 20),) * 2)
    held, size = [], rng.choice([1 << 12, 1 << 18, 1 << 22])
    make = rng.choice([lambda: bytearray(size), lambda: torch.ones(size // 4), lambda: [None] * (size // 8)])
    try:
        while True:
            held.append(make())
    finally:
        stamp()


DEATHS = {
    "exit": exits,
    "sys.exit": leaves,
    "signal": is_killed,
    "segfault": reads_nothing,
    "memory": runs_out_of_memory,
}


def computes():
    while True:
        torch.ones(50, 50) @ torch.ones(50, 50)


OTHERS = {"compute": computes, "sleep": lambda: time.sleep(60), "spin": lambda: [None for _ in iter(int, 1)]}


def death(rng: random.Random, clock) -> tuple[str, float, str]:
    """(kind, seconds from the death until it was known, what is wrong with how it was told)."""
    world, how, meanwhile = rng.randint(2, 4), rng.choice([*DEATHS]), rng.choice([*OTHERS, "collective"])
    who, after, steps, seed = rng.randrange(world), rng.choice([0, 0, 0.01, 0.1]), rng.randrange(4), rng.random()

    def stamp():
        clock[:8] = struct.pack("d", time.monotonic())

    def work(mesh):
        for _ in range(steps):
            total(mesh)
        if mesh.rank == who:
            time.sleep(after * rng.random())
            DEATHS[how](random.Random(seed), stamp)
        elif meanwhile == "collective":
            total(mesh)
        else:
            OTHERS[meanwhile]()

    wrong = "not noticed"
    try:
        run(work, {"X": world}, timeout=20)
    except RankError as error:
        told = str(error)
        wrong = "" if told.startswith(f"rank {who} of {world} ") else f"rank {who} of {world} died, but: {told[:500]}"
    return f"{how}, others {meanwhile}", time.monotonic() - struct.unpack("d", clock[:8])[0], wrong


# Other faults: (what the odd rank does, whether it must be named alone)


def fault(rng: random.Random) -> tuple[str, float, str]:
    """(kind, seconds of the run, what is wrong with how it was told)."""
    world, steps, timeout = rng.randint(2, 4), rng.randrange(4), 2.0
    who, kind = (
        rng.randrange(world),
        rng.choice(["raise", "op", "shape", "dtype", "line", "path", "end", "hang", "all"]),
    )
    idle = rng.choice([lambda: time.sleep(60), OTHERS["spin"]])

    def odd(mesh):
        if kind == "raise":
            raise rng.choice([ValueError, KeyError, RuntimeError, KeyboardInterrupt])("boom")
        if kind == "op":
            return c.all_gather("A[I_X] -> A[I]", torch.ones(world), mesh)
        if kind in ("shape", "dtype"):
            return total(mesh, (world,) if kind == "shape" else (), torch.float64 if kind == "dtype" else torch.float32)
        if kind == "line":
            return c.all_reduce("B[] {U_X} -> B[]", torch.ones(()), mesh)
        if kind == "path":
            return c.all_reduce("A[] {U_X} -> A[]", torch.ones((), requires_grad=True), mesh)
        return idle() if kind == "hang" else None

    def work(mesh):
        for _ in range(steps):
            total(mesh)
        if kind == "all":
            idle()
        return odd(mesh) if mesh.rank == who else (total(mesh), total(mesh))[0].item()

    told, began = "", time.monotonic()
    try:
        run(work, {"X": world}, timeout=timeout)
    except RankError as error:
        told = str(error)
    wanted = {
        "raise": rf"rank {who} of {world} raised:\n(.*\n)*.*boom",
        "hang": rf"Timed out(.*\n)*\nrank {who} was still running, here .*:\n  File",
        "all": rf"all {world} ranks hang(.*\n)*"
        + r"\nrank \d was still running, here .*:\n(  File.*\n)+(.*\n)*" * world,
        "end": rf"rank {who}: the end of the run",
    }.get(kind, rf"do not make the same call\n(.*\n)*?  rank {who}: .*\n")
    return kind, time.monotonic() - began, "" if re.search(wanted, told) else f"rank {who} of {world}: {told[:800]!r}"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0.5, help="seconds in which a death is known (default 0.5)")
    args = parser.parse_args()
    rng, clock, missed, late = random.Random(args.seed), mmap.mmap(-1, 4096), 0, 0
    torch.set_num_threads(1)
    for what, count, once in (
        ("deaths", args.deaths, lambda: death(rng, clock)),
        ("faults", args.faults, lambda: fault(rng)),
    ):
        took, kinds = [], Counter()
        slowest = defaultdict(float)
        for number in range(count):
            kind, seconds, wrong = once()
            took.append(seconds)
            kinds[kind] += 1
            slowest[kind] = max(slowest[kind], seconds)
            if wrong:
                missed += 1
                print(f"{what} {number}, {kind}: {wrong}", flush=True)
            load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            if what == "deaths" and seconds > args.limit * load:
                late += 1
                print(f"{what} {number}, {kind}: known after {seconds:.2f} s at load {load:.1f} a core", flush=True)
        if took:
            over = f"{sum(seconds > args.limit for seconds in took)} over {args.limit} s"
            print(f"{count} {what}: {statistics.median(took):.3f} s in the median, {max(took):.3f} s at most; {over}")
            for kind, times in sorted(kinds.items()):
                print(f"    {times:4} {kind}: {slowest[kind]:.3f} s at most")
    print(f"{missed} missed or blamed on another rank, {late} late; load {os.getloadavg()[0]:.1f}")
    sys.exit(missed + late > 0)


if __name__ == "__main__":
    main()
