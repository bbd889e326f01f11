# %% [markdown]
"""Part 1, All About Rooflines: how long an operation takes, from its FLOPs and its bytes, and which of them binds it.
https://jax-ml.github.io/scaling-book/roofline

This chapter puts six operations on three chips, draws the roofline, computes the critical batch of a matmul, splits a
contraction over two chips, answers every problem, and measures what this machine reaches.
"""

# %%
import math
import time
from bisect import bisect_left

import torch

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.page import Page
from scaling.hardware import chip
from scaling.spec import parse

page = Page(__doc__, device=True, plot=True)
V5E, H100 = chip("v5e"), chip("h100", "part1")  # the H100 of this part's text: 9.89e14 FLOPs/s, 3.35e12 bytes/s
C, W = V5E.flops(), V5E.hbm_bw

# %% [markdown]
# ## Where does the time go?
# An operation computes and it moves data, and either may take the longer. T_math is its FLOPs over C, the chip's
# FLOPs/s, and T_comms its bytes over W, the bytes/s of the chip's memory. If the two overlap fully, the operation takes
# as long as the greater (the lower bound); if they do not overlap at all, it takes their sum (the upper bound), at most
# twice as long. So one needs only the greater to know what to improve: a faster chip does not help an operation that
# waits for data.
#
# The table has six operations on a TPU v5e and two GPUs, in bf16, which takes 2 bytes a number. A matmul multiplies
# activations [B, D] by weights [D, F]: B is the batch, counted in tokens, and D and F are the widths before and after.
# The third column is the arithmetic intensity of the operation, FLOPs per byte, and the fourth that of the chip, C/W:
# an operation is bound by the data it moves (comms) unless the third is greater. A dot product or an add uses each
# number that it loads once, on any chip. A matmul uses each number many times, and the more rows it has, the more
# often.


# %%
def operations(C: float, W: float, N: int = 2**20, D: int = 4096) -> dict[str, cost.Roofline]:
    return {
        "dot product, 2^20": cost.roofline(2 * N - 1, 2 * N + 2 * N + 2, C, W),
        "add, 2^20": cost.roofline(N, 3 * 2 * N, C, W),
        "ReLU, 2^20": cost.roofline(N, 2 * 2 * N, C, W),
        "matrix x vector, 4096": cost.matmul(1, D, D, C, W),
        "matmul, B = 100": cost.matmul(100, D, D, C, W),
        "matmul, B = D = F = 4096": cost.matmul(D, D, D, C, W),
    }


page.title("Where the time goes: bf16, D = F = 4096")
rows = []
for hw in (V5E, H100, chip("h200")):
    for name, op in operations(hw.flops(), hw.hbm_bw).items():
        us = [f"{1e6 * t:,.2f}" for t in (op.math, op.comms, op.lower, op.upper)]
        rows.append((hw.name, name, f"{op.intensity:.2f}", f"{op.critical:.0f}", *us, op.bound))
page.table(rows, ["chip", "operation", "FLOPs\n/byte", "the\nchip's", "T_math\nus", "T_comms\nus", "lower\nus",
                  "upper\nus", "bound"])  # fmt: skip

# %% [markdown]
# ## Visualizing rooflines
# A roofline shows what a chip attains at each arithmetic intensity. It rises with the memory's bandwidth and is level
# from the critical intensity C/W on. HBM is the chip's main memory. A TPU also has a small one beside its cores, VMEM,
# which is 22 times as fast and moves the corner from 240 to 11 FLOPs per byte. The points are matmuls of a growing
# batch, which climb the lower roof. The rows of the table lie in the three areas of the book's figure: bound by both
# bandwidths (red, comms twice), by the lower one alone (yellow, comms and compute), and by neither (green).


# %%
def roof(W: float, ends=(0.1, 1e4)) -> list[tuple[float, float]]:
    """Return the corners of a roofline: (FLOPs/byte, FLOPs/s) pairs."""
    return [(x, cost.attainable(x, C, W)) for x in sorted((*ends, C / W))]


