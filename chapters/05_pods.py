# %% [markdown]
"""Part 5, "Scaling Across Pods": data parallelism over a slow axis, reduced level by level, and its bytes on each axis.
https://jax-ml.github.io/scaling-book/training

    In[B_PX, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_PX, D_Y]

P is a slow outer axis, the datacenter's network between pods. Inside a pod, weights are split over X and Y. Gradients
are reduce-scattered over X before they cross the network, so that every chip sends only its own shard, over its own
share of the network. Only the order matters: run `grads_of_layer` and swap its two reductions to see what it saves.
"""

# %% [markdown]
# ## Why another axis?
# A pod ends where the fast links end. Between pods there is the datacenter's network, which gives a chip of a TPU v5p
# 6.25e9 bytes/s, a 29th of one axis of its torus. Weights that are gathered for every layer, or activations that every
# product waits for, must not cross it. Gradients cross once a step, only the optimizer waits for them, and each chip
# has to send only its own shard. So one uses data parallelism over the slow axis, whatever runs inside a pod.
#
# The price is memory, which does not shrink with the number of pods, because each pod has all params. And a pod needs a
# batch that is large enough to hide the network, 73,440 tokens on a v5p, as derived below. Where one pod has chips
# enough, one would not split the run over two. On GPUs this layout is called HSDP.

# %%
from time import perf_counter

import torch

from scaling import cost
from scaling.book import learning, listing
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.collectives import all_reduce, reduce_scatter
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.strategies import pods
from scaling.trace import trace

# The dims that must divide over --mesh; each rank computes the loss of a part of the batch.
FITS = ("W_in[D_X, F_Y]", "W_head[D_Y, V]", "Tokens[B_PXY]"), learning.SIZES
page = Page(__doc__, mesh="P=2,X=2,Y=2", fits=FITS, device=True, seed=True, **learning.OPTIONS)
P, X, Y = (page.args.mesh[axis] for axis in "PXY")

# %% [markdown]
# ## The gradient of one weight
# A gradient starts as partial sums {U_PX} and ends as this rank's shard of the sum. Two reductions do that, and both
# orders give the same numbers. They differ in the bytes that cross the slow axis P: a ReduceScatter over X leaves each
# rank 1/X of the array, and only that has to cross if it comes first. The formula 16 DF/(XY) counts an AllReduce twice,
# at 8 bytes an element in float64.


# %%
def grads_of_layer(dW_in, mesh):
    """dW_in[D, F_Y] {U_PX} -> dW_in[D_X, F_Y]: over X inside the pod first, so that DF/(XY) elements cross P."""
    dW_in = reduce_scatter("dW_in[D, F_Y] {U_PX} -> dW_in[D_X, F_Y] {U_P}", dW_in, mesh)
    return all_reduce("dW_in[D_X, F_Y] {U_P} -> dW_in[D_X, F_Y]", dW_in, mesh)


def grads_of_layer_flat(dW_in, mesh):
    """dW_in[D, F_Y] {U_PX} -> dW_in[D_X, F_Y]: over P first, so that DF/Y elements cross P, X times as many."""
    dW_in = all_reduce("dW_in[D, F_Y] {U_PX} -> dW_in[D, F_Y] {U_X}", dW_in, mesh)
    return reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, mesh)


