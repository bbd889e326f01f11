"""Is what a profile says true? Programs with a known fault, profiled, with what it found beside what was planted.

    python tests/benchmarks/planted.py [--delays 20] [--clean 20] [--only straggler] [--overhead 10]

`delays`: a rank sleeps 30 ms before a line, both drawn at random, in every step or in one of them, by turns: is it
found (rank, line, seconds within 10%)? `clean`: nobody sleeps: is anybody called slow?
`only`: of the programs with one waste each, and the same without it: is the first suggestion the right one, and does
the change gain what it predicts, or at most that where it predicts a bound?
`overhead`: processor time of the calling thread that a profile adds to a step, on the rank where it is the most, steps
of both kinds in turn; and the parts' sum over the step.
"""

import random
from functools import partial
from statistics import median
from time import perf_counter, sleep, thread_time

import torch
from harness import Size, in_turn
from report import options
from versus_torch import ours

from scaling import launch
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, wait
from scaling.common.tables import table
from scaling.profile import profile
from scaling.strategies import fsdp

RANKS, STEPS, DELAY = 2, 7, 0.03
B, D, F = 128, 256, 1024
SMALL = Size(4, 16, 64, 16)  # what a profile costs is by line and operation, whatever their size

# A layer with its weights gathered, and a gradient: each line with the names of its result and of its operands
LINES = (
    (all_gather, "W[D_X, F] -> W[D, F]", "W", "W_X"),
    (einsum, "x[B_X, D] * W[D, F] -> T[B_X, F]", "T", "x", "W"),
    (all_gather, "V[F, D_X] -> V[F, D]", "V", "V_X"),
    (einsum, "T[B_X, F] * V[F, D] -> y[B_X, D]", "y", "T", "V"),
    (einsum, "T[B_X, F] * y[B_X, D] -> dV[F, D] {U_X}", "dV", "T", "y"),
    (reduce_scatter, "dV[F, D] {U_X} -> dV[F, D_X]", "dV", "dV"),
    (einsum, "dV[F, D_X] -> n[] {U_X}", "n", "dV"),
    (all_reduce, "n[] {U_X} -> n[]", "n", "n"),
)


