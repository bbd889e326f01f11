# %% [markdown]
"""Part 5, "Combining FSDP and Tensor Parallelism": the listing line by line, compared with one device, and the best X.
https://jax-ml.github.io/scaling-book/training

    In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]

Weights are split over both mesh axes. The gathers over X move weights (FSDP), 1/Y of the bytes that FSDP alone would
move. Those over Y move activations (tensor parallelism), 1/X of the bytes of tensor parallelism alone. The layer below
is the book's listing, line by line: change a line and see what breaks. `scaling/strategies/fsdp_tp.py` does the same
for L layers, and starts gathers ahead of time.
"""

# %% [markdown]
# ## Why both at once?
# FSDP moves weights, and the bytes do not shrink with the batch. Tensor parallelism moves activations, and the bytes do
# not shrink with the weights. Together each has less to move: over X, a chip gathers only the 1/Y of a weight that its
# column of chips has, and over Y, only the activations of 1/X of the tokens. So a chip needs far fewer tokens. On a TPU
# v5p, LLaMA-3 70B needs 850 tokens a chip under FSDP alone, and 113 with both.
#
# Large runs do this, with tensor parallelism over the fastest links and FSDP over the rest. The price is a mesh that
# has to be chosen (the section "How to divide the chips" computes the best X), and collectives of two kinds that must
# not share links. Where the batch is large enough for FSDP alone, tensor parallelism only adds waiting.

# %%
from scaling import cost
from scaling.book import learning, listing
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.strategies.stack import Strategy

# The dims that must divide over --mesh; each rank computes the loss of a part of the batch.
FITS = ("W_in[D_X, F_Y]", "W_head[D_Y, V]", "Tokens[B_XY]"), learning.SIZES
page = Page(__doc__, mesh="X=4,Y=2", fits=FITS, device=True, seed=True, **learning.OPTIONS)
X, Y = (page.args.mesh[axis] for axis in "XY")

# %% [markdown]
# ## One layer, line by line
# These are the lines that each rank runs. Weights are gathered over X, activations over Y, so no type has an axis
# twice. Only the gathers and scatters of activations are on the critical path; those of weights and of their gradients
# can run behind the products of another layer. Act is Tmp after the activation function, which the book leaves out.

# %%
SPECS = {"In": "In[B_X, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_X, D_Y]"}


