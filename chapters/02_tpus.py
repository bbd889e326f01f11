# %% [markdown]
"""Part 2, How to Think About TPUs: the units a TPU computes with, and how data streams through them.
https://jax-ml.github.io/scaling-book/tpus

This chapter reads the specifications as data, streams a matmul through VMEM chunk by chunk, runs a systolic array cycle
by cycle, adds up registers as the vector unit does, and answers Questions 1 to 4. How chips are joined is the subject
of 02_networking.py.
"""

# %%
import math
from bisect import bisect_left

import torch

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.layout import beside, format_number, width
from scaling.book.page import Page
from scaling.hardware import Chip, chip, chips, systolic
from scaling.show import bars, svg
from scaling.show.bars import Bar

page = Page(__doc__, plot=True)
V5E, V5P, V6E = chip("v5e"), chip("v5p"), chip("v6e")

# %% [markdown]
# ## The parts of a TPU
# A TPU is a machine for products of matrices, with memory around it. Its core has a unit that multiplies matrices, the
# MXU; a unit for everything else, such as adding vectors or a ReLU, the VPU; and a memory of its own, VMEM, which is
# small and very fast. Arrays are stored in HBM, the chip's large memory. They pass through VMEM, because neither unit
# can read HBM. So a TPU is simple to reason about: an operation is as slow as the slowest part of this path.

# %% tags=["hide-input"]
path = [("host", V5E.pcie_bw), (f"HBM {V5E.hbm_bytes / 1e9:.0f} GB", V5E.hbm_bw),
        (f"VMEM {V5E.sram_bytes / 2**20:.0f} MiB", V5E.sram_bw)]  # fmt: skip
drawn = "".join(f"{place}  --{format_number(rate)}->  " for place, rate in path)
page.title("A v5e: the path of an array, in bytes/s")
page.say(f"{drawn}MXU {format_number(V5E.flops())} FLOPs/s")

# %% [markdown]
# ## TPU specs
# The table has a row for each generation: the largest pod and the chips of one host, as lengths of axes; the memory;
# and the FLOPs/s. The last column, C/W, says how many bf16 FLOPs each byte from HBM must be used for if the chip is to
# be compute-bound. It does not grow with every generation: v5p has faster memory for its FLOPs than v4p, and v6e needs
# the most.


# %%
def cells(*values) -> list[str]:
    return [format_number(value) if value else "-" for value in values]


def size(lengths) -> str:
    return "x".join(map(str, lengths)) if lengths else "-"


tpus = [hw for hw in map(chip, chips()) if "Part 2" in hw.source]
page.title("TPU specs, a chip: bytes, bytes/s, FLOPs/s")
rows = [
    (hw.name, size(hw.pod), size(hw.host), *cells(hw.hbm_bytes, hw.hbm_bw, hw.flops(), hw.flops("int8")),
     f"{hw.intensity('hbm'):.0f}")
    for hw in tpus
]  # fmt: skip
page.table(rows, ["TPU", "pod", "host", "HBM", "HBM/s", "bf16", "int8", "C/W"])

# %% [markdown]
# ## Streaming: HBM -> VMEM -> MXU -> VMEM -> HBM
# A matmul that is too large for VMEM passes through it in chunks. Two units work at the same time: HBM, which loads a
# chunk or stores a result, and the core. A chunk waits in one of `buffers` slots in VMEM. With one slot, the next load
# waits until the chunk before it has been computed and stored. With two (double buffering), it arrives while the core
# computes.


# %%
def streamed(chunks: int, load: float, compute: float, store: float, buffers: int = 2, first: float = 0.0) -> list[Bar]:
    """Return the time line of both units: L, C and S are loads, computations and stores, with the chunk's number.

    `load`, `compute` and `store` are the seconds of each; loading X takes `first` seconds before all of them.
    """
    ran, hbm, core, computed = [Bar("HBM", "LX", 0.0, first)] if first else [], first, 0.0, []
    for i in range(chunks + buffers):
        if (done := i - buffers) >= 0:  # a slot is free once its chunk is stored
            start = max(hbm, computed[done])
            hbm = start + store
            ran.append(Bar("HBM", f"S{done}", start, hbm))
        if i < chunks:
            ran.append(Bar("HBM", f"L{i}", hbm, hbm + load))
            hbm += load
            start = max(hbm, core)
            core = start + compute
            ran.append(Bar("core", f"C{i}", start, core))
            computed.append(core)
    return ran


