"""Part 1, All About Rooflines: https://jax-ml.github.io/scaling-book/roofline

How long an operation takes, from its FLOPs and its bytes, and which of the two binds it: a table over chips, the
roofline as a picture, the matmul's critical batch, two chips that share a contraction, and the worked problems. And
on this device: what matmul and add reach here, and whether a matmul's time follows the roofline of the two.
"""

import argparse
import sys
import time

import torch
from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.hardware import Chip, chip
from scaling.show import charts as plot

V5E, H100 = chip("v5e"), chip("h100", "part1")  # the H100 of this part's text: 9.89e14 FLOPs/s, 3.35e12 bytes/s


# %% Where does the time go? FLOPs and bytes of five operations in bf16, on three chips
def operations(C: float, W: float, N: int = 2**20, D: int = 4096) -> dict[str, cost.Roofline]:
    return {
        f"dot product, {N:,}": cost.roofline(2 * N - 1, 2 * N + 2 * N + 2, C, W),
        f"add, {N:,}": cost.roofline(N, 3 * 2 * N, C, W),
        f"ReLU, {N:,}": cost.roofline(N, 2 * 2 * N, C, W),
        f"matrix x vector, {D}": cost.matmul(1, D, D, C, W),
        f"matmul, B = 100, D = F = {D}": cost.matmul(100, D, D, C, W),
        f"matmul, B = D = F = {D}": cost.matmul(D, D, D, C, W),
    }


def where_the_time_goes() -> str:
    rows = []
    for hw in (V5E, H100, chip("h200")):
        for name, op in operations(hw.flops(), hw.hbm_bw).items():
            us = [f"{1e6 * t:.2f}" for t in (op.math, op.comms, op.lower, op.upper)]
            rows.append((hw.name, name, f"{op.intensity:.2f}", f"{op.critical:.0f}", *us, op.bound))
    head = [
        "chip",
        "operation (bf16)",
        "FLOPs/byte",
        "critical",
        "T_math us",
        "T_comms us",
        "lower",
        "upper",
        "bound by",
    ]
    return tabulate(rows, head, disable_numparse=True)


# %% Visualizing rooflines: two memories, and matmuls of growing batch along the roof of the slower one
def picture(hw: Chip = V5E) -> tuple[plot.Series, plot.Series]:
    C, xs = hw.flops(), [10 ** (i / 20) for i in range(-20, 81)]
    roofs = {
        f"{hw.name} from HBM": [(x, cost.attainable(x, C, hw.hbm_bw)) for x in xs],
        f"{hw.name} from VMEM": [(x, cost.attainable(x, C, hw.need("sram_bw"))) for x in xs],
    }
    batches = (1, 4, 16, 64, 256, 1024, 4096)
    found = [cost.matmul(B, 4096, 4096, C, hw.hbm_bw) for B in batches]
    return roofs, {f"matmul, D = F = 4096, B = {batches}": [(op.intensity, op.attained) for op in found]}


# %% Question 3: FLOPs/s against batch, int8 weights and bf16 activations
def question_3() -> plot.Series:
    mixed, rate = ("bf16", "int8", "bf16"), (V5E.flops(), V5E.hbm_bw)
    return {
        f"D = F = {D}": [(B, cost.matmul(B, D, D, *rate, dtypes=mixed).attained) for B in range(1, 512)]
        for D in (4096, 1024)
    }


# %% Matrix multiplication: intensity and critical batch, exact and in the limit of large D and F
def critical_batches() -> str:
    rows = []
    for D, F in ((1024, 1024), (4096, 4096), (8192, 8192), (8192, 32768)):
        at = cost.matmul(240, D, F, V5E.flops(), V5E.hbm_bw).intensity
        exact = [cost.critical_batch(hw.flops(), hw.hbm_bw, D, F) for hw in (V5E, H100)]
        rows.append((D, F, f"{at:.1f}", *(f"{B:.1f}" for B in exact)))
    limit = [f"{cost.critical_batch(hw.flops(), hw.hbm_bw):.1f}" for hw in (V5E, H100)]
    rows.append(("large", "large", "240.0", *limit))
    return tabulate(
        rows, ["D", "F", "intensity at B = 240", "critical B, v5e", "critical B, H100"], disable_numparse=True
    )


