"""Part 3, "A Deeper Dive into TPU Communication Primitives" to "More about the ReduceScatter", and Problem 8:
https://jax-ml.github.io/scaling-book/sharding

Every primitive: its type, what each rank gets, and its cotangent, each row checked as it is printed. The rings behind
them, hop by hop, with the bytes on each link. Then how long each takes on this machine, against the bytes it moves.

    torchrun chapters/03_collectives.py
    python chapters/03_collectives.py --mesh X=2
"""

# %%
import time
from statistics import median

import torch
from torch.func import vjp

from scaling import collectives as c
from scaling.book.lesson import EXACT, Report, options, run
from scaling.collectives import rings
from scaling.collectives.op import dual_line
from scaling.mesh import Mesh

# %% The primitives, and what one device makes of the operands of all n ranks, stacked: [n, I, J]


def primitives(mesh):
    """(name, type, meaning, call on this rank's operand, the same on the stack)."""
    n = mesh.sizes["X"]
    ring = [(i, (i + 1) % n) for i in range(n)]

    def everyone(whole):  # the same whole array on every rank
        return whole.expand(n, *whole.shape)

    def root_only(stack):
        return torch.cat([stack[:1], torch.zeros_like(stack[1:])])

    def swap(stack):  # block j of rank i's columns goes to rank j
        blocks = stack.unflatten(2, (n, -1))
        return blocks.permute(2, 0, 1, 3).flatten(1, 2)

    def own_rows(stack):
        return torch.stack([rows.unflatten(0, (n, -1))[i] for i, rows in enumerate(stack)])

    rows = [
        ("all_gather", "A[I_X, J] -> A[I, J]", "every rank gets all rows", lambda s: everyone(s.flatten(0, 1))),
        ("reduce_scatter", "A[I, J] {U_X} -> A[I_X, J]", "the sum, split", lambda s: s.sum(0).unflatten(0, (n, -1))),
        ("all_reduce", "A[I, J] {U_X} -> A[I, J]", "every rank gets the sum", lambda s: everyone(s.sum(0))),
        ("all_to_all", "A[I_X, J] -> A[I, J_X]", "X moves from dim I to dim J", swap),
        ("shard", "A[I, J] -> A[I_X, J]", "each keeps its rows, nothing is sent", own_rows),
        ("broadcast", "A[I, J] {U_X} -> A[I, J]", "every rank gets the root's", lambda s: everyone(s[0])),
        ("reduce", "A[I, J] {U_X} -> A[I, J] {U_X}", "the root gets the sum", lambda s: root_only(everyone(s.sum(0)))),
        ("scatter", "A[I, J] {U_X} -> A[I_X, J]", "the root's array, split", lambda s: s[0].unflatten(0, (n, -1))),
        (
            "gather",
            "A[I_X, J] -> A[I, J] {U_X}",
            "the root gets all rows",
            lambda s: root_only(everyone(s.flatten(0, 1))),
        ),
    ]
    table = [(k, line, text, lambda x, k=k, t=line: getattr(c, k)(t, x, mesh), f) for k, line, text, f in rows]
    permute = lambda x: c.ppermute("A[I_X, J]", x, mesh, "X", ring)  # noqa: E731
    return [
        *table,
        ("ppermute", "A[I_X, J] -> A[I_X, J]", "each gets its left neighbour's", permute, lambda s: s.roll(1, 0)),
    ]


BY_NAME = {"broadcast": "reduce", "reduce": "broadcast", "scatter": "gather", "gather": "scatter"}
BY_NAME = {name: f"{dual}, same root" for name, dual in BY_NAME.items()} | {"ppermute": "ppermute, turned round"}


def check_primitives(mesh, report, seed):
    n, rank = mesh.sizes["X"], mesh.rank
    rng = torch.Generator().manual_seed(seed)
    operands = torch.randn(n, 2 * n, 3 * n, generator=rng, dtype=torch.float64).to(mesh.device)
    rows = []
    for name, line, meaning, call, stacked in primitives(mesh):
        wanted, transpose = vjp(stacked, operands)
        result, pull = vjp(call, operands[rank])
        cotangents = torch.randn(wanted.shape, generator=rng, dtype=torch.float64).to(mesh.device)
        (back,), (wanted_back,) = pull(cotangents[rank]), transpose(cotangents)
        differences = torch.stack([(result - wanted[rank]).abs().max(), (back - wanted_back[rank]).abs().max()])
        worst = c.gather("Worst[R_X, W] -> Worst[R, W] {U_X}", differences[None], mesh).amax(
            0
        )  # of all ranks, on rank 0
        verdict = report.judge(name, bool((worst <= EXACT * wanted.abs().max() * n).all()))
        cotangent = BY_NAME.get(name) or dual_line(line, ("X",))
        rows.append((name, line, meaning, cotangent, verdict))
    report.table(rows, ["collective", "type", "what it does", "cotangent", "verdict"])
    report.say("A cotangent is {U_X} where the array was replicated over X, and replicated where that was {U_X}.")


# %% Problem 8: time against bytes


def time_collectives(mesh, report, largest):
    n = mesh.sizes["X"]
    timed = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    lines = {name: line for name, line, *_ in primitives(mesh)}
    rows = []
    nbytes = 1 << 12
    while nbytes <= largest:
        J = 4 * n
        I = max(n, nbytes // (4 * J) // n * n)
        row = [f"{4 * I * J:,}"]
        for name in timed:
            local = I if "A[I, J] {" in lines[name] else I // n
            x, seconds = torch.zeros(local, J, device=mesh.device), []
            for _ in range(7):
                c.all_reduce("Ready[] {U_X} -> Ready[]", torch.zeros((), device=mesh.device), mesh)
                start = time.perf_counter()
                getattr(c, name)(lines[name], x, mesh)
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            best = median(seconds[2:])
            row += [f"{best * 1e6:,.0f}", f"{4 * I * J / best / 1e9:.2f}"]
        rows.append(row)
        nbytes *= 8
    report.table(rows, ["V bytes"] + [h for name in timed for h in (f"{name} us", "GB/s")], stralign="right")
    report.say(
        "V is the whole array (the book's measure), GB/s is V over the time. In the book's model time is a latency"
    )
    report.say(
        "for small V, and beyond that grows with V: alike for AllGather and ReduceScatter, twice that for AllReduce."
    )


def main(mesh, args):
    report = Report(mesh)
    report.title(f"The primitives on {mesh}")
    check_primitives(mesh, report, args.seed)
    report.title("The rings behind them")
    rings.section(report, mesh)
    report.title("Problem 8: how long they take here")
    time_collectives(Mesh(mesh.sizes, mesh.device), report, args.largest)  # not checked: that would be timed too
    return report.done()


if __name__ == "__main__":
    run(main, options(__doc__, mesh="X=4", largest=(1 << 24, "bytes of the largest array that is timed")))
