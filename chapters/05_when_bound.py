"""Part 5, How to Parallelize a Transformer for Training: https://jax-ml.github.io/scaling-book/training

When is each strategy bound by communication? Compute and bytes per layer, the thresholds, X_opt, the two figures, and
the problems: the book's numbers beside ours, for both overlap models (2026: collectives of the two axes overlap, so the
longer counts; 2025: they add up). The strategies themselves run in 05_dp.py, 05_fsdp.py, 05_tp.py and 05_fsdp_tp.py.
"""

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.configs import get
from scaling.cost.transformer import num_params, params
from scaling.hardware import chip
from scaling.plan.layer import layer
from scaling.show.charts import chart, save

V5P = chip("v5p")
C = V5P.flops("bf16")
ALPHA = V5P.intensity("ici")  # 2550 FLOPs per byte of one ICI axis


def W(axes: int) -> float:
    """Bytes/s of a chip's collectives over so many torus axes, both ways round."""
    return V5P.bandwidth("ici", axes=axes)


# %% Compute and communication per layer (Takeaways), in units of BDF, BD and DF
def per_layer(B=8.0, D=4.0, F=16.0, X=4, Y=2) -> str:
    rows = []
    for name, x, y in (("dp", X, 1), ("fsdp", X, 1), ("tp", 1, Y), ("fsdp_tp", X, Y)):
        row = [name]
        for direction in ("forward", "backward"):
            moved = cost.layer_bytes(name, cost.LayerShape(B, D, F), x, y, direction)
            flops = cost.layer_flops(cost.LayerShape(B, D, F), x * y, direction) * x * y / (B * D * F)
            weights, activations = moved["X"] * y / (D * F), moved["Y"] * x / (B * D)
            parts = [f"{weights:g}DF{'/Y' * (y > 1)}"] if weights else []
            parts += [f"{activations:g}BD{'/X' * (x > 1)}"] if activations else []
            per = {(True, False): "/X", (False, True): "/Y", (True, True): "/XY"}[x > 1, y > 1]
            row += [f"{flops:g}BDF{per}", " + ".join(parts) or "0"]
        rows.append(row)
    head = ["strategy", "FLOPs forward", "bytes forward", "FLOPs backward", "bytes backward"]
    return tabulate(rows, head)


# %% Thresholds of several chips
def thresholds(F: int = 28672) -> str:
    rows = []
    for name in ("v4p", "v5p", "v5e", "v6e"):
        hw = chip(name)
        alpha, m = hw.intensity("ici"), hw.axes
        wx, wy = (hw.bandwidth("ici", axes=axes) for axes in (max(1, m - 1), 1))
        mixed = [cost.mixed_threshold(F, hw.flops("bf16"), wx, wy, overlap) for overlap in ("max", "sum")]
        tensor = cost.tensor_limit(F, hw.flops("bf16"), wy)
        pod = cost.pod_threshold(hw.flops("bf16"), hw.need("dcn_bw"))
        rows.append((name, alpha, f"{alpha / m:.0f} ({m} axes)", tensor, *mixed, f"{pod:,.0f}"))
    head = ["chip", "C/W_ici", "DP, FSDP: B/X >", "TP: Y <", "FSDP+TP: B/N >", "(2025: adding up)", "pods: B/slice >"]
    return tabulate(rows, head, floatfmt=".0f")


# %% Figure: FLOPs over communication against batch per chip, 4x4x4 v5p, F = 30k
def ratio_figure(N: int = 64, F: float = 30_000, D: float = 8192) -> dict:
    series = {"FSDP": [], "TP only": [], "FSDP+TP": []}
    for per_chip in range(20, 2001, 20):
        B = per_chip * N
        x = cost.mixed_optimum(B, F, N, 2, 1)
        mixed = max(4 * D * F * x / N / W(2), 4 * B * D / x / W(1))  # at the best X, whole or not
        shape, links = cost.LayerShape(B, D, F), cost.Links(C, X=W(3), Y=W(3))
        fsdp = cost.layer("fsdp", shape, links, X=N, direction="forward")
        tp = cost.layer("tp", shape, links, Y=N, direction="forward")
        series["FSDP"].append((per_chip, fsdp.math / fsdp.comms))
        series["TP only"].append((per_chip, tp.math / tp.comms))
        series["FSDP+TP"].append((per_chip, tp.math / mixed))
    return series


