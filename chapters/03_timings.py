"""Part 3, "A Deeper Dive into TPU Communication Primitives": https://jax-ml.github.io/scaling-book/sharding

What AllGather, ReduceScatter, AllReduce and AllToAll cost on a torus, and the problems of Part 3 about time. What the
collectives do is 03_collectives.py; how matmuls of sharded arrays need them, 03_sharding.py.
"""

import argparse
import sys

from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.hardware import chip
from scaling.hardware.torus import Torus
from scaling.show import charts as plot
from scaling.spec import parse

V4P, V5P, V5E = chip("v4p"), chip("v5p"), chip("v5e")


# %% The figure of the section: bytes per second of an AllGather over a ring of 16 v5e, model and measurement
MEASURED = {8e3: 0.03e10, 131e3: 0.87e10, 524e3: 2.7e10, 4.2e6: 7.2e10, 17e6: 8.65e10, 134e6: 8.95e10, 1e9: 9.0e10}


def latencies() -> plot.Series:
    """Seconds of each collective against bytes, over a ring of 16 v5e: level where the hops decide."""
    ops = ("AllGather", "AllReduce", "AllToAll")
    sizes = [10 ** (e / 5) for e in range(15, 51)]
    return {op: [(V, cost.seconds(op, V, V5E, 16)) for V in sizes] for op in ops}


def bandwidth() -> tuple[str, plot.Series]:
    model = [(V, V / cost.all_gather(V, V5E, 16)) for V in (10 ** (e / 10) for e in range(36, 91))]
    rows = [(f"{V:.3g}", f"{V / cost.all_gather(V, V5E, 16):.3g}", f"{bw:.3g}") for V, bw in MEASURED.items()]
    table = tabulate(rows, ["bytes", "model B/s", "measured B/s (figure)"], disable_numparse=True)
    return table, {"max(latency, V/W)": model, "measured (the book's figure)": list(MEASURED.items())}


# %% Question 4: gather the weights, or multiply shards and reduce, X[B, D] Y[D_X, F] on v5p
def strategy_1(B, D, F) -> cost.Roofline:
    return cost.roofline(2 * B * D * F, 2 * D * F, V5P.flops(), V5P.ici_bw)


def strategy_2(B, D, F, X) -> cost.Roofline:
    return cost.roofline(2 * B * D * F / X, 2 * 2 * B * F, V5P.flops(), V5P.ici_bw)


# %% Question 5: C[I, K] replicated, on v4p 4x4x4, n = I = J = K
def question_5(n: int) -> dict[str, float]:
    """Seconds of each option, computing and then communicating."""
    spread, output = 2 * n**3 / 64 / V4P.flops(), 2 * n * n
    return {
        "A[I_XYZ, J] or B[J, K_XYZ], AllGather": spread + cost.all_gather(output, V4P, (4, 4, 4)),
        "A[I, J_XYZ] B[J_XYZ, K], AllReduce": spread + cost.all_reduce(output, V4P, (4, 4, 4)),
        "replicated, no communication": 2 * n**3 / V4P.flops(),
    }


# %% Question 10: chunks over one link of a ring that goes one way, counted
def one_way_ring(D: int, everything: bool) -> float:
    """Share of the matrix over the busiest link: each device's shard to all (AllGather), or 1/D of it (AllToAll)."""
    loads = [0.0] * D
    for source in range(D):
        for hops in range(1, D):
            if everything:
                loads[(source + hops - 1) % D] += 1 / D  # passed on from each to the next
            else:
                for hop in range(hops):  # a chunk of its own for the device at that distance
                    loads[(source + hop) % D] += 1 / D**2
    return max(loads)


def first(holds) -> int:
    """The smallest whole number from which on something holds, by bisection."""
    low, high = 0, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# %% The questions
