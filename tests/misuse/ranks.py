"""Programs in which one rank does another thing than the others: an error on every rank, or the right numbers.

    python tests/sweeps/fuzz.py ranks [--cases 3000] [--seed 0] [--mesh X=2,Y=2]
    python tests/sweeps/fuzz.py alone [--cases 150] [--seed 0] [--mesh X=2,Y=2]

Each case draws a program of some different calls: collectives, reshards, a ring, messages, ragged rows, strategies, a
pipeline, a Transformer's step, an update, a checkpoint, a mesh. One rank differs from the others in one thing: shape,
dtype, line, axis, `out=`, async or not, a Pending dropped, an option, a config, a seed, values that are to be replicas,
two calls exchanged, a call left out or made twice, an early end, an error. Nobody can tell two calls apart that send
the same types: so a program has no two of one kind, and params are drawn alike on all ranks. The case ends well if

- all ranks get an error within seconds, which names a rank, what it calls, and the rule or the fix; of a message whose
  other end is missing when it times out; or
- no rank does, and the numbers are those of one device.

A hang, an error of the transport, and a wrong number are findings; the sweep then exits with 1. Ranks are kept from
case to case, as in a notebook; `alone` makes each case a run by itself, with messages and ranks that exit as well.
Meshes are checked.
"""

import math
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from misuse.draw import Draw
from misuse.entries import twisted
from misuse.rooms import ON_RANKS

from scaling.launch import RankError, run
from scaling.launch.ranks import end_alike
from scaling.mesh.meeting import meeting

TIMEOUT, SOON = 20.0, 12.0  # of a collective; seconds after which an error comes late
DEAD = (1 << 22) + 1  # no process has this number: Linux stops at 1 << 22
ENDS = {"raises": KeyError("boom"), "exits": SystemExit(3)}
ORDERS = ["exchanged", "left out", "twice", "ends early", "raises", "exits"]


class Case(NamedTuple):
    """`program`: the acts' names and seeds; rank `odd` does `twist` to act `at`."""

    program: list[tuple[str, int]]
    odd: int
    at: int
    twist: str

    @staticmethod
    def drawn(seed, number: int, world: int, alone: bool = False) -> "Case":
        draw = Draw(f"{seed} {number}")
        names = [name for name in ON_RANKS if alone or not ON_RANKS[name].messages]
        program = [(name, draw.randrange(1 << 30)) for name in draw.sample(names, draw.randrange(1, 4))]
        at = draw.randrange(len(program))
        twists = [*ON_RANKS[program[at][0]].twists] * 2 + ["nothing"] + ORDERS[: 6 if alone else 5]
        return Case(program, draw.randrange(world), at, draw.choice(twists))

    def __str__(self) -> str:
        return f"{[name for name, _ in self.program]}, rank {self.odd} has call {self.at}: {self.twist}"

    def own(self, rank: int) -> list[tuple[str, int, str]]:
        """(act, seed, twist) of this rank's program."""
        calls = [(name, seed, "") for name, seed in self.program]
        if rank != self.odd or self.twist == "nothing":
            return calls
        before, here, rest = calls[: self.at], calls[self.at], calls[self.at + 1 :]
        changed = {
            "exchanged": [*rest[:1], here, *rest[1:]],
            "left out": rest,
            "twice": [here, here, *rest],
            "ends early": [],
            "raises": [("raises", 0, "")],
            "exits": [("exits", 0, "")],
        }
        return before + changed.get(self.twist, [(*here[:2], self.twist), *rest])


def made(mesh, case: Case, folder: str) -> None:
    """This rank's part of the case; Wrong for a wrong number."""
    for name, seed, twist in case.own(mesh.rank):
        if name in ENDS:
            raise ENDS[name]
        twisted(Draw.on(mesh, f"{folder}/{seed}", seed), name, ON_RANKS[name], twist)
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
            case = Case.drawn(seed, number, mesh.size())
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
                case = Case.drawn(seed, at, math.prod(sizes.values()))
                number, more, found = at + 1, Counter(), [f"case {at}, {case}: {error}"]
            outcomes += more
            findings += found
            print(*found, sep="\n", end="", flush=True)
    return outcomes, findings


def alone(sizes, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """The same, each case a run by itself."""
    outcomes, findings = Counter(), []
    for number in range(cases):
        case, began, text = Case.drawn(f"alone {seed}", number, math.prod(sizes.values()), True), time.monotonic(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(made, sizes, case, folder, timeout=TIMEOUT)
            except RankError as error:
                text = str(error)
        outcomes["RankError" if text else "right"] += 1
        seconds = time.monotonic() - began
        named = f"rank {case.odd} of" if case.twist in ENDS else "rank "
        in_time = (seconds < SOON + 5 and "Timed out" not in text) or re.search("Timed out: (Send|Recv)", text)
        if text and not (named in text and "Wrong" not in text and re.search(SAYS, text) and in_time):
            findings.append(f"case {number}, {case}, {seconds:.1f} s: {text}")
            print(findings[-1], flush=True)
    return outcomes, findings


SAYS = r"fix:|rule:|: use |: make |boom|exit code|SystemExit|has ended|wait for each"
