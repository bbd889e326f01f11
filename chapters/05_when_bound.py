# %% [markdown]
"""Part 5, How to Parallelize a Transformer for Training: when is each strategy bound by communication?
https://jax-ml.github.io/scaling-book/training

This chapter counts a layer's FLOPs and bytes, computes the batch from which each strategy is compute-bound, draws both
figures, and checks the recipe for a pod and the problems. Collectives over two mesh axes overlap, so the longer one
counts (the book of 2026); in the edition of 2025 their times were added. The strategies themselves run in 05_dp.py,
05_fsdp.py, 05_tp.py and 05_fsdp_tp.py.
"""

# %% [markdown]
# ## Why ask when communication binds?
# One adds chips so that a step takes less time. With N times as many chips each has 1/N of the products to compute, but
# not 1/N of the bytes to send. As long as the products take longer than the collectives, these can hide behind them and
# every further chip pays. Beyond that point chips wait. Each strategy reaches this point at another batch, so the batch
# and the number of chips decide which strategy one can use.
#
# The letters are those of the book: B is the tokens of the whole batch, D the width of the stream, F the hidden width
# of a layer, which has two matrices of D x F. N chips form a mesh of X for data and Y for tensors. C is a chip's
# FLOPs/s, W the bytes/s that it has along one axis of the torus, in both directions together, and M_X, M_Y are the
# numbers of torus axes over which X and Y lie.

# %%
import re
from bisect import bisect_left

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.listing import both_passes
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost.transformer import num_params, params, rule_of_thumb
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import Log

page = Page(__doc__, plot=True)

# %% [markdown]
# ## FLOPs and bytes of a layer
# These are the strategies. Each is a choice of types for the input, the two weights and the output.

# %%
STRATEGIES = {  # its code, the cost model's name, its axes, FLOPs forward and backward, bytes forward and backward
    "DP": (data_parallel, "dp", "X", "4BDF/X", "8BDF/X", "0", "8DF"),
    "FSDP": (fsdp, "fsdp", "X", "4BDF/X", "8BDF/X", "4DF", "8DF"),
    "TP": (tensor_parallel, "tp", "Y", "4BDF/Y", "8BDF/Y", "4BD", "4BD"),
    "FSDP+TP": (fsdp_tp, "fsdp_tp", "XY", "4BDF/(XY)", "8BDF/(XY)", "4BD/X + 4DF/Y", "4BD/X + 8DF/Y"),
}
page.say()
page.table([(name, "{In} * {W_in} * {W_out} -> {Out}".format(**code.SPECS)) for name, (code, *_) in STRATEGIES.items()],
           ["strategy", "formula"])  # fmt: skip

# %% [markdown]
# The book's Takeaways have a formula for the FLOPs of a chip and the bytes that its collectives move, in bf16. Does the
# code do that? Each strategy's own forward and backward run on an abstract mesh, where arrays have a shape but no data,
# and their FLOPs and bytes are counted. An AllReduce is an AllGather and a ReduceScatter, so it counts twice.

# %%
SIZES = {"B": 16, "D": 12, "F": 40, "X": 4, "Y": 2}


def value(formula: str) -> float:
    """Evaluate a formula such as 4BD/X + 4DF/Y at SIZES, where adjacent letters are multiplied."""
    return eval(re.sub(r"(?<=\w)(?=[A-Z])", "*", formula), dict(SIZES))


def over(axis: str, log: Log) -> int:
    """Return the bytes that collectives move over an axis."""
    return Log([event for event in log.events if event.axes == (axis,)]).book_bytes


# %% [markdown]
# Every row must agree, also with `scaling.cost`, which computes all times below. The book has two errata here. Its
# table has 8BD/X for the backward of FSDP + TP. And it says that FSDP "saves on backward pass FLOPs", although its rows
# equal DP's: FSDP saves memory.

# %%
rows = []
for name, (code, model, axes, *formulas) in STRATEGIES.items():
    ways = {axis: SIZES[axis] if axis in axes else 1 for axis in "XY"}
    logs = both_passes(code, SIZES, AbstractMesh(ways))
    for direction, log, flops, nbytes in zip(("forward", "backward"), logs, formulas[:2], formulas[2:], strict=True):
        rows.append((f"{name} {direction}, FLOPs", flops, value(flops), log.flops))
        rows.append((f"{name} {direction}, bytes", nbytes, value(nbytes), log.book_bytes))
        modelled = cost.layer_bytes(model, cost.LayerShape(*(SIZES[dim] for dim in "BDF")), **ways, direction=direction)
        page.check(f"{name} {direction}: the cost model's", modelled == {axis: over(axis, log) for axis in "XY"})
