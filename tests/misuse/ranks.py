"""Programs in which one rank does another thing than the others: an error on every rank, or the right numbers.

Each case draws a program of some different calls: collectives, reshards, a ring, messages, ragged rows, strategies, a
pipeline, a Transformer's step, an update, a checkpoint, a mesh. One rank differs from the others in one thing: shape,
dtype, line, axis, `out=`, async or not, a Pending dropped, an option, a config, a seed, values that are to be replicas,
two calls exchanged, a call left out or made twice, an early end, an error. Nobody can tell two calls apart that send
the same types: so a program has no two of one kind, and params are drawn alike on all ranks. The case ends well if

- all ranks get an error within seconds, which names a rank, what it calls, and the rule or the fix; of a message whose
  other end is missing when it times out; or
- no rank does, and the numbers are those of one device.

A hang, an error of the transport, and a wrong number are findings. `ranks` keeps its ranks from
case to case, as in a notebook; `alone` makes each case a run by itself, with messages and ranks that die as well: that
exit, are killed by a signal, or run out of memory (RLIMIT_AS), while the others go on, compute, sleep or spin. `deaths`
has these alone, between calls that are soon made. A death that was missed, blamed on another rank, or noticed by
`launch.run` later than `--limit` seconds is a finding: times the load of each core where that is above 1, as on a busy
machine who dies, who notices and who is ended all wait for their turn. Meshes are checked.
"""

import ctypes
import faulthandler
import math
import mmap
import os
import re
import resource
import signal
import statistics
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from misuse.entries import Draw, twisted
from misuse.rooms import ON_RANKS

from scaling.launch import RankError, run
from scaling.launch.ranks import end_alike
from scaling.mesh.meeting import meeting

TIMEOUT, SOON = 20.0, 12.0  # of a collective; seconds after which an error comes late
DEAD = (1 << 22) + 1  # no process has this number: Linux stops at 1 << 22
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU]
SAYS = r"fix:|rule:|: use |: make |boom|exit code|SystemExit|has ended|wait for each"  # an error that ends a run
CLOCK = mmap.mmap(-1, 8)  # when a rank died, which the process that forked it reads


def raises(draw):
    raise KeyError("boom")


def is_killed(draw):
    how = draw.choice(SIGNALS)
    if how != signal.SIGKILL:
        signal.signal(how, signal.SIG_DFL)
    os.kill(os.getpid(), how)
    time.sleep(60)