# %% Figure: seconds of a layer's forward pass against batch, 16x16x16 v5p, D = 8192, F = 32768
MESHES = {"4096 FSDP": (4096, 1, 3, 0), "1024 x 4": (1024, 4, 2, 1), "512 x 8": (512, 8, 2, 1)}
MESHES |= {"256 x 16": (256, 16, 2, 1), "4096 TP": (1, 4096, 0, 3)}


def mesh_layer(B: float, X: int, Y: int, m_x: int, m_y: int, D=8192, F=32768) -> cost.Cost:
    name = "fsdp_tp" if X > 1 < Y else "fsdp" if X > 1 else "tp"
    links = cost.Links(C, X=W(m_x) if m_x else None, Y=W(m_y) if m_y else None)
    return cost.layer(name, cost.LayerShape(B, D, F), links, X, Y, "forward")


def time_figure() -> dict:
    batches = [10 ** (1 + i / 10) for i in range(71)]
    series = {name: [(B, mesh_layer(B, *mesh).comms) for B in batches] for name, mesh in MESHES.items()}
    return series | {"matmuls": [(B, mesh_layer(B, *MESHES["512 x 8"]).math) for B in batches]}


def crossing(mesh: tuple[int, int, int, int]) -> float:
    """The batch from which the mesh is compute-bound, by bisection; inf if it never is."""
    low, high = 1.0, 1e12
    if mesh_layer(high, *mesh).bound != "compute":
        return float("inf")
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if mesh_layer(middle, *mesh).bound == "compute" else (middle, high)
    return high


def best_crossing(N: int = 4096, F: float = 32768) -> float:
    """The same with the best X of any real value: N times the threshold of FSDP+TP."""
    return N * cost.mixed_threshold(F, C, W(2), W(1))


# %% The problems, and the numbers of the text
def bound(B: float, N: int, F: float, axes: int = 3) -> str:
    """Can FSDP alone, FSDP+TP at its best, or neither keep N chips compute-bound?"""
    if cost.data_threshold(C, W(axes)) < B / N:
        return "FSDP"
    return "FSDP+TP" if cost.mixed_threshold(F, C, W(2), W(1)) < B / N else "neither"