vmem, batches = V5E.need("sram_bw"), (1, 4, 16, 64, 256, 1024, 4096)
matmuls = [cost.matmul(B, 4096, 4096, C, W) for B in batches]
page.chart(
    "roofline", {"from HBM": roof(W), "from VMEM": roof(vmem)}, "FLOPs/byte", "FLOPs/s", "Rooflines of a v5e, bf16",
    points={"matmul, D = F = 4096, B = 1, 4, 16, ..., 4096": [(op.intensity, op.attained) for op in matmuls]},
    marks=[("x", C / W, f"C/W of HBM = {C / W:.0f}"), ("x", C / vmem, f"C/W of VMEM = {C / vmem:.0f}")],
)  # fmt: skip
rows = [
    (B, f"{op.intensity:.1f}", *(cost.roofline(op.flops, op.nbytes, C, bw).bound for bw in (W, vmem)))
    for B, op in zip(batches, matmuls, strict=True)
]
page.table(rows, ["B", "FLOPs/byte", "from HBM", "from VMEM"])

# %% [markdown]
# Question 3 asks for such a plot by batch, with the weights in int8. Each line is level from its critical batch on. The
# smaller matrix needs a larger batch for that, because its activations are a larger part of the bytes.

# %%
mixed = ("bf16", "int8", "bf16")  # activations, weights, output: Questions 2 and 3
knees = {side: cost.critical_batch(C, W, side, side, mixed) for side in (4096, 1024)}
series = {
    f"D = F = {side}": [(B, cost.matmul(B, side, side, C, W, dtypes=mixed).attained) for B in (*range(1, 512), knee)]
    for side, knee in knees.items()
}
page.chart(
    "question-3", series, "batch in tokens", "FLOPs/s", "Question 3: int8 weights, bf16 activations, on a v5e",
    marks=[("x", knee, f"B = {knee:.0f}") for knee in knees.values()], log=False,
)  # fmt: skip

# %% [markdown]
# ## Matrix multiplication
# The most important operation gets a rule of thumb. A matmul of activations [B, D] and weights [D, F] does 2BDF FLOPs.
# In bf16 it moves 2 bytes for each of the DF weights, and for the BD + BF activations, which hardly count if B is much
# smaller than D and F. Its intensity is then B, so the critical batch is C/W: 240 tokens on a v5e, 295 on an H100. That
# is the batch of one copy of the weights: more chips that share them bring more FLOPs/s and more bytes/s alike.
#
# With finite D and F the activations count as well, and the batch B* from which FLOPs take longer must be larger; with
# small ones it must be much larger. In the title's formula w, a and o are the bytes of a number in the weights, the
# activations and the output, 2 each in bf16.

# %%
page.title("Critical batch of a bf16 matmul, B* = wDF / (2DF W/C - aD - oF)")
rows = []
for D, F in ((1024, 1024), (4096, 4096), (8192, 8192), (8192, 32768), (10**8, 10**8)):
    exact = [cost.critical_batch(hw.flops(), hw.hbm_bw, D, F) for hw in (V5E, H100)]
    rows.append((D, F, f"{cost.matmul(240, D, F, C, W).intensity:.1f}", *(f"{B:.1f}" for B in exact)))
page.table(rows, ["D", "F", "intensity at B = 240", "B*, v5e", "B*, H100"])

# %% [markdown]
# ## Network communication rooflines
# The same reasoning holds for the network. Two chips each hold half of D, multiply their halves, and exchange the
# partial sums. Each computes BDF FLOPs and sends the BF numbers of its sum, 2BF bytes, so the intensity is D/2: B and F
# are in both. Compare the rows of both batches: D decides which side binds, and B does not matter.

# %%
link = V5E.need("link_bw")
X, Y = torch.randn(8, 64, dtype=torch.float64), torch.randn(64, 16, dtype=torch.float64)
Z0, Z1 = X[:, :32] @ Y[:32], X[:, 32:] @ Y[32:]
page.title("Two v5e which share the contraction, F = 8192")
rows = []
for B in (16, 1024):
    for D in (4096, 8192, 8756, 16384):
        op = cost.split_contraction(B, D, 8192, C, link)
        rows.append((B, D, f"{1e6 * op.math:.1f}", f"{1e6 * op.comms:.1f}", op.bound))
page.table(rows, ["B", "D", "T_math us", "T_comms us", "bound by"])
whole = page.check("the two halves add up to the whole", torch.allclose(Z0 + Z1, X @ Y, rtol=1e-12))
page.say(f"the two halves add up to the whole: {whole}")