# %% Network communication rooflines: two chips, half of D each
def two_chips() -> tuple[str, bool]:
    X, Y = torch.randn(8, 64, dtype=torch.float64), torch.randn(64, 16, dtype=torch.float64)
    halves = X[:, :32] @ Y[:32] + X[:, 32:] @ Y[32:]
    same, rows = torch.allclose(halves, X @ Y, rtol=1e-12), []
    for B in (16, 1024):
        for D in (4096, 8192, 8756, 16384):
            op = cost.split_contraction(B, D, 8192, V5E.flops(), V5E.need("link_bw"))
            rows.append((B, D, f"{1e6 * op.math:.1f}", f"{1e6 * op.comms:.1f}", op.bound))
    return tabulate(rows, ["B", "D", "T_math us", "T_comms us", "bound by"], disable_numparse=True), same


def threshold(bound_by_math) -> int:
    """The smallest whole number from which on an operation is compute-bound, by bisection."""
    low, high = 0, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_by_math(middle) else (middle, high)
    return high


# %% The worked problems
def answers() -> list[Answer]:
    C, W, int8 = V5E.flops(), V5E.hbm_bw, V5E.flops("int8")
    mixed = ("bf16", "int8", "bf16")
    v5p, v6e = chip("v5p"), chip("v6e", "part1")
    vector = v5p.vector_alus * v5p.clock / (v5p.hbm_bw / v5p.cores)
    tiles, big = (128, 512, 256), 2**20
    link = V5E.need("link_bw")
    swap = threshold(lambda D: cost.split_contraction(16, D, 8192, C, link).bound == "compute")
    many, small, q1 = 8192.0, cost.matmul(2, 3, 5, int8, W, "int8"), cost.matmul(100, 4096, 4096, int8, W, "int8")
    q2 = cost.critical_batch(C, W, dtypes=mixed)
    each = cost.roofline(2 * 64 * many**2, 64 * many + 64 * many**2 + 64 * many, int8, W)
    return [
        Answer("1e12 FLOPs on an H100", "1.01", 1e3 * cost.roofline(1e12, 0, H100.flops(), H100.hbm_bw).math, "ms"),
        Answer("1e12 FLOPs on a v6e", "1.1", 1e3 * cost.roofline(1e12, 0, v6e.flops(), v6e.hbm_bw).math, "ms"),
        Answer(
            "the same with the FLOPs/s of Part 2's table", "1.1", 1e3 / chip("v6e").flops() * 1e12, "ms",
            note="9.2e14 there, 9.1e14 in this part: variant part1",
        ),
        Answer("Critical intensity of v5e's MXU", "240", V5E.intensity("hbm"), "FLOPs/byte"),
        Answer("Intensity of a dot product, large N", "0.5", cost.roofline(2 * big - 1, 4 * big + 2, C, W).intensity),
        Answer(
            "Critical intensity of v5p's VPU", "3", vector, "FLOPs/byte",
            erratum="7.2e12 FLOPs/s a core over half of 2.8e12 bytes/s; 3 is one core's over the chip's bandwidth",
        ),
        Answer("Matmul is compute-bound from B =", "240", cost.critical_batch(C, W), "tokens"),
        Answer("the same on GPUs", "300", cost.critical_batch(H100.flops(), H100.hbm_bw), "tokens"),
        Answer("512 sequences of 4096 tokens on 2048 GPUs", "1e3", 512 * 4096 / 2048, "tokens/GPU"),
        Answer(
            "Intensity of a matmul by tiles of 128 and 256", f"{128 * 256 / (128 + 256):.4g}",
            cost.tiled_matmul(1024, big, 1024, tiles, C, W).intensity, note="bm bn/(bm + bn), K large",
        ),
        Answer("Two chips: C/W of v5e's link", "4377", C / link, "FLOPs/byte"),
        Answer("Two chips: compute-bound from D =", "8755", float(swap), note="for any B: see the table above"),
        Answer("1.1 bytes of int8 matmul, B=2, D=3, F=5", "31", small.nbytes, note="BD+DF+BF"),
        Answer("1.2 operations of the same", "60", float(small.flops), note="2BDF"),
        Answer("1.3 critical intensity in int8", "480", int8 / W, "OPs/byte"),
        Answer("1.3 compute-bound from B =", "240", cost.critical_batch(int8, W, dtypes="int8"), "tokens"),
        Answer(
            "1.4 bounds of its time, B = 100, D = F = 4096", "", 1e6 * q1.lower, "us",
            note=f"at least T_comms, at most {1e6 * q1.upper:.1f} us",
        ),
        Answer("2 int8 weights, bf16 FLOPs: compute-bound from B =", "120", q2, "tokens"),
        Answer(
            "3 knee of the plot, D = F = 4096", "", cost.critical_batch(C, W, 4096, 4096, mixed), "tokens",
            note="wDF/(2DF W/C - aD - oF), read off the book's figure as about 136",
        ),
        Answer(
            "3 knee of the plot, D = F = 1024", "", cost.critical_batch(C, W, 1024, 1024, mixed), "tokens",
            note="almost twice the limit of 120, as the book says",
        ),
        Answer("4 a matrix for each row of the batch: intensity", "2", each.intensity, note="whatever B is"),
        Answer("4 and so it is bound by", "comms", each.bound),
        Answer("5 H100 is compute-bound from B =", "295", cost.critical_batch(H100.flops(), H100.hbm_bw), "tokens"),
    ]  # fmt: skip