page.title("One layer on a chip, " + ", ".join(f"{letter}={n}" for letter, n in SIZES.items()))
page.same(rows, ["what", "formula", "value", "counted"])
over_Y = [over("Y", log) / value("BD/X") for log in logs]  # logs of the last strategy, FSDP+TP
page.answers([
    Answer("Table, FSDP+TP: forward bytes over Y / (BD/X)", "4", over_Y[0], "", "counted"),
    Answer("Table, FSDP+TP: backward bytes over Y / (BD/X)", "8", over_Y[1], "", erratum=
           "the algorithm gathers dOut and scatters dIn: 4 (6 if In is gathered again), as in the row of TP"),
])  # fmt: skip

# %% [markdown]
# ## Thresholds
# A threshold is where the matmuls take as long as the collectives. DP and FSDP use all axes of the torus, TP one.
# FSDP+TP has one axis for TP and the others for FSDP. Pods are joined by the slow network, and their threshold counts
# the tokens of a whole pod, or slice. Look at how far FSDP+TP goes below FSDP alone, and at v6e, which has 4.7 times
# the FLOPs of a v5e and twice its links: a faster chip with the same links needs a larger batch. The most important
# number is 850 tokens a chip of a v5p: it decides on how many chips a run can be spread.

# %%
page.title("Compute-bound if ..., F = 28672")
rows = []
for name in ("v4p", "v5p", "v5e", "v6e"):
    hw = chip(name)
    alpha, axes, peak, dcn = hw.intensity("ici"), hw.axes, hw.flops("bf16"), hw.need("dcn_bw")
    W_X, W_Y = hw.bandwidth("ici", axes=max(1, axes - 1)), hw.bandwidth("ici", axes=1)
    mixed = [cost.mixed_threshold(28672, peak, W_X, W_Y, overlap) for overlap in ("max", "sum")]
    limits = (alpha, alpha / axes, cost.tensor_limit(28672, peak, W_Y), *mixed, cost.pod_threshold(peak, dcn))
    rows.append((name, axes, *(f"{limit:,.0f}" for limit in limits)))
page.table(rows, ["chip", "axes", "C/W_ici", "DP, FSDP:\nB/X >", "TP:\nY <", "FSDP+TP:\nB/N >",
                  "collectives\nadding up\n(2025)", "pods:\nB/slice >"])  # fmt: skip

V5P = chip("v5p")
C, ALPHA = V5P.flops("bf16"), V5P.intensity("ici")  # 2550 FLOPs per byte of one ICI axis
W = {axes: V5P.bandwidth("ici", axes=axes) for axes in (1, 2, 3)}  # bytes/s of collectives over so many torus axes
ALONE = cost.data_threshold(C, W[3])  # tokens per chip
TORUS = C, W[2], W[1]  # FSDP on two of its axes, TP on one
flops, chips = 6 * 15e12 * 70e9, 16e6 / ALONE
page.answers([
    Answer("DP: largest model with Adam on a v5p ('roughly 9B')", "9e9", cost.largest_model(V5P.hbm_bytes), "params",
           "HBM / 10"),
    Answer("C / W_ici, one axis", "2550", ALPHA, "FLOPs/B"),
    Answer("DP, FSDP on three axes: smallest batch per chip", "850", ALONE, "tokens"),
    Answer("DP, FSDP: smallest batch of a whole pod", "7.6e6", V5P.pod_chips * ALONE, "tokens"),
    Answer("DeepSeek-V2, 40M tokens: chips", "47,000", 40e6 / ALONE, "v5p"),
    Answer("LLaMA-3 70B, 16M tokens: chips", "18,823", chips, "v5p"),
    Answer("FLOPs of LLaMA-3 70B, 15T tokens", "6.3e24", rule_of_thumb(get("llama3-70b"), 15e12), "FLOPs"),
    Answer("on those chips at 50% MFU", "17", cost.seconds_at(flops, chips, C, 0.5) / 86400, "days"),
])  # fmt: skip

# %% [markdown]
# Tensor parallelism is bound by Y alone. The batch does not matter, because it is a factor of both its FLOPs and its
# bytes. With FSDP + TP, a larger X makes FSDP's gathers longer and TP's shorter. At the best X both take the same time,
# and the smallest batch is lower than either strategy's own.