def least_D(hw) -> int:
    """Return the smallest D from which two chips are compute-bound, at B = 16."""

    def computes(D: int) -> bool:
        return cost.split_contraction(16, D, 8192, hw.flops(), hw.need("link_bw")).bound == "compute"

    return 1 + bisect_left(range(1, 2**20), True, key=computes)


# %% [markdown]
# ## The numbers of the text, and the problems
# The last column is the verdict. "rounding" means that the book rounded or truncated on the way; "ours" means that the
# book gives no number. MXU and VPU are the two units of a TPU that compute, for products of matrices and for all else.

# %%
v5p, v6e, h100_flops = chip("v5p"), chip("v6e", "part1"), H100.flops()
vector = v5p.vector_alus * v5p.clock / (v5p.hbm_bw / v5p.cores)
tiled = cost.tiled_matmul(1024, 2**20, 1024, (128, 512, 256), C, W)
page.answers([
    Answer("1e12 FLOPs on an H100", "1.01", 1e3 * cost.roofline(1e12, 0, h100_flops, W).math, "ms"),
    Answer("1e12 FLOPs on a v6e", "1.1", 1e3 * cost.roofline(1e12, 0, v6e.flops(), W).math, "ms"),
    Answer("1e12 FLOPs on a v6e with the 9.2e14 FLOPs/s of Part 2's table", "",
           1e3 * cost.roofline(1e12, 0, chip("v6e").flops(), W).math, "ms", "this part has 9.1e14"),
    Answer("Critical intensity of v5e's MXU", "240", V5E.intensity("hbm"), "FLOPs/B"),
    Answer("Intensity of a dot product, N = 2^20 (large N)", "0.5", operations(C, W)["dot product, 2^20"].intensity,
           "FLOPs/B"),
    Answer("Critical intensity of v5p's VPU", "3", vector, "FLOPs/B", erratum=
           "a core's 7.2e12 FLOPs/s over half of 2.8e12 bytes/s; 3 is one core's over the whole chip's bandwidth"),
    Answer("A bf16 matmul on a v5e is compute-bound from B =", "240", cost.critical_batch(C, W), "tokens"),
    Answer("A bf16 matmul on an H100 ('closer to 300')", "300", cost.critical_batch(h100_flops, H100.hbm_bw), "tokens"),
    Answer("512 sequences of 4096 tokens on 2048 GPUs", "1e3",
           math.prod(parse("t[B_X, T_C]").local_shape({"B": 512, "T": 4096}, {"X": 512, "C": 4})), "tokens"),
    Answer("FLOPs/B of a matmul by tiles of 128 x 512 and 512 x 256", "", tiled.intensity, "FLOPs/B",
           "tends to bm bn/(bm + bn) = 85.33 as k grows; here k = 2^20"),
    Answer("Two chips: C/W of a v5e's link", "4377", C / link, "FLOPs/B"),
    Answer("Two chips are compute-bound from D =", "8755", least_D(V5E), "", "for any B, see the table above"),
])  # fmt: skip

# %% [markdown]
# Now the book's worked problems. 1.1 and 1.2 count the bytes and operations of real tensors; the other rows compare our
# answer with the book's.

# %%
int8 = V5E.flops("int8")
q1 = cost.matmul(100, 4096, 4096, int8, W, "int8")
X, Y = torch.ones(2, 3, dtype=torch.int8), torch.ones(3, 5, dtype=torch.int8)
Z = X @ Y
each = cost.roofline(2 * 64 * 8192**2, 64 * 8192 + 64 * 8192**2 + 64 * 8192, int8, W)
page.say()
page.same([
    ("1.1 bytes of int8[2, 3] int8[3, 5]", "BD + DF + BF", X.nbytes + Y.nbytes + Z.nbytes,
     cost.matmul(2, 3, 5, int8, W, "int8").nbytes),
    ("1.2 operations of it: 2 for each of its terms", "2BDF", 2 * int(Z.sum()), cost.matmul(2, 3, 5, int8, W).flops),
], ["question", "the book's", "of real tensors", "ours"])  # fmt: skip
page.answers([
    Answer("1.3 critical intensity in int8", "480", int8 / W, "OPs/B"),
    Answer("1.3 int8 matmul: compute-bound from B =", "240", cost.critical_batch(int8, W, dtypes="int8"), "tokens"),
    Answer("1.4 int8, B = 100, D = F = 4096: at least", "", 1e6 * q1.lower, "us",
           f"max(T_math, T_comms): bound by {q1.bound}"),
    Answer("1.4 at most", "", 1e6 * q1.upper, "us", "T_math + T_comms"),
    Answer("2 int8 weights, bf16 FLOPs: compute-bound from B =", "120", cost.critical_batch(C, W, dtypes=mixed),
           "tokens"),
    Answer("3 corner of the plot, D = F = 4096", "", knees[4096], "tokens",
           "wDF / (2DF W/C - aD - oF) with a = o = 2, w = 1 byte; about 136 in the book's figure"),
    Answer("3 corner of the plot, D = F = 1024", "", knees[1024], "tokens", "almost twice 120, as the book says"),
    Answer("4 a matrix for each row of the batch: intensity, D = F = 8192", "2", each.intensity, "OPs/B"),
    Answer("4 and so it is bound by", "comms", each.bound),
    Answer("5 bf16 on an H100: compute-bound from B =", "295", cost.critical_batch(h100_flops, H100.hbm_bw), "tokens"),
])  # fmt: skip

