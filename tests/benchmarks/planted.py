"""Is what a profile says true? Programs with a known fault, profiled, with what it found beside what was planted.

    python tests/benchmarks/planted.py [--ranks 2] [--delays 20] [--clean 20] [--advice 1] [--overhead 10] [--json FILE]

`delays`: a rank sleeps 30 ms before a line, both drawn at random, in every step or in one of them, by turns: is it
found (rank, line, seconds within 10%)?
`clean`: nobody sleeps: is anybody called slow? `advice`: programs with one waste each, and the same without it: is the
first suggestion the right one, and does the change gain what it predicts, or at most that where it predicts a bound?
`overhead`: processor time of the calling thread that a profile adds to a step, on the rank where it is the most, steps
of both kinds in turn; and the parts' sum over the step.
"""

import random
import sys
from functools import partial
from statistics import median
from time import perf_counter, sleep, thread_time

import torch
from report import options, write
from tabulate import tabulate
from wasteful import PROGRAMS

from scaling import launch
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter
from scaling.profile import profile
from scaling.spec import parse
from scaling.strategies import fsdp

DELAY, STEPS = 0.03, 7
B, D, F = 128, 256, 1024
L, SIZES = 4, {"B": 16, "D": 16, "F": 64}  # what a profile costs is by line and operation, whatever their size


def step(mesh, x, W, V, before) -> None:
    """A layer with its weights gathered, and a gradient; `before(i)` is called before line i."""
    lines = (
        lambda s: {"W": all_gather("W[D_X, F] -> W[D, F]", W, mesh)},
        lambda s: {"T": einsum("x[B_X, D] * W[D, F] -> T[B_X, F]", x, s["W"])},
        lambda s: {"V": all_gather("V[F, D_X] -> V[F, D]", V, mesh)},
        lambda s: {"y": einsum("T[B_X, F] * V[F, D] -> y[B_X, D]", s["T"], s["V"])},
        lambda s: {"dV": einsum("T[B_X, F] * y[B_X, D] -> dV[F, D] {U_X}", s["T"], s["y"])},
        lambda s: {"dV": reduce_scatter("dV[F, D] {U_X} -> dV[F, D_X]", s["dV"], mesh)},
        lambda s: {"n": einsum("dV[F, D_X] -> n[] {U_X}", s["dV"])},
        lambda s: {"n": all_reduce("n[] {U_X} -> n[]", s["n"], mesh)},
    )
    state: dict = {}
    for i, line in enumerate(lines):
        before(i)
        state |= line(state)


LINES = 8