def forward(W_in, W_out, In_Y, mesh, block):
    """W_in[D_X, F_Y], W_out[F_Y, D_X], In[B_X, D_Y] -> Out[B_X, D_Y]."""
    In = all_gather("In[B_X, D_Y] -> In[B_X, D]", In_Y, mesh)  # 1. on the critical path
    W_in = all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W_in, mesh)  # 2. can be done ahead of time
    Tmp = einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", block.norm(In), W_in)  # 3.
    Act = block.act(Tmp)
    W_out = all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W_out, mesh)  # 4. can be done ahead of time
    Out = einsum("Act[B_X, F_Y] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}", Act, W_out)  # 5.
    Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_X, D_Y]", Out, mesh)  # 6. on the critical path
    return Out, (In_Y, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D_Y] -> dIn[B_X, D_Y], dW_in[D_X, F_Y], dW_out[F_Y, D_X]."""
    In_Y, Tmp, Act = saved
    dOut = all_gather("dOut[B_X, D_Y] -> dOut[B_X, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B_X, F_Y] * dOut[B_X, D] -> dW_out[F_Y, D] {U_X}", Act, dOut)  # 3.
    dW_out = reduce_scatter("dW_out[F_Y, D] {U_X} -> dW_out[F_Y, D_X]", dW_out, mesh)  # 4.
    W_out = all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W_out, mesh)  # 5. can be done ahead of time
    dAct = einsum("dOut[B_X, D] * W_out[F_Y, D] -> dAct[B_X, F_Y]", dOut, W_out)  # 6.
    dTmp = block.act_vjp(Tmp, dAct)
    In = all_gather("In[B_X, D_Y] -> In[B_X, D]", In_Y, mesh)  # 7. can be shared with the forward's 1.
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F_Y] -> dW_in[D, F_Y] {U_X}", block.norm(In), dTmp)  # 8.
    dW_in = reduce_scatter("dW_in[D, F_Y] {U_X} -> dW_in[D_X, F_Y]", dW_in, mesh)  # 9.
    W_in = all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W_in, mesh)  # 10. can be done ahead of time
    dIn = einsum("dTmp[B_X, F_Y] * W_in[D, F_Y] -> dIn[B_X, D] {U_Y}", dTmp, W_in)  # 11.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B_X, D] {U_Y} -> dIn[B_X, D_Y]", dIn, mesh)  # 12. on the critical path
    return dIn, dW_in, dW_out


LAYER = Strategy(SPECS, forward, backward)
B, D, F = 8 * X * Y, 8 * X * Y, 16 * X * Y
there, back = listing.show_layer(page, LAYER, {"B": B, "D": D, "F": F})

# %% [markdown]
# ## Bytes moved
# A rank gathers the weights of its own column of chips, DF/Y elements, and the activations of its own row, BD/X. The
# forward moves two of each, and the backward four weights or gradients and three activations, at 8 bytes an element.
# The book's table has 8BD/X for the activations of the backward, at 2 bytes. By the book's own listing it is 6BD/X, as
# counted here, or 4BD/X where step 7 reuses the In that the forward gathered.

# %%
page.title("Bytes that one layer moves (8 bytes an element), by the book's count")
rows = [
    ("forward", "16BD/X + 16DF/Y", 16 * B * D // X + 16 * D * F // Y, there),
    ("backward", "24BD/X + 32DF/Y", 24 * B * D // X + 32 * D * F // Y, back),
]
page.same(rows, ["pass", "formula", "bytes", "counted"])

# %% [markdown]
# ## How to divide the chips between X and Y?
# In the forward, T_math = 4BDF/(NC) with N = XY chips. At the same time the weights take 4DF/(Y W_X) over X, and the
# activations 4BD/(X W_Y) over Y, where W_X and W_Y are the bytes/s over each. With N fixed, a larger X makes the second
# shorter and the first longer, so the best X makes both equal: FX/W_X = BN/(X W_Y). If X has M_X axes of the torus and
# Y has M_Y, it is sqrt(B N M_X / (F M_Y)). FSDP+TP is then compute-bound down to C^2 / (W_X W_Y F) tokens a chip, far
# below FSDP's threshold. The table counts the listing above on 64 abstract v5p, with M_X = 2 and M_Y = 1. At its 16,384
# tokens the best X is a whole number; at the book's 48,000 it is 13.9, and one takes 16 (05_when_bound.py).

# %%
v5p = chip("v5p")
C, N, wide = v5p.flops("bf16"), 64, 32768
W_X, W_Y = v5p.bandwidth("ici", axes=2), v5p.bandwidth("ici", axes=1)


def times(x: int, tokens: int = 256) -> tuple[float, float]:
    """Return (T_math, T_comms) of the forward in seconds, on 64 chips, x of them for FSDP."""
    sizes = {"B": N * tokens, "D": 8192, "F": wide}
    log, _ = listing.both_passes(LAYER, sizes, AbstractMesh({"X": x, "Y": N // x}))
    over = {axis: sum(event.nbytes for event in log.collectives() if event.axes == (axis,)) for axis in "XY"}
    return log.flops / C, max(over["X"] / W_X, over["Y"] / W_Y)


page.title("The forward of a layer with D=8192, F=32768 on 64 v5p, 256 tokens on each")
listing.show_times(page, "X", [(x, *times(x)) for x in (4, 8, 16, 32, 64)])
best = cost.mixed_optimum(N * 256, wide, N, 2, 1)
page.say(f"The best X is sqrt(B N M_X / (F M_Y)) = {best:.0f}; there it is compute-bound down to "
         f"{cost.mixed_threshold(wide, C, W_X, W_Y):.0f} tokens on a chip.")  # fmt: skip
page.check("the best X of the table is the formula's", min((4, 8, 16, 32, 64), key=lambda x: times(x)[1]) == best)

# %% [markdown]
# ## Four layers, and training
# Training runs the listing above over all layers, with gelu, norm and residual. If you change one of its lines, the
# training changes, or the line is refused. The loop is that of 05_dp.py.

# %%
learning.show(page, LAYER)
page.end()


# %% [markdown]
# ## Three things to try
# 1. Edit: replace `-> Out[B_X, D_Y]", Out, mesh)` by `-> Out[B_X, D_Y]", Out, mesh, op="mean")`: every layer then
#    returns 1/Y of its result. Which of the results are still right?
#    Answer: Run as a script, the chapter is refused before a rank starts: the parts of a sum are added, not averaged.
#    In a notebook, which is not judged, Out says NO, and dIn, dW_in and dW_out are right: the backward is written out
#    and begins with the right dOut. It is no longer the derivative of this forward.
# 2. Question: from how many tokens on a chip is LLaMA-3 70B's layer, F = 28,672, bound by compute? Evaluate
#    `cost.mixed_threshold(28672, C, W_X, W_Y)`.
#    Answer: 113 tokens, where FSDP alone needs 850.
# 3. Flag: run with `--mesh X=2,Y=2`. Which of the lines change?
#    Answer: None: the types name no numbers. A rank gathers from one other along X, not three, so it sends 1/2 of each
#    weight where it sent 3/4.