# %% [markdown]
# ## This machine
# The model can be tested on any machine. First a matmul and an add measure its FLOPs/s and bytes/s; then matmuls of
# five batches are timed and compared with their two bounds. In the last column, a value near 1 means that the roofline
# explains the time. A larger value means that the machine attains neither of its two measured rates: small products use
# its units badly, or the two do not overlap.


# %%
def fastest(fn, device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest of as many calls as fit in `seconds`."""

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


def measure(device: torch.device, budget: float) -> tuple[float, float, list]:
    """Return (FLOPs/s of a square matmul, bytes/s of an add, matmuls by batch as (B, its roofline, seconds))."""
    gpu = device.type == "cuda"
    dtype, side, length = (torch.bfloat16, 4096, 2**28) if gpu else (torch.float32, 768, 2**24)
    square = torch.randn(side, side, device=device, dtype=dtype)
    C = 2 * side**3 / fastest(lambda: square @ square, device, budget)
    a, b = (torch.zeros(length, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    W = 3 * a.nbytes / fastest(lambda: torch.add(a, b, out=out), device, budget)
    D = 4 * side
    weights, found = torch.randn(D, D, device=device, dtype=dtype), []
    for B in (1, 4, 16, 64, 256):
        x = torch.randn(B, D, device=device, dtype=dtype)
        found.append((B, cost.matmul(B, D, D, C, W, dtype), fastest(lambda x=x: x @ weights, device, budget / 2)))
    return C, W, found


reached, moved, found = measure(torch.device(page.args.device), 0.02 if page.small else 0.15)
page.title(f"This machine, {page.args.device}: {format_number(reached)} FLOPs/s, {format_number(moved)} bytes/s")
rows = []
for B, op, seconds in found:
    us = [f"{1e6 * t:,.0f}" for t in (op.lower, op.upper, seconds)]
    rows.append((B, f"{op.intensity:.1f}", op.bound, *us, f"{seconds / op.lower:.2f}"))
page.table(rows, ["B", "FLOPs/byte", "bound by", "lower us", "upper us", "measured us", "measured / lower"])
page.say(f"critical intensity {reached / moved:.1f} FLOPs/byte")
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `mixed = ("bf16", "int8", "bf16")` by `mixed = ("bf16", "int4", "bf16")`. From which batch on is a
#    matmul with int4 weights compute-bound, and why does Question 2 then say DIFFERS?
#    Answer: From about 60 tokens on, half of the 120 of int8, because the weights have half of the bytes and the FLOPs
#    are the same. The row compares our 60 with the book's 120, which is for int8.
# 2. Question: from which D on are two v6e compute-bound, which have twice the bandwidth and 4.7 times the FLOPs/s?
#    Evaluate `least_D(chip("v6e"))`.
#    Answer: From 20,445 on, 2 C/W of a link: 2 x 9.2e14 / 9e10. The FLOPs have grown faster than the links, so the
#    contraction must be longer.
# 3. Flag: run with `--plot roofline.svg`. Both pictures are written: where do the two roofs meet?
#    Answer: At the corner of HBM's roof, 240 FLOPs per byte. From there on both are level at the chip's 1.97e14
#    FLOPs/s, and a faster memory would not help.
