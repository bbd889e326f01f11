# %% [markdown]
"""Part 5, "Fully-Sharded Data Parallelism (FSDP)": the listing line by line, compared with one device, and ZeRO-1 to 3.
https://jax-ml.github.io/scaling-book/training

    In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]

FSDP is data parallelism whose AllReduce is split in two. A ReduceScatter leaves each rank a shard of every gradient,
and the rank keeps only that shard of the params and of Adam's state. AllGathers bring the weights back just before they
are used. Both can run while another layer computes. `scaling/strategies/fsdp.py` does the same for L layers, with
gathers that start a layer ahead; `zero.py` has ZeRO-1 and ZeRO-2, which shard the optimizer's state, and the gradients,
but not the params.
"""

# %% [markdown]
# ## Why shard what data parallelism copies?
# Data parallelism keeps X copies of the params and of Adam's moments, but a chip needs a layer's weights only while it
# computes this layer. FSDP keeps 1/X of everything on each chip, gathers the weights of a layer just before they are
# used, and drops them afterwards. (The letters are those of 05_dp.py: B tokens, layers of D x F, X chips of C FLOPs/s.)
#
# FSDP trades bytes for memory, and it trades well. The AllReduce of a gradient has always been a ReduceScatter and an
# AllGather: FSDP keeps the first, and the second becomes the AllGather of the weights. Only the gathers of the forward
# are new, and all of them can run behind the products of another layer. So memory falls to 1/X, and a chip needs no
# more tokens to stay compute-bound than under data parallelism. One would not do it where the model fits anyway, or
# where a chip has so few tokens that gathering the weights takes longer than using them. Then the weights should stay
# and the activations move: 05_tp.py.

# %%
import torch
from torch.func import grad

from scaling import cost, optim, tree
from scaling.book import learning, listing
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, zero
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads

# The dims that must divide over --mesh: each rank has a part of D, and of the batch.
FITS = ("W_in[D_X, F]", "Tokens[B_X]"), learning.SIZES
page = Page(__doc__, mesh="X=4", fits=FITS, device=True, seed=True, **learning.OPTIONS)
X = page.args.mesh["X"]

# %% [markdown]
# ## First by types alone
# As in 05_dp.py, all that this takes is an nn.Module, torch.func.grad, and two types for each param: as it is stored
# and as it is used. Compared with data parallelism, each stored type has one more letter, X, and nothing else changes.
# `call` now gathers, because the used types lack the letter. `reduce_grads` has nothing left to do: the transpose of an
# AllGather is a ReduceScatter, so `grad` has already reduced each gradient to its shard.

# %%
STORED = {"fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]", "fc2.weight": "V[D_X, F]", "fc2.bias": "c[D_X]"}
USED = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", "fc2.weight": "V[D, F]", "fc2.bias": "c[D]"}


def gradients(module, params, x, mesh):
    """Return the gradients of sum Out^2 over the whole batch, typed as the params: params as in STORED, x[B_X, D]."""
    f = call(module, STORED, USED, mesh)  # gathers the shards, calls the module, drops the whole params

    def loss(params):
        return f(params, x).square().sum()  # Loss[] {U_X}: each rank's own rows

    return reduce_grads(grad(loss)(params), STORED, mesh, over="X", loss="sum")  # none: a gather's transpose reduces


page.title("By types alone: the gradients of an nn.Module, in float64")
listing.show_module(page, gradients, STORED)

# %% [markdown]
# ## The book's layer, line by line
# These are the lines that each rank runs. The transpose of each AllGather of a weight in the forward is a ReduceScatter
# of its gradient in the backward. The backward gathers each weight again, because a rank that kept it from the forward
# would soon have all layers whole. (The last layer is an exception, because its backward follows at once. The steps of
# `scaling.train` keep its weights, so L layers take 2L - 1 gathers and not 2L.) Act is Tmp after the activation
# function, which the book leaves out.

# %%
SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]", "Out": "Out[B_X, D]"}