def runs_out_of_memory(draw):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (draw.choice([1, 16, 256]) << 20),) * 2)
    held, size = [], draw.choice([1 << 12, 1 << 18, 1 << 22])
    make = draw.choice([lambda: bytearray(size), lambda: torch.ones(size // 4), lambda: [None] * (size // 8)])
    try:
        while True:
            held.append(make())
    finally:
        stamp()


def stamp():
    CLOCK[:] = struct.pack("d", time.monotonic())


DEATHS = {
    "exit": lambda draw: os._exit(draw.choice([0, 1, 3, 77, 255])),
    "sys.exit": lambda draw: sys.exit(draw.choice([0, 1, 3, "words"])),
    "signal": is_killed,
    "segfault": lambda draw: ctypes.string_at(0),
    "memory": runs_out_of_memory,
}


def computes(draw):
    while True:
        torch.ones(50, 50) @ torch.ones(50, 50)


def spins(draw):
    while True:
        pass


OTHERS = {"compute": computes, "sleep": lambda draw: time.sleep(60), "spin": spins}
ORDERS = ["exchanged", "left out", "twice", "ends early", "raises"]
ENDS = {"raises": raises} | DEATHS | OTHERS


class Case(NamedTuple):
    """`program`: the acts' names and seeds; rank `odd` does `twist` to act `at`, and the others do what is in OTHERS
    where it dies."""

    program: list[tuple[str, int]]
    odd: int
    at: int
    twist: str
    others: str = ""

    @staticmethod
    def drawn(how: str, seed: int, number: int, world: int) -> "Case":
        draw = Draw(f"{seed} {number}" if how == "ranks" else f"{how} {seed} {number}")
        names = [name for name in ON_RANKS if how != "ranks" or not ON_RANKS[name].messages]
        if how == "deaths":
            names = ["collective", "reshard", "ragged"]
        program = [(name, draw.randrange(1 << 30)) for name in draw.sample(names, draw.randrange(1, 4))]
        at = draw.randrange(len(program))
        twists = [*ON_RANKS[program[at][0]].twists] * 2 + ["nothing", *ORDERS] if how != "deaths" else []
        twists += [*DEATHS] if how != "ranks" else []
        case = Case(program, draw.randrange(world), at, draw.choice(twists))
        return case._replace(others=draw.choice(["", *OTHERS])) if case.twist in DEATHS else case

    def __str__(self) -> str:
        meanwhile = f", others {self.others or 'go on'}" if self.twist in DEATHS else ""
        return f"{[name for name, _ in self.program]}, rank {self.odd} has call {self.at}: {self.twist}{meanwhile}"

    def own(self, rank: int) -> list[tuple[str, int, str]]:
        """(act, seed, twist) of this rank's program."""
        calls = [(name, seed, "") for name, seed in self.program]
        before, here, rest = calls[: self.at], calls[self.at], calls[self.at + 1 :]
        if rank != self.odd and self.others:
            return [*before, (self.others, 0, "")]
        if rank != self.odd or self.twist == "nothing":
            return calls
        changed = {
            "exchanged": [*rest[:1], here, *rest[1:]],
            "left out": rest,
            "twice": [here, here, *rest],
            "ends early": [],
            **{name: [(name, here[1], "")] for name in ENDS},
        }
        return before + changed.get(self.twist, [(*here[:2], self.twist), *rest])


def made(mesh, case: Case, folder: str) -> None:
    """This rank's part of the case; Wrong for a wrong number."""
    for name, seed, twist in case.own(mesh.rank):
        draw = Draw.on(mesh, f"{folder}/{seed}", seed)
        if name in DEATHS:
            time.sleep(draw.choice([0, 0, 0.01, 0.1]) * draw.random())  # the others may be waiting for it
            faulthandler.disable()
            stamp()
        if name in ENDS:
            ENDS[name](draw)
        else:
            twisted(draw, name, ON_RANKS[name], twist)
    end_alike(mesh)


def page_of(mesh):
    held = meeting(mesh.group(tuple(mesh.sizes)).pg)
    assert held is not None
    return held.page


def tell(mesh, case: Case, folder: str) -> tuple[str, str, float]:
    """(the error's type or "", its text, seconds)."""
    began, error = time.monotonic(), None
    try:
        made(mesh, case, folder)
    except Exception as told:
        error = told
        page_of(mesh).set_pid(DEAD)  # for the others this rank has ended, until the next case
    kind = "" if error is None else type(error).__name__
    return kind, str(error or ""), time.monotonic() - began


def finding(case: Case, told: list[tuple[str, str, float]]) -> str:
    """What is wrong with how a case ended on all ranks."""
    lines = "\n".join(f"  rank {r} after {s:.1f} s: {kind}: {text}" for r, (kind, text, s) in enumerate(told))
    errors = [kind for kind, *_ in told]
    if "Wrong" in errors:
        return f"a wrong number\n{lines}"
    if any(errors) and not all(errors):
        return f"some ranks have no error\n{lines}"
    for r, (kind, text, seconds) in enumerate(told):
        if not kind or (case.twist == "raises" and r == case.odd):
            continue
        if kind not in ("ShardingError", "RankEnded", "ValueError", "ArithmeticError"):
            return f"an error of another kind\n{lines}"
        if seconds > SOON:
            return f"told late\n{lines}"
        if not re.search(r"fix:|rule:|a rank has ended|wait for each other", text):
            return f"neither rule nor fix\n{lines}"
        alike = len({text for _, text, _ in told}) == 1  # what all refuse needs no rank
        if r != case.odd and not alike and not re.search(r"\branks? \[?\d|the ranks send", text):
            return f"names no rank\n{lines}"
    return ""


def many(mesh, seed: int, first: int, cases: int, reached: Path) -> tuple[int, Counter, list[str]]:
    """(the next case, outcomes, findings): as many as leave the ranks good for another one."""
    outcomes = Counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    control: Any = dist.new_group(backend="gloo")  # of the sweep's own
    for number in range(first, cases):
        if mesh.rank == 0:
            reached.write_text(str(number))
        with tempfile.TemporaryDirectory() as mine:
            case = Case.drawn("ranks", seed, number, mesh.size())
            shared, told = [mine], [None] * mesh.size()
            dist.broadcast_object_list(shared, 0, group=control)
            dist.all_gather_object(told, tell(mesh, case, shared[0]), group=control)
            page_of(mesh).set_pid(os.getpid())
            dist.barrier(control)
        wrong = finding(case, told)  # type: ignore[arg-type]
        outcomes["/".join(sorted({kind for kind, *_ in told})) or "right"] += 1  # type: ignore[misc]
        if wrong:
            return number + 1, outcomes, [f"case {number}, {case}: {wrong}"]
    return cases, outcomes, []


def sweep(sizes, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, the findings); ranks that a case has spoiled are started anew."""
    outcomes, findings, number = Counter(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        reached = Path(folder) / "reached"
        while number < cases:
            try:
                number, more, found = run(many, sizes, seed, number, cases, reached, timeout=TIMEOUT)[0]
            except RankError as error:
                at = int(reached.read_text())
                case = Case.drawn("ranks", seed, at, math.prod(sizes.values()))
                number, more, found = at + 1, Counter(), [f"case {at}, {case}: {error}"]
            outcomes += more
            findings += found
            print(*found, sep="\n", end="", flush=True)
    return outcomes, findings


def alone(how: str, sizes, cases: int, seed: int, limit: float) -> tuple[Counter, list[str]]:
    """The same, each case a run by itself."""
    outcomes, findings, took = Counter(), [], []
    torch.set_num_threads(1)
    for number in range(cases):
        case, began, text = Case.drawn(how, seed, number, math.prod(sizes.values())), time.monotonic(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(made, sizes, case, folder, timeout=TIMEOUT)
            except RankError as error:
                text = str(error)
        now = time.monotonic()
        if case.twist in DEATHS:
            seconds = now - struct.unpack("d", CLOCK)[0]
            took.append(seconds)
            right = text.startswith(f"rank {case.odd} of ") and seconds <= limit * load()
        else:
            seconds = now - began
            named = f"rank {case.odd} of" if case.twist in ENDS else "rank "
            in_time = (seconds < SOON + 5 and "Timed out" not in text) or re.search("Timed out: (Send|Recv)", text)
            right = not text or (named in text and "Wrong" not in text and re.search(SAYS, text) and in_time)
        death = f"{case.twist}, others {case.others or 'go on'}"
        outcomes[death if how == "deaths" else "RankError" if text else "right"] += 1
        if not right:
            findings.append(f"case {number}, {case}, {seconds:.2f} s at load {load():.1f} a core: {text[:2000]}")
            print(findings[-1], flush=True)
    if took:
        print(f"{len(took)} deaths, known after {statistics.median(took):.3f} s in the median, {max(took):.3f} at most")
    return outcomes, findings


def load() -> float:
    """The processes that wait for each core, where that is more than one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