def both_orders(mesh):
    """Return (lines of each order, bytes that cross P in each, their difference, milliseconds of each)."""
    D, F = 64 * X, 128 * Y
    partial = torch.randn(D, F // Y, generator=torch.Generator().manual_seed(mesh.rank)).double().to(mesh.device)
    orders, logs, made, times = (grads_of_layer, grads_of_layer_flat), [], [], []
    for order in orders:
        with trace() as log:
            made.append(order(partial, mesh))
        logs.append(log)
        began = perf_counter()
        for _ in range(10):
            order(partial, mesh)
        times.append((perf_counter() - began) / 10 * 1e3)
    crossed = [sum(2 * e.nbytes for e in log.events if e.axes == ("P",)) for log in logs]
    return [listing.lines(log) for log in logs], crossed, listing.difference(*made, mesh), times


lines, crossed, off, times = page.on_ranks(both_orders)
for rows, order in zip(lines, ("First over X, then over P", "First over P, then over X"), strict=True):
    listing.show_lines(page, f"{order}, as rank 0 ran it", rows, flops=False)
page.check("both orders give the same", off <= listing.EXACT)
page.say(f"\nThe results differ by {off:.0e} of the largest element.\n")
more = f"{X} times as many bytes cross P"
page.same([
    ("over X, then P", "16 DF/(XY)", 16 * 64 * 128, crossed[0]),  # D = 64 X, F = 128 Y
    ("over P, then X", more, X * crossed[0], crossed[1]),
], ["order", "formula", "bytes", "counted"])  # fmt: skip
page.say(f"\n{times[0]:.1f} against {times[1]:.1f} ms here, where P is no slower than X.")

# %% [markdown]
# ## A whole step, by axis
# How much does a whole step move on each axis? A trace counts L layers of `scaling.strategies.pods`, first on this
# chapter's ranks and then, by the same function, on 16,384 abstract chips. Compare the three rows of the large mesh:
# less than a thousandth of a layer's bytes crosses P.


# %%
def step_bytes(mesh, sizes: dict, dtype) -> dict[str, int]:
    """Count the bytes of forward and backward of L layers by mesh axis, an AllReduce twice as in the book."""
    moved = dict.fromkeys(mesh.sizes, 0)
    for log in listing.both_passes(pods, sizes, mesh, dtype):
        for event in log.collectives():
            moved[event.axes[0]] += event.nbytes * (2 if event.op == "AllReduce" else 1)
    return moved


def closed_forms(axes: dict, sizes: dict, element: int) -> list[tuple]:
    """Return (axis, formula, bytes) of one rank, for elements of `element` bytes; the book's factors are for 2."""
    P, X, Y = (axes[axis] for axis in "PXY")
    L, B, D, F = (sizes[dim] for dim in "LBDF")
    return [
        ("P", "4 DF/(XY) elements a layer", L * 4 * D * F // (X * Y) * element),
        ("X", "6 DF/Y elements a layer", L * 6 * D * F // Y * element),
        ("Y", "4 BD/(PX) elements a layer", L * 4 * B * D // (P * X) * element),
    ]


sizes = {"L": 4, "B": 8 * P * X, "D": 16 * P * X * Y, "F": 16 * P * X * Y}
moved = page.on_ranks(step_bytes, sizes, torch.float64)
HEADERS = ["axis", "formula", "bytes", "counted"]
page.title("Bytes that a rank moves in a step of 4 layers, in float64, by the book's count")
page.same([(*row, moved[row[0]]) for row in closed_forms(page.args.mesh, sizes, 8)], HEADERS)

book = {"L": 1, "B": 2**21, "D": 8192, "F": 32768}
big = AbstractMesh({"P": 2, "X": 1024, "Y": 8})
tokens = f"{book['B'] // big.sizes['P'] / 2**20:g}M tokens a pod"
page.title(f"On {big}: one layer D={book['D']}, F={book['F']} in bfloat16, {tokens}")
moved = step_bytes(big, book, torch.bfloat16)
page.same([(*row, moved[row[0]]) for row in closed_forms(big.sizes, book, 2)], HEADERS)

# %% [markdown]
# ## When does the slow network bind?
# Each chip has its share of the datacenter's network, W_dcn bytes/s. Let a pod have M chips and b tokens of the batch.
# The matmuls of a layer's backward take 8 b DF/(MC) seconds. Each chip sends its 1/M of the gradients, so these take
# 8 DF/(M W_dcn) to cross. D, F and M cancel: the matmuls hide the network if b > C / W_dcn, the same number of tokens
# for a small pod and a large one. A pod with fewer waits for the network, as the first two rows show.

# %%
v5p = chip("v5p")
C, dcn = v5p.flops("bf16"), v5p.need("dcn_bw")


def times(tokens: int) -> tuple[float, float]:
    """Return (T_math, T_comms over P) of the backward in seconds, with so many tokens in each of the two pods."""
    sizes = book | {"B": 2 * tokens}
    math = 8 * sizes["B"] * sizes["D"] * sizes["F"] / (big.size() * C)
    return math, step_bytes(big, sizes, torch.bfloat16)["P"] / dcn


page.title("The backward of that layer, and the bytes that cross P meanwhile")
rows = [(tokens, *times(tokens)) for tokens in (2**15, 2**16, 2**17, 2**20)]
listing.show_times(page, "tokens a pod", rows)
turns = rows[0][0] * rows[0][2] / rows[0][1]
page.check("the counted threshold is C / W_dcn", abs(turns / cost.pod_threshold(C, dcn) - 1) < 1e-9)

# %% [markdown]
# ## The book's numbers
# The book asks how many chips a batch of 2M tokens can feed by each strategy, and what batch per chip two pods then
# have.

# %%
fsdp = cost.data_threshold(C, v5p.bandwidth("ici", axes=3))
mixed = cost.mixed_threshold(30_000, C, v5p.bandwidth("ici", axes=2), v5p.bandwidth("ici", axes=1))
page.answers([
    Answer("a host's share of the network for each chip", "6.25e9", dcn, "B/s"),
    Answer("smallest batch per slice, C / W_dcn", "73,440", turns, "tokens", "from the trace's bytes"),
    Answer("the same in the Takeaways", "71,000", turns, "tokens", erratum="4.59e14 / 6.25e9, as in the text before"),
    Answer("LLaMA-3 70B at 2M tokens: FSDP up to", "2,400", 2e6 / fsdp, "chips"),
    Answer("FSDP+TP: smallest batch per chip", "108", mixed, "tokens"),
    Answer("FSDP+TP up to", "18,000", 2e6 / mixed, "chips"),
    Answer("chips in a pod", "8960", float(v5p.pod_chips), note="the text rounds it to 8k"),
    Answer("two pods: batch per chip", "111", 1e6 / v5p.pod_chips, "tokens"),
])  # fmt: skip

# %% [markdown]
# ## Four layers, and training
# Training runs `scaling.strategies.pods` over all layers, with gelu, norm and residual. The loop is that of 05_dp.py.

# %%
learning.show(page, pods)
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `{U_P}", dW_in, mesh)` by `{U_P}", 2 * dW_in, mesh)`. What does the page say?
#    Answer: FAILED: both orders give the same. The edit doubles the result of the first order alone. Each line is
#    typed correctly, so only the comparison finds it.
# 2. Question: how many tokens must a batch have for four pods to hide the network? Evaluate `4 * cost.pod_threshold(C,
#    dcn)`.
#    Answer: 293,760: 73,440 for each of four pods.
# 3. Flag: run with `--mesh P=2,X=4,Y=1`. How many times as many bytes does the wrong order send over P?
#    Answer: Four times as many, since the ReduceScatter over X comes after, and it would have left a quarter of the
#    array.