# %%
def layer(tokens: float, F: float, X: int, Y: int, axes_X: int, axes_Y: int) -> cost.Cost:
    """Return the cost of a layer's forward pass, D = 8192, on X x Y v5p: FSDP on so many torus axes, TP on so many."""
    name = "fsdp_tp" if X > 1 < Y else "fsdp" if X > 1 else "tp"
    links = cost.Links(C, X=W[axes_X] if axes_X else None, Y=W[axes_Y] if axes_Y else None)
    return cost.layer(name, cost.LayerShape(tokens, 8192, F), links, X, Y, "forward")


gated = 1.5 * get("gemma-7b").F
page.answers([
    Answer("TP: largest Y of LLaMA-3 70B, F = 30,000", "11", cost.tensor_limit(30e3, C, W[1]), "way"),
    Answer("TP 8-way of LLaMA-3 70B (F = 28672) is bound by", "compute", layer(1e6, 28672, 1, 8, 0, 1).bound),
    Answer("TP 16-way: bound by the collectives of", "Y", layer(1e6, 28672, 1, 16, 0, 1).bound),
    Answer("F that 8-way TP needs", "20,000", 8 * ALPHA),
    Answer("Gemma 7B, F = 50k: comms-bound from", "19", cost.tensor_limit(50e3, C, W[1]), "way"),
    Answer("Gemma 7B as it is, two up-projections of F = 24,576", "", cost.tensor_limit(gated, C, W[1]), "way",
           "3 matrices and one gather: 6BDF/Y against 4BD, so Y < 1.5 F W/C; 16-way is slightly comms-bound"),
    Answer("int8: C / W_ici", "5100", V5P.intensity("ici", "int8"), "OPs/B", "half the bytes, so TP's limit stays"),
    Answer("X_opt, N = 64, B = 48,000, F = 32768", "13.9", cost.mixed_optimum(48e3, 32768, 64, 2, 1), "",
           rounded=(cost.mixed_optimum(48e3, 32000, 64, 2, 1), "F = 32,000 for 32,768")),
    Answer("FSDP+TP, F = 32768: smallest batch per chip", "99", cost.mixed_threshold(32768, *TORUS), "tokens"),
    Answer("FSDP alone needs so many times as many", "8", ALONE / cost.mixed_threshold(32768, *TORUS), "times"),
    Answer("FSDP+TP in 2025, collectives adding up", "400", cost.mixed_threshold(32768, *TORUS, "sum"), "tokens"),
])  # fmt: skip

# %% [markdown]
# ## The first figure
# The first figure shows the time of the FLOPs over that of the collectives on 4x4x4 v5p, each strategy at its best. For
# FSDP the ratio grows with the batch, because the weights that it sends do not; for TP it is constant, because it sends
# activations; FSDP + TP sends both, and its ratio grows with the square root. A strategy is compute-bound above 1, so
# between about 100 and 850 tokens a chip only FSDP + TP is.

# %%
N, WIDE = 64, 30_000


def ratios(per_chip: float) -> dict[str, float]:
    """Return math over comms of a layer's forward pass on N chips, each strategy at its best (X need not be whole)."""
    tokens = per_chip * N
    one_strategy = {"FSDP": layer(tokens, WIDE, N, 1, 3, 0), "TP only": layer(tokens, WIDE, 1, N, 0, 3)}
    mixed = (per_chip / cost.mixed_threshold(WIDE, *TORUS)) ** 0.5
    return {name: found.math / found.comms for name, found in one_strategy.items()} | {"FSDP+TP": mixed}


least = cost.mixed_threshold(WIDE, *TORUS)
per_chip = sorted({least, ALONE, *range(20, 2001, 20)})
page.chart(
    "ratio", {name: [(b, ratios(b)[name]) for b in per_chip] for name in ratios(100)}, "tokens per chip",
    "FLOPs time / comms time", "4x4x4 v5p, F = 30k: compute-bound above 1", height=14,
    marks=[("y", 1, "ratio 1"), ("x", least, f"FSDP+TP: {least:.0f}"), ("x", ALONE, f"FSDP: {ALONE:.0f}")],
)  # fmt: skip

# %% [markdown]
# ## The second figure
# The second figure shows the seconds of a layer's forward pass on 16x16x16 v5p, for meshes of X x Y. A mesh is
# compute-bound where the line of the matmuls is above its own. The level part of a line is the gathers of weights,
# which do not depend on the batch, and the rising part the gathers of activations. With TP over one torus axis, 256 x
# 16 never is compute-bound.

