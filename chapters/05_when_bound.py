# %% [markdown]
"""Part 5, How to Parallelize a Transformer for Training: when is each strategy bound by communication?
https://jax-ml.github.io/scaling-book/training

Compute and bytes of a layer beside what the strategies' own code moves, the thresholds of four chips, the best X, the
book's two figures, the recipe for a pod, and the problems, for both overlap models: collectives of two axes overlap, so
that the longer counts (2026), or add up (2025). The strategies run in 05_dp.py, 05_fsdp.py, 05_tp.py and 05_fsdp_tp.py.
"""

# %%
import torch

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost.transformer import num_params, params
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

page = Page(__doc__, plot=True)
V5P = chip("v5p")
C, ALPHA = V5P.flops("bf16"), V5P.intensity("ici")  # 2550 FLOPs per byte of one ICI axis
DAY = 86400


def W(axes: int) -> float:
    """Bytes/s of a chip's collectives over so many torus axes, both ways round."""
    return V5P.bandwidth("ici", axes=axes)


def yes(value: bool) -> str:
    return "yes" if value else "no"


# %% [markdown]
# ## Compute and communication of a layer
# The table of the Takeaways, two matrices in bf16, beside what each strategy's own forward and backward move on an
# abstract mesh (an AllReduce counts twice). The book's backward of FSDP + TP has 8BD/X: its algorithm gathers dOut and
# scatters dIn, 4BD/X, as the row of TP says.

