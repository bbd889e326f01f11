# %% [markdown]
"""Part 5, "Tensor Parallelism": the listing line by line, compared with one device, and how far it is compute-bound.
https://jax-ml.github.io/scaling-book/training

    In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]

The weights are split along F and never move; activations do. Between layers the activations are split along D. Each
layer gathers its input and reduce-scatters its output, in the forward and in the backward alike. These four collectives
are on the critical path: the matmuls wait for them. (The backward gathers In once more, or keeps it from the forward.)
`scaling/strategies/tensor_parallel.py` does the same for L layers.
"""

# %% [markdown]
# ## Why move the activations?
# Let a layer have D inputs and F features. With a batch of few tokens its activations, B x D numbers, are smaller than
# its weights, D x F, so moving the activations is cheaper. Tensor parallelism splits each weight along F over Y, and no
# weight ever moves. It also splits the work of a single token, which no split of the batch can do: a step becomes
# shorter, not only larger.
#
# The price is that nothing hides its collectives. A product cannot begin before its input has been gathered, and each
# layer waits four times, twice forward and twice backward. Hence Y belongs on the fastest links, inside a node of GPUs
# or along an axis of a TPU's torus, and it stays small: with chips of C FLOPs/s and links of W bytes/s, a layer that is
# split more than F W/C ways waits for the links however large the batch is. One would not do it over a slow network,
# nor where each chip has enough tokens for FSDP alone.

# %%
from torch.func import grad

from scaling import cost
from scaling.book import learning, listing
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads

# The dims that must divide over --mesh: each rank has a part of D and of F, and the loss of a part of the batch.
FITS = ("W_in[D, F_Y]", "W_head[D_Y, V]", "Tokens[B_Y]"), learning.SIZES
page = Page(__doc__, mesh="Y=4", fits=FITS, device=True, seed=True, **learning.OPTIONS)
Y = page.args.mesh["Y"]

# %% [markdown]
# ## First by types alone
# Again this takes any nn.Module, the types of its params, and torch.func.grad. Each rank calls the module with its own
# F_Y, and the outputs are partial sums over Y. A bias that every rank added would be counted Y times. So the second
# bias is used as partial sums too, `{U_Y}`: one rank along Y adds it, and the others add zeros.

# %%
STORED = {"fc1.weight": "W[F_Y, D]", "fc1.bias": "b[F_Y]", "fc2.weight": "V[D, F_Y]", "fc2.bias": "c[D]"}
USED = STORED | {"fc2.bias": "c[D] {U_Y}"}  # Out is a sum over Y: one rank along Y adds the bias, not all of them


def gradients(module, params, x, mesh):
    """Return the gradients of sum Out^2 over the whole batch, typed as the params: params as in STORED, x[B, D]."""
    f = call(module, STORED, USED, mesh)  # the module on F_Y: its output is a sum over Y

    def loss(params):
        Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", f(params, x), mesh)
        return Out.square().sum()  # Loss[] {U_Y}: each rank's own columns

    return reduce_grads(grad(loss)(params), STORED, mesh, over="Y", loss="sum")  # only the replicated bias needs it


page.title("By types alone: the gradients of an nn.Module, in float64")
listing.show_module(page, gradients, STORED)

# %% [markdown]
# ## The book's layer, line by line
# These are the lines that each rank runs. Weights never move. Activations are gathered before the first product. The
# second product contracts F, which is split, so it leaves partial sums {U_Y} to reduce. Why are two collectives enough
# for two products? The first weight is split by columns and the second by rows, so the F_Y that the first product
# leaves on a rank is exactly what the second one needs there, and the activation function in between treats every
# number alone. Act is Tmp after this function, which the book leaves out. The norm needs a row's whole D, so it comes
# after the gather, and its cotangent before the scatter. That cotangent is linear in dIn, so it may be computed from
# partial sums.

# %%
SPECS = {"In": "In[B, D_Y]", "W_in": "W_in[D, F_Y]", "W_out": "W_out[F_Y, D]", "Out": "Out[B, D_Y]"}