def delays(mesh, plants) -> list[tuple]:
    """For each (rank, line, step) or None: what was planted, found (rank, line, in it, seconds, step), and right."""
    n, rows = mesh.size(), []
    given = {"x": torch.randn(B, D), "W_X": torch.randn(D // n, F), "V_X": torch.randn(F, D // n)}

    def step(plant, number):
        state = dict(given)
        for i, (call, line, result, *names) in enumerate(LINES):
            if plant and plant[:2] == (mesh.rank, i) and plant[2] in (None, number):
                sleep(DELAY)
            state[result] = call(line, *(state[name] for name in names), *([] if call is einsum else [mesh]))

    for plant in plants:
        step(plant, -1)
        with profile() as p:
            for number in range(STEPS):
                step(plant, number)
                p.step()
        found = [(s.rank, s.line, s.inside, s.seconds, s.step) for s in p.stragglers()]
        if plant:
            plant = (plant[0], p.timelines[0].steps[0].runs[plant[1]].line, plant[2])
        named = [(rank, line, step) for rank, line, _, _, step in found] == ([plant] if plant else [])
        near = all(not inside and abs(seconds / DELAY - 1) <= 0.1 for _, _, inside, seconds, _ in found)
        rows.append((str(plant or "nobody"), str(found or "nobody"), yes(named and near)))
    return rows


# Programs with one waste each, and the same without it: `step(mesh, state, fixed)`, of x[B, D] and W[L, D_X, D]

L = 4
GATHER, PRODUCT = "W[D_X, F] -> W[D, F]", "x[B_X, D] * W[D, F] -> y[B_X, F]"


def gathers(mesh, s, fixed) -> None:
    """Weights gathered where they are needed; a layer ahead."""
    x, ahead = s["x"], all_gather(GATHER, s["W"][0], mesh, async_op=True) if fixed else None
    for l in range(L):
        W = wait(ahead) if fixed else all_gather(GATHER, s["W"][l], mesh)
        if fixed and l + 1 < L:
            ahead = all_gather(GATHER, s["W"][l + 1], mesh, async_op=True)
        x = einsum(PRODUCT, x, W)


def twice(mesh, s, fixed) -> None:
    """An activation gathered for each of the two matrices that multiply it; once for both."""
    V = s["W"][:, :, :512]
    for l in range(L):
        a = einsum("x[B_X, D] -> a[B_X, D]", s["x"])
        whole = all_gather("a[B_X, D] -> a[B, D]", a, mesh)
        einsum("a[B, E] * V[E, F_X] -> y[B, F_X]", whole[:, : len(V[l])], V[l])
        again = whole if fixed else all_gather("a[B_X, D] -> a[B, D]", a, mesh)
        einsum("a[B, E] * V[E, F_X] -> z[B, F_X]", again[:, : len(V[l])], V[l])


def wire(mesh, s, fixed) -> None:
    """Products in bfloat16, whose partial sums are added up in float32; in bfloat16."""
    x, W = s["x"].bfloat16(), s["W"][0].bfloat16()
    for _ in range(L):
        y = einsum("x[B, E_X] * W[E_X, F] -> y[B, F] {U_X}", x[:, : len(W)], W)
        y = all_reduce("y[B, F] {U_X} -> y[B, F]", y if fixed else y.float(), mesh)


def buckets(mesh, s, fixed) -> None:
    """64 gradients of 4 kB, each reduced by itself; all together."""
    x, W = s["x"], s["W"][0]
    einsum("x[B, E] * W[E, F] -> y[B, F]", x[:, : len(W)], W)
    for _ in range(1 if fixed else 64):
        all_reduce("dW[N, D] {U_X} -> dW[N, D]", torch.ones(64 if fixed else 1, 1024), mesh)


def late(mesh, s, fixed) -> None:
    """Rank 1 does something else for 20 ms in each step."""
    x, W = s["x"], s["W"][0]
    y = einsum("x[B, E_X] * W[E_X, F] -> y[B, F] {U_X}", x[:, : len(W)], W)
    if mesh.rank == 1 and not fixed:
        sleep(0.02)
    y = einsum("y[B, F] {U_X} -> z[B] {U_X}", y)
    all_reduce("z[B] {U_X} -> z[B]", y, mesh)


PROGRAMS = {  # the suggestion that is right; a step
    "no prefetch": ("prefetch", gathers),
    "gathered twice": ("twice", twice),
    "float32 sent": ("wire", wire),
    "tiny buckets": ("buckets", buckets),
    "straggler": ("straggler", late),
}


def advice(mesh, names) -> list[list[str]]:
    """Each program as it is and without its waste: steps in turn for their seconds, then a profile."""
    rows, state = [], {"x": torch.randn(256, 1024), "W": 0.03 * torch.randn(L, 1024 // mesh.size(), 1024)}
    for name in names:
        wanted, step = PROGRAMS[name]

        def run(fixed, step=step):
            step(mesh, state, fixed)
            all_reduce("n[] {U_X} -> n[]", torch.zeros(()), mesh)  # as the steps of a training do

        seconds = in_turn({"wasteful": partial(run, False), "fixed": partial(run, True)}, STEPS, warmup=1)
        gained = median(seconds["wasteful"]) - median(seconds["fixed"])
        with profile() as p:
            for _ in range(STEPS):
                run(False)
                p.step()
        first, *_ = *p.suggestions(), None
        predicted = f"{'<= ' * first.bound}{first.gain * 1e3:.1f}" if first else "0.0"
        figures = [f"{p.seconds * 1e3:.1f}", predicted, f"{gained * 1e3:.1f}"]
        rows.append([name, yes(first is not None and first.kind == wanted), *figures, str(first or "nothing")])
    return rows


def yes(right: bool) -> str:
    return "yes" if right else "NO"


def overhead(mesh, rounds: int) -> tuple[float, ...]:
    """Seconds that a profile adds to a step, the step's lines and operations, and how far off the parts' sum is.

    Steps in turn, some plain, some profiled; of each the first does not count, since others' work precedes it.
    """
    step, plain, with_it, off = ours(fsdp, mesh, SMALL, "sgd"), [], [], []

    def timed():
        began, outside = thread_time(), perf_counter()
        step()
        return thread_time() - began, perf_counter() - outside

    for _ in range(rounds):
        plain += [timed()[0] for _ in range(4)][1:]
        both = []
        with profile() as p:
            for _ in range(4):
                both.append(timed())
                p.step()
        with_it += [seconds for seconds, _ in both[1:]]
        off += [abs(part.total / outside - 1) for part, (_, outside) in zip(p.parts(mesh.rank), both, strict=True)]
    quick = [sorted(each)[len(each) // 4] for each in (plain, with_it)]  # other work on the machine only adds to times
    one = p.timelines[mesh.rank]
    return quick[1] - quick[0], len(one.runs) // 4, len(one.ops) // 4, median(off)


if __name__ == "__main__":
    args = options(__doc__, only=PROGRAMS, delays=20, clean=20, overhead=10).parse_args()
    rng, sizes = random.Random(0), {"X": RANKS}
    when = [None if i % 2 else rng.randrange(STEPS) for i in range(args.delays)]
    plants = [(rng.randrange(RANKS), rng.randrange(len(LINES)), step) for step in when] + [None] * args.clean
    found = launch.run(delays, sizes, plants)[0]
    print(table(found, ["planted", "found", "right"]))
    right = [[row[2] for row in rows].count("yes") for rows in (found[: args.delays], found[args.delays :])]
    print(f"\ndelays found: {right[0]} of {args.delays}; clean runs called clean: {right[1]} of {args.clean}\n")
    rows = launch.run(advice, sizes, args.only)[0]
    print(table(rows, ["program", "right", "step, ms", "predicted", "gained", "first suggestion"]))
    print(f"\nfirst suggestions right: {[row[1] for row in rows].count('yes')} of {len(rows)}\n")
    more, lines, operations, off = max(launch.run(overhead, sizes, args.overhead))
    print(f"a step of {lines} lines and {operations} operations costs its thread {more * 1e3:.2f} ms more")
    print(f"when profiled, {more / 0.1:.1%} of 100 ms; the parts' sum is off by {off:.2%}")