# %% [markdown]
# Here bf16 X[B, D] stays in VMEM, the weights arrive in panels of columns, and each panel's product is stored. With one
# buffer, HBM and core take turns, and the time is T_math + T_comms, the upper bound of Part 1. With two, the next panel
# arrives while the core multiplies, and the time is that of the slower unit, plus a little for the first and the last
# panel. The picture shows the first half of the time that one buffer takes. The gaps (dots in a terminal) show which
# unit waits: the core at B = 64, HBM at B = 512.

# %% tags=["hide-input"]
D, F, panels = 8192, 32768, 16
rows, drawn, lines = [], [], []
for B in (64, 512):
    op = cost.matmul(B, D, F, V5E.flops(), V5E.hbm_bw)
    load, store, first = (nbytes / V5E.hbm_bw for nbytes in (2 * D * F / panels, 2 * B * F / panels, 2 * B * D))
    for buffers in (1, 2):
        run = streamed(panels, load, op.math / panels, store, buffers, first)
        took = bars.end_of(run)
        picture = bars.text(run, width() - 7, op.upper / 2)
        title = f"B = {B}, {buffers} buffer{'s' * (buffers > 1)}"
        drawn.append(f"{title}\n{picture}")
        lines.append((title, [bar for bar in run if bar.start < op.upper / 2]))
        us = [f"{1e6 * t:,.1f}" for t in (op.lower, op.upper, took)]
        rows.append((B, buffers, op.bound, *us, *(f"{bars.busy(run, unit) / took:.0%}" for unit in ("HBM", "core"))))
        once = first + load + op.math / panels + store
        held = math.isclose(took, op.upper) if buffers == 1 else op.lower <= took <= op.lower + once
        page.check(f"B = {B}, {buffers} buffers: streamed in the time that the roofline says", held)
page.title(f"bf16[B, {D}] x bf16[{D}, {F}] on a v5e, {panels} panels: half of the time")
page.show("\n".join(drawn), lambda: svg.time_lines(lines, unit="in s"))
page.say("L loads a panel, C multiplies it, S stores the result.")
page.table(rows, ["B", "buffers", "bound by", "lower us", "upper us", "streamed us", "HBM busy", "core busy"])
X, weights = torch.randn(16, 64, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)
by_panels = torch.cat([X @ panel for panel in weights.chunk(panels, 1)], 1)
page.check("the panels' products are the product", torch.allclose(by_panels, X @ weights, rtol=1e-12))
held = 2 * (64 * D + 2 * (D + 64) * F / panels)
page.say(f"VMEM that two buffers take at B = 64: {held / 2**20:,.0f} of {V5E.sram_bytes / 2**20:.0f} MiB")

# %% [markdown]
# The book's animation shows a pointwise product, which the vector unit computes. For each multiplication HBM loads two
# numbers and stores one, so the core waits almost all of the time.

# %% tags=["hide-input"]
N, vpu = 2**26, V5P.cores * V5P.vector_alus * V5P.clock
op = cost.roofline(N, 3 * 2 * N, vpu, V5P.hbm_bw)
run = streamed(panels, 4 * N / panels / V5P.hbm_bw, op.math / panels, 2 * N / panels / V5P.hbm_bw)
page.title(f"bf16 x[N] * y[N] -> z[N] on a v5p, N = 2^26, {panels} chunks, 2 buffers")
took = bars.end_of(run)
half = [bar for bar in run if bar.start < took / 2]
page.show(bars.text(run, width() - 7, took / 2), lambda: svg.time_lines([("", half)], unit="in s"))
busy = bars.busy(run, "core") / took
share = f"HBM works {bars.busy(run, 'HBM') / took:.0%} and the core {busy:.0%}"
page.say(f"{1e6 * took:.1f} us; the first half is drawn. {share} of it")
page.check("a pointwise product takes as long as HBM does", math.isclose(took, op.comms))

# %% [markdown]
# ## Appendix B: the systolic array
# The MXU is a systolic array, a grid of cells that each multiply and add once in a cycle. That is why a TPU multiplies
# so fast: each cell passes its numbers on to its neighbours, and nothing goes back to a register in between. The price
# is that it does nothing else, and that a matrix which does not fill the grid wastes cells. Here X[2, 3] W[3, 3] runs
# on 3 x 3 cells. W stays in the cells; row k of the grid receives column k of X, one cycle later than the row above;
# partial sums move down. Each frame is one cycle t, and shows of each cell the row of X that is in it and the partial
# sum that leaves it (in a terminal, at the left and at the right). In the bottom row the products come out diagonally.