def delays(mesh, plants) -> list[tuple[list, list]]:
    """For each (rank, line, step) or None: the lines' names, and (rank, line, in it, seconds, step) of the slow."""
    n, found = mesh.size(), []
    x, W, V = torch.randn(B, D), torch.randn(D // n, F), torch.randn(F, D // n)
    for plant in plants:

        def before(i, number, plant=plant):
            if plant and plant[:2] == (mesh.rank, i) and plant[2] in (None, number):
                sleep(DELAY)

        step(mesh, x, W, V, partial(before, number=-1))
        with profile() as p:
            for number in range(STEPS):
                step(mesh, x, W, V, partial(before, number=number))
                p.step()
        names = [run.line for run in p.timelines[0].steps[0].runs]
        found.append((names, [(s.rank, s.line, s.inside, s.seconds, s.step) for s in p.stragglers()]))
    return found


def judged(plants, found) -> list[dict]:
    rows = []
    for plant, (names, slow) in zip(plants, found, strict=True):
        right = not slow
        if plant:
            right = bool(slow) and slow[0][:3] == (plant[0], names[plant[1]], False) and len(slow) == 1
            right = right and abs(slow[0][3] / DELAY - 1) <= 0.1 and slow[0][4] == plant[2]
        rows.append({"plant": plant and (plant[0], names[plant[1]], plant[2]), "found": slow, "right": right})
    return rows


def advice(mesh, names) -> list[dict]:
    """Each program as it is and without its waste: steps in turn for their seconds, then a profile."""
    rows = []
    for name in names:
        program = PROGRAMS[name]
        state = program.make(mesh)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        together = partial(all_reduce, "n[] {U_X} -> n[]", torch.zeros(()), mesh)  # as the steps of a training do
        for i in range(2 * STEPS + 2):
            together()
            began = perf_counter()
            program.step(mesh, state, bool(i % 2))
            together()
            seconds[bool(i % 2)] += [perf_counter() - began] if i > 1 else []
        with profile() as p:
            for _ in range(STEPS):
                program.step(mesh, state, False)
                together()
                p.step()
        said = [(each.kind, each.gain, each.bound, str(each)) for each in p.suggestions()]
        rows.append({"program": name, "wanted": program.kind, "said": said, "step": p.seconds,
                     "gained": median(seconds[False]) - median(seconds[True])})  # fmt: skip
    return rows


def overhead(mesh, rounds: int) -> dict:
    """Steps in turn, some plain, some profiled; of each the first does not count, since others' work precedes it."""
    shapes = {name: parse(fsdp.SPECS[name]).local_shape(SIZES, mesh) for name in ("W_in", "W_out", "In")}
    params, In = {name: 0.02 * torch.randn(L, *shapes[name]) for name in ("W_in", "W_out")}, torch.randn(shapes["In"])
    plain, with_it, off, steps = [], [], [], []

    def timed(into: list[float]) -> float:
        began, outside = thread_time(), perf_counter()
        Out, saved = fsdp.forward(params, In, mesh)
        fsdp.backward(Out, saved, params, mesh)
        into.append(thread_time() - began)
        return perf_counter() - outside

    for _ in range(rounds):
        for _ in range(4):
            timed(plain)
        outside = []
        with profile() as p:
            for _ in range(4):
                outside.append(timed(with_it))
                p.step()
        off += [abs(part.total / each - 1) for part, each in zip(p.parts(mesh.rank), outside, strict=True)]
        steps += outside
    plain, with_it = ([t for i, t in enumerate(each) if i % 4] for each in (plain, with_it))
    quick = {"plain": quartile(plain), "profiled": quartile(with_it)}
    one = p.timelines[mesh.rank]
    counts = {"lines": len(one.runs) // 4, "ops": len(one.ops) // 4}
    return {**quick, **counts, "step": median(steps), "off": median(off)}


def quartile(seconds: list[float]) -> float:
    """The lower one: other work on the machine only adds to times."""
    return sorted(seconds)[len(seconds) // 4]


def main() -> int:
    parser = options(__doc__, ranks=2, only=PROGRAMS, json=None)
    parser.add_argument("--delays", type=int, default=20, help="random plants (default 20)")
    parser.add_argument("--clean", type=int, default=20, help="clean runs (default 20)")
    parser.add_argument("--advice", type=int, default=1, help="rounds of the wasteful programs (default 1)")
    parser.add_argument("--overhead", type=int, default=10, help="rounds of 4 steps each (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    args, results = parser.parse_args(), {}
    rng, sizes = random.Random(args.seed), {"X": args.ranks}
    when = [None if i % 2 else rng.randrange(STEPS) for i in range(args.delays)]
    plants = [(rng.randrange(args.ranks), rng.randrange(LINES), step) for step in when] + [None] * args.clean
    if plants:
        rows = results["delays"] = judged(plants, launch.run(delays, sizes, plants)[0])
        table = [(row["plant"] or "nobody", row["found"] or "nobody", "yes" if row["right"] else "NO") for row in rows]
        print(tabulate(table, ["planted", "found", "right"], "simple", maxcolwidths=[44, 44, 5]))
        right = [sum(row["right"] for row in rows if bool(row["plant"]) is planted) for planted in (True, False)]
        print(f"\ndelays found: {right[0]} of {args.delays}; clean runs called clean: {right[1]} of {args.clean}\n")
    if args.advice:
        rows = results["advice"] = launch.run(advice, sizes, args.only * args.advice)[0]
        table = []
        for row in rows:
            kind, gain, bound, text = (*row["said"], ("nothing", 0.0, False, ""))[0]
            ms = [f"{seconds * 1e3:.1f}" for seconds in (row["step"], gain, row["gained"])]
            ms[1] = f"<= {ms[1]}" if bound else ms[1]
            table.append((row["program"], "yes" if kind == row["wanted"] else "NO", *ms, text))
        heads = ["program", "right", "step, ms", "predicted", "gained", "first suggestion"]
        print(tabulate(table, heads, "simple", maxcolwidths=[20, 5, 9, 9, 9, 60]))
        print(f"\nfirst suggestions right: {sum(row[1] == 'yes' for row in table)} of {len(table)}\n")
    if args.overhead:
        row = results["overhead"] = max(launch.run(overhead, sizes, args.overhead), key=lambda row: row["profiled"])
        more = row["profiled"] - row["plain"]
        print(f"a step of {row['lines']} lines and {row['ops']} operations costs its thread {more * 1e3:.2f} ms more")
        print(f"when profiled, {more / 0.1:.1%} of 100 ms; the parts' sum is off by {row['off']:.2%}")
    write(args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