def answers() -> list[Answer]:
    H100, us = chip("h100"), 1e6
    quiz, small = 2 * 2048 * 8192, 2 * 256 * 256
    mesh, sizes = {"X": 4, "Y": 8, "Z": 2}, {"I": 64, "J": 8}
    copies = parse("A[I_X, J]").nbytes(sizes, mesh, "bf16") * 64 / parse("A[I, J]").nbytes(sizes, mesh, "bf16")
    V = 2 * 1024 * 4096
    F = 8192
    reduced = [cost.all_reduce(2 * 10**6 / 4, V5E, 4, wrap=wrap) / 1e6 for wrap in (True, False)]  # a second, per IK
    gathered = [cost.all_gather(2 * 10**6 / 4, V5E, 4, wrap=wrap) / 1e6 for wrap in (True, False)]  # per JK
    compute = 2 / (16 * V5E.flops())  # a second, per IJK
    B, D7, F7 = 128, 8192, 32768
    activations, weights = cost.all_gather(2 * B * D7, V5E, (2, 2)), cost.all_gather(2 * 2 * D7 * F7, V5E, (2, 2))
    routed = Torus((16,), (True,)).all_to_all_seconds(1e9, V5E.link_bw)
    both_ways = [cost.all_gather(1e9, V5E, 16, exact=exact) for exact in (False, True)] + [
        cost.all_to_all(1e9, V5E, 16)
    ]
    one_way = [1e9 * one_way_ring(16, everything) / V5E.link_bw for everything in (True, False)]
    options = question_5(8192)
    best = min(options, key=options.get)
    replicated = first(lambda n: min(question_5(n).values()) < question_5(n)["replicated, no communication"])
    return [
        Answer(
            "Pop quiz: fp32[1024, 4096] over 16 H100, load a shard", "294", 1e9 * 4 * 64 * 4096 / H100.hbm_bw, "ns",
            erratum="1 MiB taken as 1e6 bytes",
        ),
        Answer("Latency-bound below, a shard, v5e", "45", cost.latency_bound_bytes(V5E, 16) / 16 / 1e3, "kB"),
        Answer(
            "Pop quiz 2: AllGather_Y([E_Y, F]), Y = 4, as a ring", "377", us * cost.all_gather(quiz, V5E, 4, wrap=True),
            "us", erratum="34e6 bytes are 33.55e6: 372.8; and v5e has no ring of 4",
        ),
        Answer("Pop quiz 2: as the line that it is", "560", us * cost.all_gather(quiz, V5E, 4), "us"),
        Answer("Pop quiz 2: E = F = 256", "3", us * cost.all_gather(small, V5E, 4), "us", "3 hops of 1 us"),
        Answer("AllToAll over AllGather, ring both ways", "0.25", routed / both_ways[0], "", "routed, 16 chips"),
        Answer("1 bytes in all over those of one copy", "16", copies),
        Answer("2.1 AllGather_X([B_X, D_Y])", "23", us * cost.all_gather(V / 4, V4P, 4), "us"),
        Answer("2.2 AllGather_XY", "46", us * cost.all_gather(V, V4P, (4, 4)), "us"),
        Answer("2.3 AllReduce_Z([B_X, D_Y] {U_Z})", "11.6", us * cost.all_reduce(V / 16, V4P, 4), "us"),
        Answer(
            "2 fun fact: the first over X and Z", "11.5", us * cost.all_gather(V / 4, V4P, (4, 4)), "us",
            erratum="half of the rounded 23; 11.65",
        ),
        Answer("2 fun fact: the second over all three", "31", us * cost.all_gather(V, V4P, (4, 4, 4)), "us"),
        Answer("3 AllGather_X([B_X]), 256 bytes", "2", us * cost.all_gather(256, V4P, 4), "us", "2 hops"),
        Answer(
            "4 strategy 1 is compute-bound from B =", "2550",
            float(first(lambda B: strategy_1(B, 8192, F).bound == "compute")),
        ),
        Answer(
            "4 strategy 2 compute-bound: D / X above", "5100",
            float(first(lambda D: strategy_2(64, D, F, 1).bound == "compute")),
        ),
        Answer(
            "4 B = 1000: strategy 2 communicates less from D =", "2e3",
            float(first(lambda D: strategy_2(1000, D, F, 4).comms < strategy_1(1000, D, F).comms)),
        ),
        Answer(
            "4 B = 4000: strategy 2 is faster from D =", "5100",
            float(first(lambda D: strategy_2(4000, D, F, 4).comms < strategy_1(4000, D, F).math)),
        ),
        Answer(
            "5 best for n = 8192", "", best, "",
            "an AllReduce costs twice the AllGather; replicated computing 64 times",
        ),
        Answer("5 its time", "", us * options[best], "us", "2n^3/(64C) + 2n^2/(3W)"),
        Answer("5 spread out pays from n =", "", float(replicated), "", "6 hops of 1 us against 2n^3/C"),
        Answer("6 A[I_X,J_Y] B[J_Y,K]: compute-bound from J =", "", reduced[0] / compute, "", "were it a ring: 8 C/W"),
        Answer(
            "6 the same on the lines of v5e 4x4", "", reduced[1] / compute, "",
            "AllReduce_Y of 2IK/4 bytes, 3/4 of 16 C/W",
        ),
        Answer(
            "6 A[I_X,J] B[J_X,K_Y]: from I =", "", gathered[1] / compute, "",
            "AllGather_X of 2JK/4 bytes; 8,756 on a ring",
        ),
        Answer("6 A[I_X,J] B[J,K_Y]", "", "no comms", "", "the contraction is not sharded"),
        Answer("7 each matrix", "536", 2 * D7 * F7 / 1e6, "MB"),
        Answer("7 the activations", "2", 2 * B * D7 / 1e6, "MB"),
        Answer(
            "7 TP: AllGather and ReduceScatter", "", 2 * us * activations, "us",
            "2BD over two lines of 2: 3/4 V / 9e10 each",
        ),
        Answer(
            "7 TP: FLOPs", "", us * 4 * B * D7 * F7 / 4 / V5E.flops(), "us",
            "4BDF/4C, so compute-bound; 268 MB of weights fit",
        ),
        Answer(
            "7 FSDP: gathering both matrices", "", us * weights, "us",
            "50 times the FLOPs' time, and 537 MB do not fit",
        ),
        Answer(
            "9.3 AllGather A over ReduceScatter C, M = 3K", "3",
            cost.all_gather(3e9, V5P, 4) / cost.reduce_scatter(1e9, V5P, 4), "", "M/K",
        ),
        Answer("10.1 AllGather one way, D = 8: N^2 x", "0.875", one_way_ring(8, True), "", "counted: 1 - 1/D"),
        Answer("10.2 AllToAll one way: N^2 x", "0.4375", one_way_ring(8, False), "", "counted: (1 - 1/D)/2"),
        Answer("10.3 their ratio", "0.5", one_way_ring(8, False) / one_way_ring(8, True)),
        Answer("10.4 AllGather both ways over one way", "0.5", both_ways[1] / one_way[0]),
        Answer("10.5 AllToAll both ways over one way", "0.25", both_ways[2] / one_way[1] * 15 / 16, "", "as N grows"),
        Answer("10.6 AllGather over AllToAll, both ways", "4", both_ways[0] / both_ways[2]),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="write the time against bytes as PNG or SVG")
    args = parser.parse_args()
    table, series = bandwidth()
    print("AllGather over a ring of 16 v5e\n" + table)
    print("\n" + plot.chart(series, "bytes", "bytes/s"))
    print(
        "\n"
        + plot.chart(latencies(), "bytes", "seconds", "Collectives over a ring of 16 v5e (ReduceScatter as AllGather)")
    )
    if args.plot:
        print(f"wrote {plot.save(args.plot, latencies(), 'bytes', 'seconds', 'Collectives over a ring of 16 v5e')}")
    for n in (256, 8192):
        print(f"\nQuestion 5, n = {n}\n" + tabulate([(k, f"{1e6 * t:.1f} us") for k, t in question_5(n).items()]))
    print()
    return report(answers())


if __name__ == "__main__":
    sys.exit(main())