# %% tags=["hide-input"]
X, weights, frames = torch.arange(6.0).view(2, 3), torch.arange(9.0).view(3, 3), []
result = systolic.systolic_matmul(X, weights, 3, frames)
page.title("The row of X in each cell, and the partial sum that leaves it")
page.say(f"X = {X.int().tolist()}, W = {weights.int().tolist()}")
cells, pictures = [], []
for t, frame in enumerate(frames):
    both = zip(systolic.draw(frame), systolic.draw(frame, True), strict=True)
    cells.append("\n".join([f"t = {t}", *("   ".join(line) for line in both)]))
    inside = [[*zip(*line, strict=True)] for line in zip(*(grid.tolist() for grid in frame), strict=True)]
    named = [
        [(f"row {x}\n{total:g}", svg.colour(x, 2, 2)) if x >= 0 else ("", "") for x, total in line] for line in inside
    ]
    pictures.append((f"t = {t}", named))
page.show(beside(cells, gap=8), lambda: svg.grids(pictures, 180, 108))
page.say(f"X W = {result.out.int().tolist()}")
page.check("the array's outputs are X W", torch.equal(result.out, X @ weights))

# %% [markdown]
# To fill the array costs some cycles once, which do not matter if there are many rows. For M rows and m tiles of
# weights on n x n cells the formula is n + max(M, n) (m - 1) + M + 2n - 2: n to load the first weights, M for each tile
# (but at least n, in which the next weights arrive), and 2n - 2 for the last row to cross the grid. Dims that do not
# fill the array cost something in every cycle: the second table shows what share of the cells a padded matrix uses.

