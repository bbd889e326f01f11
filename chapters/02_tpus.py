"""Part 2, How to Think About TPUs: https://jax-ml.github.io/scaling-book/tpus

A systolic array that computes cycle by cycle, what it costs to fill it, a torus of chips whose links are counted, the
specifications as data, and the worked problems.
"""

import argparse
import math
import sys

import torch
from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.hardware import Chip, chip, chips, systolic
from scaling.hardware.torus import Torus, slice_of

V5E, V5P, V4P = chip("v5e"), chip("v5p"), chip("v4p")


# %% Specifications, from the table
def specifications() -> str:
    def shape(lengths) -> str:
        return "x".join(map(str, lengths)) if lengths else "-"

    def number(value, digits: int = 3) -> str:
        return f"{value:.{digits}g}" if value else "-"

    rows = []
    for hw in map(chip, chips()):
        if hw.kind == "tpu":
            rates = [number(dict(hw.peaks).get(dtype)) for dtype in ("bf16", "int8")]
            ici = [number(hw.link_bw), number(hw.ici_bw), hw.axes]
            alphas = [number(hw.intensity(link)) if hw.hbm_bw else "-" for link in ("hbm", "ici")]
            rest = [number(hw.pcie_bw), number(hw.dcn_bw, 4)]
            rows.append(
                (
                    hw.name,
                    shape(hw.pod),
                    shape(hw.host),
                    number(hw.hbm_bytes),
                    number(hw.hbm_bw),
                    *rates,
                    *ici,
                    *rest,
                    *alphas,
                )
            )
    head = [
        "TPU",
        "pod",
        "host",
        "HBM",
        "HBM/s",
        "bf16",
        "int8",
        "link",
        "axis",
        "axes",
        "PCIe",
        "DCN",
        "C/W hbm",
        "C/W ici",
    ]
    return tabulate(rows, head, disable_numparse=True)


# %% The systolic array: X[2, 3] W[3, 3] on 3 x 3 cells, which row of X is in which cell
def frames() -> tuple[str, bool]:
    X, W, seen = torch.arange(6.0).view(2, 3), torch.arange(9.0).view(3, 3), []
    result = systolic.run(X, W, 3, seen)
    grids = [systolic.draw(frame) for frame in seen]
    head = "   ".join(f"{'t = ' + str(t):<5}" for t in range(len(grids)))
    text = [head, *("   ".join(row) for row in zip(*grids, strict=True))]
    return "\n".join(text), torch.equal(result.out, X @ W)