def forward(W_in, W_out, In_Y, mesh, block):
    """W_in[D, F_Y], W_out[F_Y, D], In[B, D_Y] -> Out[B, D_Y]."""
    In = all_gather("In[B, D_Y] -> In[B, D]", In_Y, mesh)  # 1. on the critical path
    Tmp = einsum("In[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", block.norm(In), W_in)  # 2.
    Act = block.act(Tmp)
    Out = einsum("Act[B, F_Y] * W_out[F_Y, D] -> Out[B, D] {U_Y}", Act, W_out)  # 3.
    Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)  # 4. on the critical path
    return Out, (In_Y, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B, D_Y] -> dIn[B, D_Y], dW_in[D, F_Y], dW_out[F_Y, D]."""
    In_Y, Tmp, Act = saved
    dOut = all_gather("dOut[B, D_Y] -> dOut[B, D]", dOut, mesh)  # 2. on the critical path
    dW_out = einsum("Act[B, F_Y] * dOut[B, D] -> dW_out[F_Y, D]", Act, dOut)  # 3.
    dAct = einsum("dOut[B, D] * W_out[F_Y, D] -> dAct[B, F_Y]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    In = all_gather("In[B, D_Y] -> In[B, D]", In_Y, mesh)  # 5. can be shared with the forward's 1.
    dW_in = einsum("In[B, D] * dTmp[B, F_Y] -> dW_in[D, F_Y]", block.norm(In), dTmp)  # 6.
    dIn = einsum("dTmp[B, F_Y] * W_in[D, F_Y] -> dIn[B, D] {U_Y}", dTmp, W_in)  # 7.
    dIn = block.norm_vjp(In, dIn)
    dIn = reduce_scatter("dIn[B, D] {U_Y} -> dIn[B, D_Y]", dIn, mesh)  # 8. on the critical path
    return dIn, dW_in, dW_out


LAYER = Strategy(SPECS, forward, backward)
B, D, F = 32, 16 * Y, 32 * Y
there, back = listing.show_layer(page, LAYER, {"B": B, "D": D, "F": F})

# %% [markdown]
# ## Bytes moved
# The forward gathers In and scatters Out, BD elements each. The backward gathers dOut and In, and scatters dIn. With
# the book's 2 bytes per element these are 4BD and 6BD bytes, or 4BD in the backward as well where a rank keeps the In
# that the forward gathered: step 5 trades memory for bytes.

# %%
page.title("Bytes that one layer moves (8 bytes an element), by the book's count")
rows = [("forward", "16BD", 16 * B * D, there), ("backward", "24BD", 24 * B * D, back)]
page.same(rows, ["pass", "formula", "bytes", "counted"])

# %% [markdown]
# ## When is it bound by communication?
# The forward has two products of 2BDF/Y FLOPs on each chip, so T_math = 4BDF/(YC), and T_comms = 4BD/W. The batch and D
# cancel, so however large the batch is, the layer is compute-bound only if Y < F W/C. With more chips each computes
# less, but sends as much. On a v5p, where C/W is 2550, that is 11 ways for LLaMA-3 70B, whose F is 28,672, and 19 for
# Gemma 7B, whose F is near 50,000. In int8 the limit is the same, because FLOPs/s double and bytes halve. The listing
# above is counted, in FLOPs and bytes, on abstract TPU v5p, where Y has one axis of the torus.

# %%
v5p = chip("v5p")
C, W, wide = v5p.flops("bf16"), v5p.bandwidth("ici", axes=1), 32768


def times(chips: int) -> tuple[float, float]:
    """Return (T_math, T_comms) of the forward in seconds, on so many chips."""
    log, _ = listing.both_passes(LAYER, {"B": 4096, "D": 8192, "F": wide}, AbstractMesh({"Y": chips}))
    return log.flops / C, log.book_bytes / W


page.title("The forward of a layer with B=4096, D=8192, F=32768 on Y v5p")
listing.show_times(page, "Y", [(chips, *times(chips)) for chips in (4, 8, 16, 32)])
most = 8 * times(8)[0] / times(8)[1]
page.check("the counted threshold is F W/C", abs(most / cost.tensor_limit(wide, C, W) - 1) < 1e-9)
page.say(f"Bound by compute up to Y = F W/C = {most:.1f} chips; with two axes of the torus up to {2 * most:.1f}.")

# %% [markdown]
# ## Four layers, and training
# Training runs the listing above over all layers, with gelu, norm and residual. If you change one of its lines, the
# training changes, or the line is refused. The loop is that of 05_dp.py.

# %%
learning.show(page, LAYER)
page.end()


# %% [markdown]
# ## Three things to try
# 1. Edit: replace `dIn = block.norm_vjp(In, dIn)` by `dIn = block.norm_vjp(In, 2 * dIn)`: which law is broken, and
#    what would the layers below receive?
#    Answer: Run as a script, the chapter is refused before a rank starts: a strategy's backward is the derivative of
#    its forward, and the two are compared on one device. In a notebook, which is not judged, only dIn says NO. The
#    weights' gradients of this layer stay right, but every layer below would receive twice its gradient.
# 2. Question: up to how many chips does a layer with F = 28,672 stay bound by compute, with two axes of the torus?
#    Evaluate `cost.tensor_limit(28672, C, 2 * W)`.
#    Answer: 22 chips: 2 F W/C.
# 3. Flag: run with `--mesh Y=2`. Which part of V does a rank send now?
#    Answer: Half of it, where it was three quarters: of two parts a rank lacks one. (D and F are multiples of Y in
#    this chapter, so the other numbers change as well.)
