"""Ranks that die at random, many times: is every death noticed, soon, and by the rank's number?

    python tests/sweeps/fuzz.py deaths [--cases 1000] [--seed 0]

One of two to four ranks exits, is killed by a signal, or runs out of memory (RLIMIT_AS), at a random moment, while the
others compute, sleep or wait for it in a collective. (Ranks that go wrong and live: `ranks.py`.) A finding is a death
that was missed, blamed on another rank, or noticed by `launch.run` later than `--limit` seconds, times the load of each
core where that is above 1: on a busy machine who dies, who notices and who is ended all wait for their turn. Takes some
ten minutes.
"""

import ctypes
import faulthandler
import mmap
import os
import random
import resource
import signal
import statistics
import struct
import sys
import time
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

import torch
from machine import total

from scaling.launch import RankError, run

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU]


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
    if how != signal.SIGKILL:
        signal.signal(how, signal.SIG_DFL)
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


def run_all(cases: int, seed: int, limit: float) -> tuple[Counter, list[str]]:
    """(how often each kind came, and the longest that it took to be known; the findings)."""
    rng, clock, took, findings = random.Random(seed), mmap.mmap(-1, 4096), defaultdict(list), []
    torch.set_num_threads(1)
    for number in range(cases):
        kind, seconds, wrong = death(rng, clock)
        took[kind].append(seconds)
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        if wrong or seconds > limit * load:
            late = f"known after {seconds:.2f} s at load {load:.1f} a core"
            findings.append(f"{number}, {kind}: {wrong or late}")
    print(f"{statistics.median(chain(*took.values())):.3f} s in the median")
    return Counter({f"{kind}: {max(times):.3f} s at most": len(times) for kind, times in took.items()}), findings