# %%
MESHES = {"4096 FSDP": (4096, 1, 3, 0), "1024 x 4": (1024, 4, 2, 1), "512 x 8": (512, 8, 2, 1)}
MESHES |= {"256 x 16": (256, 16, 2, 1), "4096 TP": (1, 4096, 0, 3)}  # X, Y, and torus axes of each


def crossing(mesh: tuple[int, int, int, int]) -> float:
    """Return the batch in tokens from which the mesh is compute-bound, or inf if it never is."""
    never = 10**12
    first = bisect_left(range(1, never), True, key=lambda tokens: layer(tokens, 32768, *mesh).bound == "compute") + 1
    return first if first < never else float("inf")


turns = {name: crossing(mesh) for name, mesh in MESHES.items()}
corners = [x * 32768 * m_y / (y * m_x) for x, y, m_x, m_y in MESHES.values() if m_x and m_y]  # FSDP's bytes = TP's
batches = sorted({*(10 ** (1 + i / 10) for i in range(71)), *corners, *(t for t in turns.values() if t < 1e12)})
series = {name: [(b, layer(b, 32768, *mesh).comms) for b in batches] for name, mesh in MESHES.items()}
series["matmuls"] = [(b, layer(b, 32768, *MESHES["512 x 8"]).math) for b in batches]
page.chart(
    "time", series, "batch in tokens", "seconds of a layer",
    "16x16x16 v5p, D = 8192, F = 32768: communication, and the matmuls", height=16,
    marks=[("x", turns[name], f"{name}: {turns[name]:,.0f}") for name in ("512 x 8", "4096 FSDP")],
)  # fmt: skip

# %% [markdown]
# The book has two batches for one crossing: its caption has the one of the plotted 512 x 8, its text that of the best
# X.

# %%
page.answers([
    Answer("FSDP+TP on 4x4x4, F = 30k (figure): above 1 from", "100", least, "tokens"),
    Answer("TP only on 4x4x4 (figure): constant ratio", "", ratios(100)["TP only"], "", "3 F / (64 alpha)"),
    Answer("16x16x16, F = 32768: the best X is compute-bound from", "4e5",
           16**3 * cost.mixed_threshold(32768, *TORUS), "tokens"),
    Answer("the plotted 512 x 8 crosses the matmuls at (caption: 6e5)", "6e5", turns["512 x 8"], "tokens"),
    Answer("the plotted 512 x 8 crosses the matmuls at (text: 4e5)", "4e5", turns["512 x 8"], "tokens",
           erratum="4e5 is the best X of any real value, 319; no plotted curve has it"),
    Answer("256 x 16, 'the minimum', has the best X at batch", "", corners[2], "tokens",
           "X^2 F M_Y / (M_X N), fewer than 4e5: there it is bound by communication as well"),
    Answer("256 x 16 with M_Y = 1 is compute-bound from", "", str(turns["256 x 16"]), "tokens",
           f"never: its TP takes {16 / cost.tensor_limit(32768, C, W[1]):.2f} of the matmuls at any batch"),
])  # fmt: skip

# %% [markdown]
# The book has a recipe for a pod: 1M tokens on 8,192 chips, F = 30k. By the book's own formula, 1024 x 8 is bound by
# FSDP's gathers, and 512 x 16 by TP's. At the best X, 739 x 11, both are hidden.

# %%
recipe, wider = (layer(1e6, WIDE, X, Y, 2, 1) for X, Y in ((1024, 8), (512, 16)))
share = {axis: seconds / recipe.math for axis, seconds in recipe.axes}
page.answers([
    Answer("recipe of a pod: 1M tokens, X = 1024, Y = 8 is bound by", "compute", recipe.bound, "", erratum=
           f"FSDP takes {share['X']:.2f} and TP {share['Y']:.2f} of the matmuls' time"),
    Answer("recipe of a pod: FSDP's gathers over the matmuls", "", share["X"], "times",
           "1024 C / (1e6 W), W of two axes"),
    Answer("recipe with 512 x 16: the longer of both over the matmuls", "", wider.comms / wider.math,
           "times", "TP binds"),
    Answer("recipe at the best X of 8,192 chips", "", cost.mixed_optimum(1e6, WIDE, 8192, 2, 1), "", "sqrt(2 B N / F)"),
    Answer("recipe at the best X: the longer of both over the matmuls", "",
           (8192 / 1e6 * cost.mixed_threshold(WIDE, *TORUS)) ** 0.5, "times", "hidden"),
])  # fmt: skip