# %% Filling it: cycles and utilization by rows of X, and by how well the dims fit
def filling(n: int = 32) -> tuple[str, bool]:
    """Rows streamed over 2 x 2 tiles of weights on n x n cells; each run is checked against a plain matmul."""
    rows, right = [], True
    W = torch.randint(-4, 5, (2 * n, 2 * n)).double()
    for M in (n // 4, n, 4 * n, 16 * n):
        X = torch.randint(-4, 5, (M, 2 * n)).double()
        run = systolic.run(X, W, n)
        right &= torch.equal(run.out, X @ W) and run.cycles == systolic.cycles(M, 2 * n, 2 * n, n)
        rows.append((M, run.cycles, f"{run.utilization:.1%}"))
    return tabulate(rows, ["rows of X", "cycles", "utilization"], disable_numparse=True), right


def padding() -> str:
    rows = []
    for D in (64, 100, 128, 129, 256, 320, 8192):
        shares = []
        for hw in (V5E, chip("v6e")):
            filled = math.ceil(D / hw.mxu) * hw.mxu
            shares.append(f"{(D / filled) ** 2:.0%} of {filled}")
        rows.append((f"[{D}, {D}]", *shares))
    return tabulate(rows, ["weights", "128 x 128 (v5e)", "256 x 256 (v6e)"], disable_numparse=True)


def mxu_flops(hw: Chip) -> float:
    """FLOPs/s of one core's systolic arrays: each cell multiplies and adds every cycle."""
    return 2 * hw.need("mxu") ** 2 * hw.need("mxus") * hw.need("clock")


def cycles_of_eight_rows(n: int = 16) -> int:
    """Cycles that 8 more rows of X take once the array is full, counted."""
    W = torch.randn(n, n)
    return systolic.run(torch.randn(2 * n + 8, n), W, n).cycles - systolic.run(torch.randn(2 * n, n), W, n).cycles


# %% The torus: hops, cuts, and an AllToAll by routing every message, against V max(axes) / (4 N W)
def tori() -> tuple[str, bool]:
    rows, equal = [], True
    cases = [
        (V5E, (16,)),
        (V5E, (8,)),
        (V5E, (4, 4)),
        (V5E, (8, 16)),
        (V4P, (4, 4, 4)),
        (V4P, (2, 2, 4)),
        (V4P, (4, 4, 8)),
    ]
    for hw, shape in cases:
        torus, V = slice_of(hw, shape), 64e6
        routed, formula = torus.all_to_all_seconds(V, hw.link_bw), cost.all_to_all(V, hw, shape)
        equal &= math.isclose(routed, formula, rel_tol=1e-9)
        wraps = ",".join("ring" if ring else "line" for ring in torus.wrap)
        cut = 2 * torus.bisection_links * hw.link_bw
        gather = cost.all_gather(V, hw, shape)
        times = [f"{1e6 * t:.1f}" for t in (gather, routed, formula)]
        name = "x".join(map(str, shape))
        rows.append((hw.name, name, wraps, torus.diameter, f"{torus.mean_distance:.2f}", f"{cut:.3g}", *times))
    head = [
        "chip",
        "slice",
        "axes",
        "diameter",
        "mean hops",
        "bisection B/s",
        "AllGather us",
        "AllToAll routed",
        "formula",
    ]
    return tabulate(rows, head, disable_numparse=True), equal


# %% The worked problems
def answers() -> list[Answer]:
    per_mxu, vpu = mxu_flops(V5E) / V5E.mxus, V5P.vector_alus * V5P.clock
    vmem = 22 * V5E.hbm_bw
    q1, q3 = chip("v4p", "part2"), chip("v6e", "part2")
    q4 = [cost.critical_batch(V5E.flops("int8"), W, 4096, 16384, "int8") for W in (V5E.hbm_bw, vmem)]
    widest = threshold(lambda D: math.isfinite(cost.critical_batch(q3.flops(), q3.pcie_bw, D, 4 * D)))
    torus, sent = slice_of(V5E, (4, 4)), 2 * 8 * 128 * 8192
    hops, ports = torus.distance((0, 0), (3, 3)), len(torus.neighbours((0, 0)))
    whole, steps = (128 * 1024) ** 2, question_6()
    rounded = "the book takes 16 GB for 17.18e9 bytes"
    ring, line = Torus((16,), (True,)), Torus((16,), (False,))
    open_slice, closed = (cost.all_gather(1e9, V5E, (4, 4), wrap=wrap) for wrap in (False, True))
    return [
        Answer("FLOPs/s of an MXU of v5e", "5e13", per_mxu, "FLOPs/s", "2 x 128 x 128 x 1.5 GHz"),
        Answer("FLOPs/s of a v5e", "2e14", mxu_flops(V5E), "FLOPs/s", "four MXUs; 1.97e14 in the table"),
        Answer("Cycles of bf16[8,128] @ bf16[128,128]", "8", float(cycles_of_eight_rows()), "cycles", "simulated"),
        Answer("MXUs, cores and clock give v5p's FLOPs/s", "4.59e14", 2 * mxu_flops(V5P), "FLOPs/s", "1.75 GHz"),
        Answer(
            "FLOPs/s of a core of v5p", "2.5e14", V5P.flops() / V5P.cores, "FLOPs/s",
            erratum="half of the table's 4.59e14",
        ),
        Answer("FLOPs/s of a pod of v5p", "4e18", V5P.pod_chips * V5P.flops(), "FLOPs/s"),
        Answer(
            "Multiply-adds/s of the systolic arrays", "200e12", V5E.flops() / 2, "a second",
            erratum="200 trillion are the FLOPs/s; a multiply-add is two",
        ),
        Answer("Intensity that VMEM asks for (10 to 20)", "11", V5E.flops() / vmem, "FLOPs/byte", "240 / 22"),
        Answer("HBM over PCIe, v4p", "100", V4P.hbm_bw / V4P.pcie_bw, "times", erratum="75 by the table"),
        Answer("Farthest chips on an axis of 16, wrapped", "8", float(ring.diameter), "hops", "N/2"),
        Answer("the same without wraparound", "", float(line.diameter), "hops", "N - 1, the book's N"),
        Answer("Time without wraparound over time with it", "2", open_slice / closed / (15 / 16), "", "(N-1)/N apart"),
        Answer("v5e 8x16 wraps on the long axis only", "yes", yes(V5E.wraps((8, 16)) == (False, True))),
        Answer("v5p 2x2x4 has no wraparound", "yes", yes(not any(V5P.wraps((2, 2, 4))))),
        Answer("v5p 4x4x8 has all of it", "yes", yes(all(V5P.wraps((4, 4, 8))))),
        Answer("1 reading 200B params from 32 v4p", "10", 1e3 * 400e9 / 32 / q1.hbm_bw, "ms", "10.4 by the table"),
        Answer("2 hosts of a v5e pod", "32", V5E.pod_chips / V5E.host_chips),
        Answer("2 cores of it", "256", float(V5E.pod_chips * V5E.cores)),
        Answer("2 FLOPs/s of it", "5.1e16", V5E.pod_chips * V5E.flops(), "FLOPs/s"),
        Answer("2 HBM of it", "4", V5E.pod_chips * V5E.hbm_bytes / 1e12, "TB"),
        Answer("2 hosts of a v5p pod", "2,240", V5P.pod_chips / V5P.host_chips),
        Answer("2 cores of it", "17,920", float(V5P.pod_chips * V5P.cores)),
        Answer("2 FLOPs/s of it", "4.1e18", V5P.pod_chips * V5P.flops(), "FLOPs/s"),
        Answer("2 HBM of it", "860", V5P.pod_chips * V5P.hbm_bytes / 1e12, "TB"),
        Answer("3 PCIe-bound below B =", "57,500", cost.critical_batch(q3.flops(), q3.pcie_bw), "tokens"),
        Answer(
            "3 with v6e's own PCIe", "", cost.critical_batch(q3.flops(), chip("v6e").pcie_bw), "tokens",
            "the table has 3.2e10, the question assumes 1.6e10",
        ),
        Answer(
            "3 and D = F/4 must be at least", "", float(widest), "",
            "exactly: below 5/4 C/W no batch is enough, as B is not small against D; so never at D = 8192",
        ),
        Answer("4.1 compute-bound from B =", "267", q4[0], "tokens", erratum="its 6.7e7, 2e4, 1.3e8 are rounded"),
        Answer("4.2 from VMEM, B =", "11", q4[1], "tokens"),
        Answer(
            "5 the first byte arrives after", "6", 1e6 * cost.point_to_point(0, V5E, hops, ports), "us",
            "6 hops, routed",
        ),
        Answer(
            "5 bytes / bandwidth", "188", 1e6 * sent / (ports * V5E.link_bw), "us",
            erratum="1.7e7 is 16.78e6 bytes: 186.4",
        ),
        Answer(
            "5 the whole transfer", "194", 1e6 * cost.point_to_point(sent, V5E, hops, ports), "us",
            erratum="with 16.78e6 bytes 192.4",
        ),
        Answer("6 PCIe", "63", 1e3 * steps["PCIe"], "ms", erratum=f"{rounded}: 67.1"),
        Answer("6 ICI", "167", 1e3 * steps["ICI"], "ms", erratum=f"{rounded}: 179"),
        Answer("6 HBM to MXU", "20", 1e3 * steps["HBM"], "ms"),
        Answer("6 FLOPs", "1.4", 1e3 * steps["FLOPs"], "ms"),
        Answer("6 in all, overlapped: at least", "167", 1e3 * max(steps.values()), "ms", erratum=f"{rounded}: 179"),
        Answer(
            "6 and the array fits the HBM of TPU{0,0}", "yes", yes(whole <= V5E.hbm_bytes),
            erratum="17.18e9 > 16e9 bytes: it must be streamed through",
        ),
        Answer("VPU of a v5p core", "7e12", vpu, "FLOPs/s", "8 x 128 x 4 at 1.75 GHz"),
        Answer("MXU over VPU", "30", V5P.flops() / V5P.cores / vpu, "times"),
        Answer("Vector registers of a core", "256", 64 * 8 * 128 * 4 / 1024, "KiB"),
        Answer("Shuffles to add up 8 sublanes", "3", math.log2(8)),
        Answer("FLOPs a cycle of v6e's array over v5e's", "4", (chip("v6e").mxu / V5E.mxu) ** 2, "times"),
    ]  # fmt: skip


def question_6() -> dict[str, float]:
    """Seconds of each stage: int8[128Ki, 128Ki] from the hosts of a v5e 4x4 to one chip, times bf16[8, 128Ki]."""
    side, chips_ = 128 * 1024, 16
    ports = len(slice_of(V5E, (4, 4)).neighbours((0, 0)))
    return {
        "PCIe": side**2 / chips_ / V5E.pcie_bw,
        "ICI": side**2 * (chips_ - 1) / chips_ / (ports * V5E.link_bw),
        "HBM": cost.matmul(8, side, side, V5E.flops(), V5E.hbm_bw, ("bf16", "int8", "bf16")).comms,
        "FLOPs": cost.matmul(8, side, side, V5E.flops(), V5E.hbm_bw).math,
    }


def threshold(holds) -> int:
    """The smallest whole number from which on something holds, by bisection."""
    low, high = 0, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("Specifications (bytes, bytes/s, FLOPs/s; 'axis' is both ways of a ring)\n" + specifications())
    text, drawn = frames()
    print("\nX[2, 3] W[3, 3] on 3 x 3 cells: the row of X in each cell, cycle by cycle\n" + text)
    table, filled = filling()
    print("\n2 x 2 tiles of weights on 32 x 32 cells\n" + table)
    print("\nShare of the array that a weight matrix fills, padded\n" + padding())
    torus, equal = tori()
    print("\nSlices, and collectives of 64 MB over all their axes\n" + torus)
    checks = {"systolic outputs equal X W": drawn and filled, "routed AllToAll equals the formula": equal}
    print("\n" + "\n".join(f"{name}: {'yes' if held else 'NO'}" for name, held in checks.items()) + "\n")
    return report(answers()) or int(not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