# %% On this device: what matmul and add reach, and whether a matmul follows the roofline of the two
def fastest(fn, device: torch.device, seconds: float = 0.15) -> float:
    """Seconds of one call, the fastest of those that fit in `seconds`."""

    def once() -> float:
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    best, until = once(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        best = min(best, once())
    return best


def measure(device: torch.device) -> str:
    gpu = device.type == "cuda"
    dtype, side, length = (torch.bfloat16, 4096, 2**28) if gpu else (torch.float32, 768, 2**24)
    square = torch.randn(side, side, device=device, dtype=dtype)
    C = 2 * side**3 / fastest(lambda: square @ square, device)
    a, b = (torch.zeros(length, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    W = 3 * a.nbytes / fastest(lambda: torch.add(a, b, out=out), device)
    D = 4 * side
    weights, rows = torch.randn(D, D, device=device, dtype=dtype), []
    for B in (1, 4, 16, 64, 256):
        x = torch.randn(B, D, device=device, dtype=dtype)
        seconds = fastest(lambda x=x: x @ weights, device, 0.08)
        op = cost.matmul(B, D, D, C, W, dtype)
        us = [f"{1e6 * t:.0f}" for t in (op.lower, op.upper, seconds)]
        rows.append((B, f"{op.intensity:.1f}", op.bound, *us, f"{seconds / op.lower:.2f}"))
    head = ["B", "FLOPs/byte", "bound by", "lower us", "upper us", "measured us", "measured / lower"]
    text = f"{dtype} on {device}: matmul {C:.3g} FLOPs/s, add {W:.3g} bytes/s, critical intensity {C / W:.1f}\n"
    return text + f"x[B, {D}] W[{D}, {D}]\n" + tabulate(rows, head, disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to measure: cpu, cuda")
    parser.add_argument("--plot", metavar="FILE", help="write the roofline as PNG or SVG")
    args = parser.parse_args()
    print("Where the time goes\n" + where_the_time_goes())
    roofs, matmuls = picture()
    labels = {"xlabel": "FLOPs/byte", "ylabel": "FLOPs/s"}
    print("\n" + plot.chart(roofs, points=matmuls, **labels))
    if args.plot:
        print(f"wrote {plot.save(args.plot, roofs, points=matmuls, **labels)}")
    print("\nCritical batch of a bf16 matmul\n" + critical_batches())
    table, same = two_chips()
    print("\nTwo v5e which share the contraction: D decides, not B\n" + table)
    print(f"the two halves add up to the whole: {'yes' if same else 'NO'}\n")
    print(plot.chart(question_3(), "batch", "FLOPs/s", "Question 3: int8 weights, bf16 activations, v5e", log=False))
    print("\nThis device\n" + measure(torch.device(args.device)) + "\n")
    return report(answers()) or int(not same)


if __name__ == "__main__":
    sys.exit(main())