# %%
B, D, F, X, Y = 16, 12, 40, 4, 2
FORMULAS = {  # strategy: (its code, the cost model's name, X, Y, its chips, bytes forward, bytes backward)
    "DP": (data_parallel, "dp", X, 1, "X", ("0", 0), ("8DF", 8 * D * F)),
    "FSDP": (fsdp, "fsdp", X, 1, "X", ("4DF", 4 * D * F), ("8DF", 8 * D * F)),
    "TP": (tensor_parallel, "tp", 1, Y, "Y", ("4BD", 4 * B * D), ("4BD", 4 * B * D)),
    "FSDP+TP": (fsdp_tp, "fsdp_tp", X, Y, "(XY)", ("4BD/X + 4DF/Y", 4 * B * D // X + 4 * D * F // Y),
                ("4BD/X + 8DF/Y", 4 * B * D // X + 8 * D * F // Y)),
}  # fmt: skip


def moved(strategy, mesh) -> tuple[list[dict[str, int]], list[int]]:
    """Bytes over each axis as the strategy's code moves them in bf16, and its FLOPs, forward and backward."""
    sizes, found = {"L": 1, "B": B, "D": D, "F": F}, []
    types = {name: strategy.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")} | {
        "In": strategy.SPECS["In"]
    }
    arrays = {name: torch.empty(parse(spec).local_shape({dim: sizes[dim] for dim in parse(spec).dim_names}, mesh),
                                dtype=torch.bfloat16, device="meta") for name, spec in types.items()}  # fmt: skip
    In = arrays.pop("In")
    with trace() as forward:
        Out, saved = strategy.forward(arrays, In, mesh, activation="none")
    with trace() as backward:
        strategy.backward(torch.empty_like(Out), saved, arrays, mesh)
    for log in (forward, backward):
        found.append(dict.fromkeys("XY", 0))
        for event in log.collectives():
            found[-1][event.axes[0]] += event.nbytes * (2 if event.op == "AllReduce" else 1)
    return found, [forward.flops, backward.flops]


rows, work, over = [], [], {}
for name, (strategy, model, x, y, chips, *passes) in FORMULAS.items():
    over[name], flops = moved(strategy, AbstractMesh({"X": x, "Y": y}))
    work += [(f"{name} {direction}", f"{n}BDF/{chips}", n * B * D * F // (x * y), counted)
             for direction, n, counted in zip(("forward", "backward"), (4, 8), flops, strict=True)]  # fmt: skip
    for direction, (formula, value), counted in zip(("forward", "backward"), passes, over[name], strict=True):
        modelled = cost.layer_bytes(model, cost.LayerShape(B, D, F), x, y, direction)
        page.check(f"{name} {direction}: the cost model's bytes", modelled == counted)
        rows.append((f"{name} {direction}", formula, value, sum(counted.values())))
lines = {name: [code.SPECS[array] for array in ("In", "W_in", "W_out", "Out")] for name, (code, *_) in FORMULAS.items()}
page.title("The strategies")
page.table([(name, "{} * {} * {} -> {}".format(*line)) for name, line in lines.items()], ["strategy", "formula"])
page.title(f"FLOPs and bytes of one layer on a chip, B={B}, D={D}, F={F}, X={X}, Y={Y}")
page.same(work, ["FLOPs", "formula", "value", "traced"])
page.say()
page.same(rows, ["bytes", "formula", "value", "traced"])

# %% [markdown]
# ## Thresholds
# With F = 28672: DP and FSDP on all axes, TP on one, FSDP + TP on the others and one. Look at how far FSDP + TP goes
# below FSDP alone, and at v6e: 4.7 times a v5e's FLOPs with twice its links.

# %%
page.title("Compute-bound if ..., F = 28672")
rows = []
for name in ("v4p", "v5p", "v5e", "v6e"):
    hw = chip(name)
    alpha, m, peak = hw.intensity("ici"), hw.axes, hw.flops("bf16")
    wx, wy = (hw.bandwidth("ici", axes=axes) for axes in (max(1, m - 1), 1))
    mixed = [cost.mixed_threshold(28672, peak, wx, wy, overlap) for overlap in ("max", "sum")]
    limits = (alpha, alpha / m, cost.tensor_limit(28672, peak, wy), *mixed, cost.pod_threshold(peak, hw.need("dcn_bw")))
    rows.append((name, m, *(f"{limit:,.0f}" for limit in limits)))
page.table(rows, ["chip", "axes", "C/W_ici", "DP, FSDP:\nB/X >", "TP:\nY <", "FSDP+TP:\nB/N >",
                  "collectives\nadding up\n(2025)", "pods:\nB/slice >"])  # fmt: skip

# %% [markdown]
# ## The figures
# FLOPs time over comms time on 4x4x4 v5p: FSDP is a line, FSDP + TP its square root, TP alone constant. Above 1 a
# strategy is compute-bound: between about 100 and 850 tokens a chip only FSDP + TP is.

# %%
N, WIDE = 64, 30_000


def ratios(per_chip: float, D: float = 8192) -> dict[str, float]:
    """Math over comms of a layer's forward pass on 64 chips, each strategy at its best."""
    shape, links = cost.LayerShape(per_chip * N, D, WIDE), cost.Links(C, X=W(3), Y=W(3))
    fsdp_only = cost.layer("fsdp", shape, links, X=N, direction="forward")
    tp_only = cost.layer("tp", shape, links, Y=N, direction="forward")
    x = cost.mixed_optimum(shape.B, WIDE, N, 2, 1)
    mixed = max(4 * D * WIDE * x / N / W(2), 4 * shape.B * D / x / W(1))  # at the best X, whole or not
    return {"FSDP": fsdp_only.math / fsdp_only.comms, "TP only": tp_only.math / tp_only.comms,
            "FSDP+TP": tp_only.math / mixed}  # fmt: skip


least, alone = cost.mixed_threshold(WIDE, C, W(2), W(1)), cost.data_threshold(C, W(3))
per_chip = sorted({least, alone, *range(20, 2001, 20)})
page.chart(
    "ratio", {name: [(b, ratios(b)[name]) for b in per_chip] for name in ratios(100)}, "tokens per chip",
    "FLOPs time / comms time", "4x4x4 v5p, F = 30k: compute-bound above 1", height=14,
    marks=[("y", 1, "ratio 1"), ("x", least, f"FSDP+TP: {least:.0f}"), ("x", alone, f"FSDP: {alone:.0f}")],
)  # fmt: skip

# %% [markdown]
# Seconds of a layer's forward pass on 16x16x16 v5p: a mesh is compute-bound where the matmuls' line is above its own.
# Look at 256 x 16 with TP over one axis: it never is.

# %%
MESHES = {"4096 FSDP": (4096, 1, 3, 0), "1024 x 4": (1024, 4, 2, 1), "512 x 8": (512, 8, 2, 1)}
MESHES |= {"256 x 16": (256, 16, 2, 1), "4096 TP": (1, 4096, 0, 3)}  # X, Y, M_X, M_Y


def mesh_layer(B: float, X: int, Y: int, m_x: int, m_y: int, D: float = 8192, F: float = 32768) -> cost.Cost:
    name = "fsdp_tp" if X > 1 < Y else "fsdp" if X > 1 else "tp"
    links = cost.Links(C, X=W(m_x) if m_x else None, Y=W(m_y) if m_y else None)
    return cost.layer(name, cost.LayerShape(B, D, F), links, X, Y, "forward")


def crossing(mesh: tuple[int, int, int, int]) -> float:
    """The batch from which the mesh is compute-bound, by bisection; inf if it never is."""
    low, high = 1.0, 1e12
    if mesh_layer(high, *mesh).bound != "compute":
        return float("inf")
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if mesh_layer(middle, *mesh).bound == "compute" else (middle, high)
    return high


turns = {name: crossing(mesh) for name, mesh in MESHES.items()}
corners = [x * 32768 * m_y / (y * m_x) for x, y, m_x, m_y in MESHES.values() if m_x and m_y]  # FSDP's bytes = TP's
batches = sorted({*(10 ** (1 + i / 10) for i in range(71)), *corners, *(t for t in turns.values() if t < 1e9)})
series = {name: [(B, mesh_layer(B, *mesh).comms) for B in batches] for name, mesh in MESHES.items()}
page.chart(
    "time", series | {"matmuls": [(B, mesh_layer(B, *MESHES["512 x 8"]).math) for B in batches]}, "batch in tokens",
    "seconds of a layer", "16x16x16 v5p, D = 8192, F = 32768: communication, and the matmuls", height=16,
    marks=[("x", turns[name], f"{name}: {format_number(turns[name])}") for name in ("512 x 8", "4096 FSDP")],
)  # fmt: skip

# %% [markdown]
# ## The numbers of the text
# Look at the recipe for a pod: by the book's own formula 1024 x 8 is bound by FSDP's gathers, and 512 x 16 by TP's;
# at the best X, 739 x 11, both are hidden.

# %%
FIRST = cost.data_threshold(C, W(3))
gemma, flops = get("gemma-7b"), 6 * 15e12 * 70e9
chips = 16e6 / FIRST


def share(X: int, Y: float, axis: str, B: float = 1e6) -> float:
    """Seconds of an axis' collectives over those of the matmuls, F = 30k, two torus axes for X and one for Y."""
    comms = {"X": 4 * 8192 * WIDE / Y / W(2), "Y": 4 * B * 8192 / X / W(1)}[axis]
    return comms / (4 * B * 8192 * WIDE / (X * Y) / C)


recipe = mesh_layer(1e6, 1024, 8, 2, 1, F=WIDE)
page.answers([
    Answer("DP: largest model with Adam on a v5p ('roughly 9B')", "9e9", cost.largest_model(V5P.hbm_bytes), "params",
           "HBM / 10"),
    Answer("C / W_ici, one axis", "2550", ALPHA, "FLOPs/B"),
    Answer("DP, FSDP on three axes: smallest batch per chip", "850", FIRST, "tokens"),
    Answer("DP, FSDP: smallest batch of a whole pod", "7.6e6", V5P.pod_chips * FIRST, "tokens"),
    Answer("DeepSeek-V2, 40M tokens: chips", "47,000", 40e6 / FIRST, "v5p"),
    Answer("LLaMA-3 70B, 16M tokens: chips", "18,823", chips, "v5p"),
    Answer("FLOPs of LLaMA-3 70B", "6.3e24", flops, "FLOPs"),
    Answer("on those chips at 50% MFU", "17", cost.seconds_at(flops, chips, C, 0.5) / DAY, "days"),
    Answer("TP: largest Y of LLaMA-3 70B, F = 30,000", "11", cost.tensor_limit(WIDE, C, W(1)), "way"),
    Answer("TP 8-way of LLaMA-3 70B (F = 28672) is bound by", "compute", mesh_layer(1e6, 1, 8, 0, 1, F=28672).bound),
    Answer("TP 16-way: bound by the collectives of", "Y", mesh_layer(1e6, 1, 16, 0, 1, F=28672).bound),
    Answer("F that 8-way TP needs", "20,000", 8 * ALPHA),
    Answer("Gemma 7B, F = 50k: comms-bound from", "19", cost.tensor_limit(50e3, C, W(1)), "way"),
    Answer("Gemma 7B as it is, two up-projections of F = 24,576", "", cost.tensor_limit(1.5 * gemma.F, C, W(1)), "way",
           "3 matrices and one gather: 6BDF/Y against 4BD, so Y < 1.5 F W/C; 16-way is slightly comms-bound"),
    Answer("int8: C / W_ici", "5100", V5P.intensity("ici", "int8"), "OPs/B", "half the bytes, so TP's limit stays"),
    Answer("X_opt, N = 64, B = 48,000, F = 32768", "13.9", cost.mixed_optimum(48e3, 32768, 64, 2, 1), "",
           rounded=(cost.mixed_optimum(48e3, 32000, 64, 2, 1), "F = 32,000 for 32,768")),
    Answer("FSDP+TP, F = 32768: smallest batch per chip", "99", cost.mixed_threshold(32768, C, W(2), W(1)), "tokens"),
    Answer("FSDP alone needs so many times as many", "8", FIRST / cost.mixed_threshold(32768, C, W(2), W(1)), "times"),
    Answer("FSDP+TP in 2025, collectives adding up", "400",
           cost.mixed_threshold(32768, C, W(2), W(1), "sum"), "tokens"),
    Answer("FSDP+TP on 4x4x4, F = 30k (figure): above 1 from", "100", least, "tokens"),
    Answer("TP only on 4x4x4 (figure): constant ratio", "", ratios(100)["TP only"], "", "3 F / (64 alpha)"),
    Answer("16x16x16, F = 32768: the best X is compute-bound from", "4e5",
           4096 * cost.mixed_threshold(32768, C, W(2), W(1)), "tokens"),
    Answer("the plotted 512 x 8 crosses the matmuls at (caption: 6e5)", "6e5", turns["512 x 8"], "tokens",
           "N alpha / (Y M_X)"),
    Answer("the plotted 512 x 8 crosses the matmuls at (text: 4e5)", "4e5", turns["512 x 8"], "tokens",
           erratum="4e5 is the best X of any real value, 319; no plotted curve has it"),
    Answer("256 x 16, 'the minimum', has the best X at batch", "", corners[2], "tokens",
           "X^2 F M_Y / (M_X N), fewer than 4e5: there it is bound by communication as well"),
    Answer("256 x 16 with M_Y = 1 is compute-bound from", "", str(turns["256 x 16"]), "tokens",
           f"never: its TP takes {share(256, 16, 'Y') * WIDE / 32768:.2f} of the matmuls at any batch"),
    Answer("recipe of a pod: 1M tokens, X = 1024, Y = 8 is bound by", "compute", recipe.bound, "", erratum=
           f"FSDP takes {share(1024, 8, 'X'):.2f} and TP {share(1024, 8, 'Y'):.2f} of the matmuls' time"),
    Answer("recipe of a pod: FSDP's gathers over the matmuls", "", share(1024, 8, "X"), "times", "1024 C / (1e6 W_2)"),
    Answer("recipe with 512 x 16: the longer of both over the matmuls", "", max(share(512, 16, a) for a in "XY"),
           "times", "now TP binds"),
    Answer("recipe at the best X of 8,192 chips", "", cost.mixed_optimum(1e6, WIDE, 8192, 2, 1), "", "sqrt(2 B N / F)"),
    Answer("recipe at the best X: the longer of both over the matmuls", "",
           max(share(739, 8192 / 739, a) for a in "XY"), "times", "so both are hidden"),
    Answer("Table, FSDP+TP: forward bytes over Y / (BD/X)", "4", over["FSDP+TP"][0]["Y"] / (16 * 12 / 4), "", "traced"),
    Answer("Table, FSDP+TP: backward bytes over Y / (BD/X)", "8", over["FSDP+TP"][1]["Y"] / (16 * 12 / 4), "", erratum=
           "the algorithm gathers dOut and scatters dIn: 4 (6 if In is gathered again), as in the row of TP"),
])  # fmt: skip

# %% [markdown]
# ## The problems: LLaMA-2 13B


# %%
def regime(B: float, N: int, F: float) -> str:
    """Can FSDP alone, FSDP+TP at its best, or neither keep N chips compute-bound?"""
    if FIRST < B / N:
        return "FSDP"
    return "FSDP+TP" if cost.mixed_threshold(F, C, W(2), W(1)) < B / N else "neither"


m13, slice_ = get("llama2-13b"), 16**3
p13, widths = params(m13), [m13.D, m13.F, m13.F]
state = cost.training_memory(13e9, grad_bytes=0)
kept = {tokens: cost.checkpoint_bytes(tokens, widths, m13.L) for tokens in (16e6, 3e6)}
page.answers([
    Answer("1 FFW params", "8.5e9", p13["mlp"], "params"),
    Answer("1 attention params", "4.2e9", p13["attention"], "params"),
    Answer("1 vocabulary params", "0.33e9", p13["vocab"], "params"),
    Answer("1 LLaMA-2 13B", "13.0e9", num_params(m13), "params"),
    Answer("2 params and Adam's state", "130e9", state.total, "bytes"),
    Answer("2 activations, 3 checkpoints a layer, 16M tokens", "42e12", kept[16e6], "bytes"),
    Answer("3 HBM of 16x16x16", "393e12", slice_ * V5P.hbm_bytes, "bytes"),
    Answer("3 sequences of 32k in 3M tokens", "96", 3 * 2**20 / 2**15, "sequences"),
    Answer("3.1 pure DP fits", "no", yes(state.fits(V5P.hbm_bytes)), "", "130 GB on each chip of 96 GB"),
    Answer("3.2 checkpoints of 3M tokens", "7.86e12", kept[3e6], "bytes"),
    Answer("3.2 memory in all", "8e12", kept[3e6] + state.total, "bytes"),
    Answer("3.2 memory per chip", "", (kept[3e6] + state.total) / slice_, "bytes", "all of it over 4096"),
    Answer("3.2 smallest batch of pure FSDP", "3.48e6", slice_ * FIRST, "tokens"),
    Answer("3.2 pure FSDP is compute-bound", "no", yes(regime(3e6, slice_, m13.F) == "FSDP"), "", "3M < 3.48M"),
    Answer("3.3 FSDP+TP: smallest batch per chip", "235", cost.mixed_threshold(m13.F, C, W(2), W(1)), "tokens"),
    Answer("3.3 FSDP+TP is compute-bound", "yes", yes(regime(3e6, slice_, m13.F) == "FSDP+TP"), "",
           f"{3e6 / slice_:.0f} tokens a chip"),
    Answer("3.3 X_opt", "1333", cost.mixed_optimum(3e6, m13.F, slice_, 2, 1), "", "1024 x 4"),
    Answer("3.3 seconds a step at 40% MFU", "0.3", cost.seconds_at(6 * 3e6 * 13e9, slice_, C, 0.4), "s"),
    Answer("4 (2025 edition) 1M tokens are compute-bound by", "", regime(1e6, slice_, m13.F), "",
           f"{1e6 / slice_:.0f} a chip: just above the threshold, if the collectives of both axes overlap"),
    Answer("4 (2025 edition) 10M tokens are compute-bound by", "", regime(10e6, slice_, m13.F), "",
           f"{10e6 / slice_:.0f} a chip > 850"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `recipe = mesh_layer(1e6, 1024, 8, 2, 1` by `recipe = mesh_layer(1e6, 739, 11, 2, 1`. Is the recipe
#    compute-bound now, and why does its row DIFFER?
# 2. Question: how many tokens a chip does FSDP + TP need for LLaMA-3 405B, F = 53,248? Evaluate
#    `cost.mixed_threshold(53248, C, W(2), W(1))`.
# 3. Flag: run with `--plot bound.svg`. Where do 512 x 8 and 1024 x 4 cross the matmuls' line?