def answers() -> list[Answer]:
    m13, gemma = get("llama2-13b"), get("gemma-7b")
    p13, count = params(m13), num_params(m13)
    F, N, pod = 30_000, 4096, V5P.pod_chips
    mixed = cost.mixed_threshold(32768, C, W(2), W(1))
    widths = [m13.D, m13.F, m13.F]
    state = cost.training_memory(13e9, grad_bytes=0)
    checkpoints = cost.checkpoint_bytes(3e6, widths, m13.L)
    moved = {True: 0.0, False: 0.0}  # over Y, by the strategy's own code on an abstract mesh
    for move in layer(B=8, D=4, F=16, X=4, Y=2).moves:
        moved[move.backward] += move.nbytes / (8 * 4 / 4) if move.axis == "Y" else 0
    seconds = cost.seconds_at(6 * 3e6 * 13e9, N, C, 0.4)
    return [
        Answer("DP: largest model with Adam on a v5p", "9e9", cost.largest_model(V5P.hbm_bytes), "params",
               erratum="HBM / 10 = 9.6e9: rounded down, and with nothing left for activations"),
        Answer("C / W_ici, one axis", "2550", ALPHA, "FLOPs/B"),
        Answer("DP, FSDP: smallest batch per chip, three axes", "850", cost.data_threshold(C, W(3)), "tokens"),
        Answer("the same for a whole pod", "7.6e6", pod * cost.data_threshold(C, W(3)), "tokens"),
        Answer("DeepSeek-V2, 40M tokens: chips", "47,000", 40e6 / cost.data_threshold(C, W(3)), "v5p"),
        Answer("LLaMA-3 70B, 16M tokens: chips", "18,823", 16e6 / (2550 / 3), "v5p"),
        Answer("its 6.3e24 FLOPs on them at 50% MFU", "17", cost.seconds_at(6.3e24, 18_823, C, 0.5) / 86400, "days"),
        Answer("TP: largest Y of LLaMA-3 70B (F ~ 30,000)", "11", cost.tensor_limit(F, C, W(1)), "way"),
        Answer("TP 8-way, LLaMA-3 70B (F = 28672)", "compute", mesh_layer(1e6, 1, 8, 0, 1, 8192, 28672).bound),
        Answer("TP 16-way", "Y", mesh_layer(1e6, 1, 16, 0, 1, 8192, 28672).bound, note="Y: bound by its collectives"),
        Answer("F that 8-way TP needs", "20,000", 8 * ALPHA),
        Answer("Gemma 7B, F ~ 50k: comms-bound from", "19", float(int(cost.tensor_limit(50e3, C, W(1)))), "way"),
        Answer("Gemma 7B as it is: 2 up-projections, F = 24,576", "", cost.tensor_limit(1.5 * gemma.F, C, W(1)),
               note="3 matrices and one gather: 6BDF/Y against 4BD, so Y < 1.5 F W/C; 16-way is slightly comms-bound"),
        Answer("int8: C / W_ici", "5100", V5P.intensity("ici", "int8"), "OPs/B", note="and half the bytes: same limit"),
        Answer("X_opt, N=64, B=48,000, F=32768", "13.9", cost.mixed_optimum(48e3, 32768, 64, 2, 1),
               erratum="13.69; 13.86 takes F = 32,000. The choice X=16, Y=4 stands"),
        Answer("FSDP+TP: smallest batch per chip, F = 32768", "99", mixed, "tokens"),
        Answer("the same in 2025, collectives adding up", "400", cost.mixed_threshold(32768, C, W(2), W(1), "sum")),
        Answer("FSDP+TP, 4x4x4, F = 30k (figure): 1 from", "100", cost.mixed_threshold(F, C, W(2), W(1)), "tokens"),
        Answer("TP only, 4x4x4 (figure): constant ratio", "", ratio_figure()["TP only"][0][1],
               note="3 F / (64 alpha)"),
        Answer("16x16x16, F = 32768: best mesh is compute-bound from", "4e5", best_crossing(), "tokens"),
        Answer("the same for the plotted 512 x 8", "6e5", crossing(MESHES["512 x 8"]), "tokens",
               erratum="652,800 = N alpha / (Y M_X); the 4e5 named beside it is the best X of any real value, 319"),
        Answer("256 x 16 with M_Y = 1", "", str(crossing(MESHES["256 x 16"])), "tokens",
               note="comms-bound at any batch: Y alpha / F = 1.25; it needs two axes for TP"),
        Answer("Pods: smallest batch per slice over DCN", "73,440", cost.pod_threshold(C, V5P.dcn_bw), "tokens"),
        Answer("the same in the Takeaways", "71,000", cost.pod_threshold(C, V5P.dcn_bw), "tokens",
               erratum="73,440 = 4.59e14 / 6.25e9, as in the text before it"),
        Answer("LLaMA-3 70B, 2M tokens: chips with FSDP", "2,400", 2e6 / cost.data_threshold(C, W(3)), "v5p"),
        Answer("with FSDP+TP: batch per chip", "108", cost.mixed_threshold(F, C, W(2), W(1)), "tokens"),
        Answer("chips", "18,000", 2e6 / cost.mixed_threshold(F, C, W(2), W(1)), "v5p"),
        Answer("two pods: tokens per chip", "111", 1e6 / pod, "tokens", note="above 108, and 1M per pod above 73,440"),
        Answer("Table, FSDP+TP: forward bytes over Y / (BD/X)", "4", moved[False], note="traced"),
        Answer("Table, FSDP+TP: backward bytes over Y / (BD/X)", "8", moved[True],
               erratum="the algorithm gathers dOut and scatters dIn: 4 (6 if In is gathered again), as in the TP row"),
        Answer("1 FFW", "8.5e9", p13["mlp"], "params"),
        Answer("1 attention", "4.2e9", p13["attention"], "params"),
        Answer("1 vocabulary", "0.33e9", p13["vocab"], "params"),
        Answer("1 LLaMA-2 13B", "13.0e9", count, "params"),
        Answer("2 params and Adam's state", "130e9", state.total, "bytes"),
        Answer("2 activations, 3 checkpoints a layer, 16M tokens", "42e12", checkpoints * 16 / 3, "bytes"),
        Answer("3 HBM of 16x16x16", "393e12", N * V5P.hbm_bytes, "bytes"),
        Answer("3 sequences of 32k in 3M", "96", 3 * 2**20 / 2**15, "sequences"),
        Answer("3.1 pure DP", "no", "yes" if state.fits(V5P.hbm_bytes) else "no", note="130 GB on each chip of 96 GB"),
        Answer("3.2 checkpoints", "7.86e12", checkpoints, "bytes"),
        Answer("3.2 memory in all", "8e12", checkpoints + state.total, "bytes"),
        Answer("3.2 memory per chip", "", (checkpoints + state.total) / N, "bytes", note="all of it / 4096"),
        Answer("3.2 smallest batch", "3.48e6", N * cost.data_threshold(C, W(3)), "tokens"),
        Answer("3.2 pure FSDP", "no", "yes" if bound(3e6, N, m13.F) == "FSDP" else "no", note="3M < 3.48M"),
        Answer("3.3 smallest batch per chip", "235", cost.mixed_threshold(m13.F, C, W(2), W(1)), "tokens"),
        Answer("3.3 FSDP+TP", "yes", "yes" if bound(3e6, N, m13.F) == "FSDP+TP" else "no", note="732 a chip"),
        Answer("3.3 X_opt", "1333", cost.mixed_optimum(3e6, m13.F, N, 2, 1), note="1024 x 4"),
        Answer("3.3 seconds a step at 40% MFU", "0.3", seconds, "s"),
        Answer("4 (2025 edition) 1M tokens on the same slice", "", bound(1e6, N, m13.F),
               note="244 a chip > 235: just compute-bound, if the collectives of both axes overlap"),
        Answer("4 (2025 edition) 10M tokens", "", bound(10e6, N, m13.F), note="2441 a chip > 850: FSDP alone will do"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="also write the figures: FILE with -ratio and -time in its name")
    args = parser.parse_args()
    print("Compute and communication of one layer (two matrices, bf16; an AllReduce counts twice)\n" + per_layer())
    print("\nCompute-bound if, with F = 28672 (DP and FSDP on all axes; TP on one, FSDP+TP on the others and one)")
    print(thresholds() + "\n")
    figures = {
        "ratio": (ratio_figure(), "tokens per chip", "FLOPs time / comms time", "4x4x4 v5p, F = 30k"),
        "time": (time_figure(), "batch in tokens", "seconds of a layer", "16x16x16 v5p, D = 8192, F = 32768"),
    }
    for name, (series, x, y, title) in figures.items():
        print(chart(series, x, y, title) + "\n")
        if args.plot:
            path = Path(args.plot)
            print("wrote", save(path.with_stem(f"{path.stem}-{name}"), series, x, y, title), "\n")
    return report(answers())


if __name__ == "__main__":
    sys.exit(main())