# %%
n = 8 if page.small else 32
page.title(f"2 x 2 tiles of weights on {n} x {n} cells: cycles by rows of X")
rows, weights = [], torch.randint(-4, 5, (2 * n, 2 * n)).double()
for M in (n // 4, n, 4 * n, 16 * n):
    X = torch.randint(-4, 5, (M, 2 * n)).double()
    run, formula = systolic.systolic_matmul(X, weights, n), systolic.cycles(M, 2 * n, 2 * n, n)
    right = page.check(f"{M} rows: product and cycles", torch.equal(run.out, X @ weights) and run.cycles == formula)
    rows.append((M, run.cycles, formula, f"{run.utilization:.1%}", right))
page.table(rows, ["rows of X", "cycles", "formula", "utilization", "right"])
page.title("Share of the array that a weight matrix [D, D] fills, padded")
rows = []
for D in (64, 128, 129, 256, 320, 8192):
    filled = [math.ceil(D / hw.mxu) * hw.mxu for hw in (V5E, V6E)]
    rows.append((D, *(f"{(D / side) ** 2:.0%} of {side}" for side in filled)))
page.table(rows, ["D", "128 x 128 (v5e)", "256 x 256 (v6e)"])

# %% [markdown]
# ## Appendix A: reductions in the vector unit
# The vector unit (VPU) does the same to all numbers of a register at once, but it has no instruction for their sum. It
# adds them up by shuffling. A register is f32[8, 128], 8 sublanes by 128 lanes. If one shuffles it by 4, 2 and 1
# sublanes and adds each time, every sublane has the sum of all after three shuffles. A sum over the lanes takes seven,
# in a slower unit that works across lanes (XLU), so one lays out arrays such that sums run over sublanes.


# %%
def add_up(register: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """Add up a dim by rolling it by a half, a quarter and so on; return the sum in every slot, and the rolls."""
    shuffles, shift = 0, register.shape[dim] // 2
    while shift:
        register, shuffles, shift = register + register.roll(shift, dim), shuffles + 1, shift // 2
    return register, shuffles


register = torch.arange(8.0 * 128).view(8, 128)
(over_sublanes, sublane_shuffles), (over_lanes, lane_shuffles) = add_up(register, 0), add_up(register, 1)
page.check("shuffles add up sublanes", torch.equal(over_sublanes, register.sum(0).expand(8, 128)))
page.check("and lanes", torch.equal(over_lanes, register.sum(1, keepdim=True).expand(8, 128)))
page.say(f"\n8 sublanes added up by {sublane_shuffles} shuffles, 128 lanes by {lane_shuffles}")

# %% [markdown]
# ## The numbers of the text
# The chip's FLOPs/s follow from its number of cells and its clock, and the cycles from the array that ran above.


# %%
def mxu_flops(hw: Chip) -> float:
    """Return FLOPs/s of one core's systolic arrays, where each cell multiplies and adds every cycle."""
    return 2 * hw.need("mxu") ** 2 * hw.need("mxus") * hw.need("clock")


def cycles_of_eight_rows(n: int) -> int:
    """Return the cycles that 8 more rows of X take once an n x n array is full, by the formula confirmed above."""
    return systolic.cycles(2 * n + 8, n, n, n) - systolic.cycles(2 * n, n, n, n)


per_cycle = {hw.name: 2 * 8 * hw.mxu**2 / cycles_of_eight_rows(hw.mxu) for hw in (V5E, V6E)}
vpu, vmem_bw = V5P.vector_alus * V5P.clock, 22 * V5E.hbm_bw
page.answers([
    Answer("FLOPs/s of one MXU of a v5e", "5e13", mxu_flops(V5E) / V5E.mxus, "FLOPs/s", "2 x 128 x 128 x 1.5 GHz"),
    Answer("FLOPs/s of a v5e, from its four MXUs", "2e14", mxu_flops(V5E), "FLOPs/s"),
    Answer("Cycles of bf16[8,128] @ bf16[128,128]", "8", cycles_of_eight_rows(V5E.mxu), "cycles"),
    Answer("FLOPs/s of a v5p, from MXUs, cores and clock", "4.59e14", V5P.cores * mxu_flops(V5P), "FLOPs/s"),
    Answer("FLOPs/s of a core of v5p", "2.5e14", V5P.flops() / V5P.cores, "FLOPs/s", rounded=
           (5e14 / V5P.cores, "5e14 for the chip's 4.59e14")),
    Answer("FLOPs/s of a pod of v5p ('4 exaFLOPs/s')", "4e18", V5P.pod_chips * V5P.flops(), "FLOPs/s"),
    Answer("Multiply-adds/s of a TPU's systolic arrays", "200e12", V5P.flops() / 2, "per s", "of a v5p, two FLOPs each",
           hedged="around 200 trillion"),
    Answer("Intensity that VMEM asks for (10 to 20)", "11", V5E.flops() / vmem_bw, "FLOPs/B", "22 times HBM's speed"),
    Answer("Vector FLOPs/s of a v5p core (pop quiz)", "7e12", vpu, "FLOPs/s", "8 x 128 x 4 at 1.75 GHz"),
    Answer("MXU over VPU, v5p core", "30", V5P.flops() / V5P.cores / vpu, "times"),
    Answer("Vector registers of a v5p core, 64 of f32[8, 128]", "256", torch.empty(64, 8, 128).nbytes / 2**10, "KiB"),
    Answer("Shuffles that add up 8 sublanes", "3", sublane_shuffles, "", "counted above"),
    Answer("FLOPs a cycle of v6e's array over v5e's", "4", per_cycle["v6e"] / per_cycle["v5e"], "times"),
])  # fmt: skip

# %% [markdown]
# ## Worked problems
# Question 1 asks how long a model takes to read its params once, Question 2 for the size of pods. Question 3 asks from
# which batch on a product is compute-bound whose weights come over PCIe from the host. It has a caveat: the book's rule
# for B << D ignores what the activations cost, and with D = 8192 no batch at all would be enough. Questions 5 and 6 are
# in 02_networking.py.

# %%
q1, q3, pcie = chip("v4p", "part2"), chip("v6e", "part2"), chip("v6e").pcie_bw
read = [1e3 * 2 * 200e9 / 32 / bw for bw in (q1.hbm_bw, chip("v4p").hbm_bw)]
least = 1 + bisect_left(  # the smallest D = F/4 for which some batch is enough
    range(1, 2**20), True, key=lambda D: math.isfinite(cost.critical_batch(q3.flops(), q3.pcie_bw, D, 4 * D))
)
page.answers([
    Answer("1 reading 200B params in bf16 from 32 v4p", "10", read[0], "ms", f"{read[1]:.1f} with the table's HBM/s"),
    Answer("2 hosts of a v5e pod", "32", V5E.pod_chips / V5E.host_chips),
    Answer("2 TensorCores of a v5e pod", "256", V5E.pod_chips * V5E.cores),
    Answer("2 FLOPs/s of a v5e pod", "5.1e16", V5E.pod_chips * V5E.flops(), "FLOPs/s",
           rounded=(V5E.pod_chips * 2e14, "2e14 for a chip's 1.97e14")),
    Answer("2 HBM of a v5e pod", "4", V5E.pod_chips * V5E.hbm_bytes / 1e12, "TB"),
    Answer("2 hosts of a v5p pod", "2,240", V5P.pod_chips / V5P.host_chips),
    Answer("2 TensorCores of a v5p pod", "17,920", V5P.pod_chips * V5P.cores),
    Answer("2 FLOPs/s of a v5p pod", "4.1e18", V5P.pod_chips * V5P.flops(), "FLOPs/s"),
    Answer("2 HBM of a v5p pod", "860", V5P.pod_chips * V5P.hbm_bytes / 1e12, "TB"),
    Answer("3 a v6e over PCIe of 1.6e10 bytes/s is compute-bound from B =", "57,500",
           cost.critical_batch(q3.flops(), q3.pcie_bw), "tokens"),
    Answer("3 the same over v6e's own PCIe", "", cost.critical_batch(q3.flops(), pcie), "tokens",
           f"the table has {format_number(pcie)} bytes/s"),
    Answer("3 no batch is enough unless D = F/4 is at least", "", least, "",
           "exactly, B is not small against D: D > 5/4 C/W, so at D = 8192 PCIe always binds"),
])  # fmt: skip

# %% [markdown]
# In Question 4 the weights of an int8 matmul are read from HBM, or are in VMEM already. VMEM is many times faster, so
# from there a much smaller batch is compute-bound: the chart's line bends further left.

# %%
int8, hbm = V5E.flops("int8"), V5E.hbm_bw
token, two = (cost.matmul(B, 4096, 16384, int8, hbm, "int8") for B in (1, 2))
row = two.nbytes - token.nbytes  # bytes that one more token reads and writes; the rest are the weights
q4 = {W: cost.critical_batch(int8, W, 4096, 16384, "int8") for W in (hbm, vmem_bw)}
batches = (*range(1, 64), *range(64, 2049, 64), *q4.values())
page.chart(
    "question-4",
    {name: [(B, cost.matmul(B, 4096, 16384, int8, W, "int8").lower) for B in batches]
     for name, W in (("from HBM", hbm), ("from VMEM", vmem_bw))},
    "batch in tokens", "seconds", "Question 4: int8[B, 4096] x int8[4096, 16384] on a v5e",
    marks=[("x", B, f"B = {B:.0f}") for B in q4.values()], height=12,
)  # fmt: skip
page.answers([
    Answer("4 operations a token", "1.3e8", token.flops, "OPs"),
    Answer("4 bytes of the weights", "6.7e7", token.nbytes - row, "bytes"),
    Answer("4 bytes of activations a token", "2e4", row, "bytes"),
    Answer("4.1 from HBM: compute-bound from B =", "267", q4[hbm], "tokens", rounded=(
        6.7e7 / hbm / (1.3e8 / int8 - 2e4 / hbm), "6.7e7, 2e4 and 1.3e8 for the numbers above")),
    Answer("4.2 from VMEM: compute-bound from B =", "11", q4[vmem_bw], "tokens"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `D, F, panels = 8192, 32768, 16` by `D, F, panels = 8192, 32768, 4`. What does a double buffer of
#    larger panels cost in VMEM, and why is less of the time hidden?
#    Answer: 259 MiB, which is more than the 128 MiB of VMEM, so it cannot run. Less is hidden because nothing overlaps
#    with the first load nor with the last product, and both are now four times as long: at B = 512 the core is busy
#    for 88% of the time, where it was 96%.
# 2. Question: how long do 64 rows through 4 x 4 tiles of weights take on 128 x 128 cells, against 16 times one tile?
#    Evaluate `systolic.cycles(64, 512, 512, 128)`.
#    Answer: 2,366 cycles against 7,136: the array is filled and emptied once and not for each tile.
# 3. Flag: run with `--plot q4.svg`. From which batch on does the product take longer than loading the weights?
#    Answer: From B = 259 on if they come from HBM, and from B = 11 on if they are in VMEM: the two marks of the chart.