# %% [markdown]
# ## The problems: LLaMA-2 13B
# How would one train LLaMA-2 13B on 16x16x16 v5p with 3M tokens? The problems compute its params, the memory of Adam's
# state and of activations, and the strategy. Question 4 of the 2025 edition asks the same for 1M and 10M tokens.

# %%
m13 = get("llama2-13b")
p13, widths = params(m13), [m13.D, m13.F, m13.F]
state = cost.training_memory(13e9, grad_bytes=0)
kept = {tokens: cost.checkpoint_bytes(tokens, widths, m13.L) for tokens in (16e6, 3e6)}
slice_, length, yes = 16**3, 2**15, {True: "yes", False: "no"}
limits = {"FSDP": ALONE, "FSDP+TP": cost.mixed_threshold(m13.F, *TORUS)}  # tokens per chip
chosen = {tokens: next(name for name, limit in limits.items() if tokens / slice_ > limit) for tokens in (1e6, 3e6, 1e7)}
page.answers([
    Answer("1 FFW params", "8.5e9", p13["mlp"], "params"),
    Answer("1 attention params", "4.2e9", p13["attention"], "params"),
    Answer("1 vocabulary params", "0.33e9", p13["vocab"], "params"),
    Answer("1 LLaMA-2 13B", "13.0e9", num_params(m13), "params"),
    Answer("2 params and Adam's state", "130e9", state.total, "bytes"),
    Answer("2 activations, 3 checkpoints a layer, 16M tokens", "42e12", kept[16e6], "bytes"),
    Answer("3 HBM of 16x16x16", "393e12", slice_ * V5P.hbm_bytes, "bytes"),
    Answer("3 sequences of 32k in 3M tokens", "96", 3 * 2**20 / length, "sequences"),
    Answer("3.1 pure DP fits", "no", yes[state.total <= V5P.hbm_bytes], "", "130 GB on each chip of 96 GB"),
    Answer("3.2 checkpoints of 3M tokens", "7.86e12", kept[3e6], "bytes"),
    Answer("3.2 memory in all", "8e12", kept[3e6] + state.total, "bytes"),
    Answer("3.2 memory per chip", "", (kept[3e6] + state.total) / slice_, "bytes", "all of it over 4096"),
    Answer("3.2 smallest batch of pure FSDP", "3.48e6", slice_ * ALONE, "tokens"),
    Answer("3.2 pure FSDP is compute-bound", "no", yes[chosen[3e6] == "FSDP"], "", "3M < 3.48M"),
    Answer("3.3 FSDP+TP: smallest batch per chip", "235", limits["FSDP+TP"], "tokens"),
    Answer("3.3 FSDP+TP is compute-bound", "yes", yes[chosen[3e6] == "FSDP+TP"], "", f"{3e6 / slice_:.0f} a chip"),
    Answer("3.3 X_opt", "1333", cost.mixed_optimum(3e6, m13.F, slice_, 2, 1), "", "1024 x 4"),
    Answer("3.3 seconds a step at 40% MFU", "0.3", cost.seconds_at(6 * 3e6 * 13e9, slice_, C, 0.4), "s"),
    Answer("4 (2025 edition) 1M tokens are compute-bound by", "", chosen[1e6], "",
           f"{1e6 / slice_:.0f} a chip: just above the threshold, if the collectives of both axes overlap"),
    Answer("4 (2025 edition) 10M tokens are compute-bound by", "", chosen[1e7], "", f"{1e7 / slice_:.0f} a chip"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `((1024, 8), (512, 16))` by `((739, 11), (512, 16))`. Is the recipe compute-bound now, and why does
#    its row DIFFER?
#    Answer: Yes: the gathers over X and Y both take less time than the matmuls. The row says DIFFERS because it is
#    marked as an erratum, which must not agree with the book.
# 2. Question: how many tokens a chip does FSDP + TP need for LLaMA-3 405B, F = 53,248? Evaluate
#    `cost.mixed_threshold(53248, *TORUS)`.
#    Answer: 61 tokens: a wider layer computes more with each gathered activation.
# 3. Flag: run with `--plot bound.svg`. Where do 512 x 8 and 1024 x 4 cross the matmuls' line?
#    Answer: 512 x 8 at 652,800 tokens and 1024 x 4 at 1,305,600: with more chips for tensors the same batch has fewer
#    weights to gather.