def forward(W_in, W_out, In, mesh, block):
    """W_in[D_X, F], W_out[F, D_X], In[B_X, D] -> Out[B_X, D]."""
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh)  # 1. can be done during the layer before
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 2. W_in[D, F] can be thrown away now
    Act = block.act(Tmp)
    W_out = all_gather("W_out[F, D_X] -> W_out[F, D]", W_out, mesh)  # 3. can be done during the layer before
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 4.
    return Out, (In, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D_X, F], dW_out[F, D_X]."""
    In, Tmp, Act = saved
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut)  # 2.
    dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F, D_X]", dW_out, mesh)  # 3. not on the critical path
    W_out = all_gather("W_out[F, D_X] -> W_out[F, D]", W_out, mesh)  # 4. can be done ahead of time
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 5. W_out[F, D] can be thrown away
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp)  # 6.
    dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh)  # 7. not on the critical path
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh)  # 8. can be done ahead of time
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 9. needed by the layer before
    return block.norm_vjp(In, dIn), dW_in, dW_out


LAYER = Strategy(SPECS, forward, backward)
B, D, F = 8 * X, 8 * X, 16 * X
there, back = listing.show_layer(page, LAYER, {"B": B, "D": D, "F": F})

# %% [markdown]
# ## Bytes moved
# The forward gathers two weights of DF elements, 16DF bytes in float64. The backward gathers them again and scatters
# two gradients, 32DF. With the book's 2 bytes per element these are 4DF and 8DF; the AllReduces of data parallelism
# move 8DF as well.

# %%
page.title("Bytes that one layer moves (8 bytes an element), by the book's count")
rows = [("forward", "16DF", 16 * D * F, there), ("backward", "32DF", 32 * D * F, back)]
page.same(rows, ["pass", "formula", "bytes", "counted"])

# %% [markdown]
# ## When is it bound by communication?
# The forward takes T_math = 4BDF/(XC) and T_comms = 4DF/W; in the backward both are twice as long. So in both passes
# the products hide the collectives if B/X > C/W, as under data parallelism. With 850 tokens a chip, LLaMA-3's batches
# of 16 million tokens keep 18,800 chips busy, about two pods. A run that is compute-bound under data parallelism stays
# so when it switches to FSDP, with 1/X of the memory. The listing above is counted, in FLOPs and bytes, on 64 abstract
# TPU v5p that use all three axes of their torus.

# %%
v5p = chip("v5p")
C, W = v5p.flops("bf16"), v5p.bandwidth("ici", axes=3)


def times(tokens: int) -> list[tuple[float, float]]:
    """Return (T_math, T_comms) of both passes in seconds, with so many tokens on each of 64 chips."""
    sizes = {"B": 64 * tokens, "D": 8192, "F": 32768}
    logs = listing.both_passes(LAYER, sizes, AbstractMesh({"X": 64}))
    return [(log.flops / C, log.book_bytes / W) for log in logs]


for i, which in enumerate(("forward", "backward")):
    page.title(f"The {which} of a layer with D=8192, F=32768 on 64 v5p")
    listing.show_times(page, "B/X", [(tokens, *times(tokens)[i]) for tokens in (425, 850, 1700)])
    math, comms = times(850)[i]
    page.check(f"the {which}'s threshold is C/W", abs(850 * comms / math / cost.data_threshold(C, W) - 1) < 1e-9)
page.say(f"Bound by compute from B/X = C/W = {cost.data_threshold(C, W):,.0f} tokens on, as data parallelism is.")

# %% [markdown]
# ## Four layers, and training
# Training runs the listing above over all layers, with gelu, norm and residual. If you change one of its lines, the
# training changes, or the line is refused. The loop is that of 05_dp.py.

# %%
learning.show(page, LAYER)

# %% [markdown]
# ## ZeRO-1, 2 and 3
# The three stages of ZeRO (Zero Redundancy Optimizer) shard more and more: ZeRO-1 shards Adam's moments, ZeRO-2 the
# gradients as well, and ZeRO-3, which is FSDP, everything. Under ZeRO-1 and 2 a rank has all params, so nothing is
# gathered in the passes. Each rank updates its shard of the params, and one AllGather a step spreads the result. One
# would stop at ZeRO-2 where the params fit and the weights would be gathered many times in a step, as in a pipeline
# (05_pp.py).
#
# The book says that FSDP saves FLOPs of the backward pass. It saves none there. What it saves are FLOPs of the
# optimizer, since each rank updates 1/X of the params. The code runs one step of each stage on the same params and
# keeps what a rank then has. In the table N is the number of params, at 4 bytes each in float32; m and v are Adam's
# moments.

# %%
STACKED = {"W_in": "W_in[L, D_X, F]", "W_out": "W_out[L, F, D_X]"}


def stages(mesh, seed):
    """Run one step of each stage on the same params; return (rows of stored bytes, rows of the params' differences)."""
    L, B, D, F, X = 2, 8 * mesh.size(), 64, 256, mesh.sizes["X"]
    rng = torch.Generator().manual_seed(seed)
    shapes = {"W_in": (L, D, F), "W_out": (L, F, D)}
    params = {name: torch.randn(shape, generator=rng).to(mesh.device) * D**-0.5 for name, shape in shapes.items()}
    In, dOut = (torch.randn(B, D, generator=rng).to(mesh.device) for _ in range(2))
    In, dOut = tree.shard([In, dOut], [SPECS["In"], SPECS["Out"]], mesh)
    adamw, n, results, rows = optim.adamw(0.01), 2 * L * D * F, {}, []
    for stage in (0, 1, 2, 3):
        strategy = fsdp if stage == 3 else zero if stage else data_parallel
        own = tree.shard(params, STACKED, mesh) if stage == 3 else params
        state = zero.init(adamw, own, mesh) if stage in (1, 2) else adamw.init(own)
        _, saved = strategy.forward(own, In, mesh)
        if stage == 1:  # stage 1 keeps whole gradients until the end of the backward
            _, whole = data_parallel.backward(dOut, saved, own, mesh, reduce=False)
            held, grads = tree.nbytes(whole), zero.scatter_grads(whole, mesh)
        else:
            _, grads = strategy.backward(dOut, saved, own, mesh)
            held = tree.nbytes(grads)
        if stage in (1, 2):
            new, state = zero.update(adamw, grads, state, own, mesh)
        else:
            new, state = adamw.update(grads, state, own)
        results[stage] = tree.unshard(new, STACKED, mesh) if stage == 3 else new
        shards = [1 if stage < s else X for s in (3, 2, 1)]  # params, gradients, Adam's state
        kept = [tree.nbytes(new), held, tree.nbytes([state["m"], state["v"]])]
        for what, size, parts, found in zip(("params", "gradients", "m and v"), (4, 4, 8), shards, kept, strict=True):
            formula = f"{size}N" + (f"/{parts}" if parts > 1 else "")
            rows.append((f"{f'ZeRO-{stage}' if stage else 'DP'}: {what}", formula, size * n // parts, found))
    against = [f"params after a step of ZeRO-{stage}" for stage in (1, 2, 3)]
    off = [listing.difference(results[stage], results[0], mesh) for stage in (1, 2, 3)]
    return rows, [(what, far, listing.SINGLE) for what, far in zip(against, off, strict=True)]


page.title("Bytes on each rank, of 2 layers with D=64, F=256, in float32")
kept, differences = page.on_ranks(stages, page.args.seed)
page.same(kept, ["kept", "formula", "bytes", "held"])
page.say()
page.equal(differences, "DP")
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `dW_out[F, D_X]", dW_out, mesh)` by `dW_out[F, D_X]", dW_out, mesh, op="mean")`: one weight then has
#    1/X of its gradient. What finds the mistake?
#    Answer: Run as a script, the chapter is refused before a rank starts: the parts of a sum are added, not averaged.
#    In a notebook, which is not judged, the comparison of the layer says NO for dW_out. The training hardly differs,
#    because AdamW divides each gradient by its own size.
# 2. Question: how many chips may share a batch of 4M tokens? Evaluate `4e6 / cost.data_threshold(C, W)`.
#    Answer: 4,705: each needs 850 tokens to hide the gathers.
# 3. Flag: run with `--mesh X=2`. What does a rank store and send now?
#    Answer: Half of each weight, and it sends half of it in each gather. ZeRO's rows with 4N/4 become 4N/2: memory
#    falls with the number of ranks.
