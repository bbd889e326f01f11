# %% [markdown]
"""Part 5, "Data Parallelism": the listing line by line, compared with one device, and when it is compute-bound.
https://jax-ml.github.io/scaling-book/training

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

The batch is split, and the params are replicated. The forward sends nothing. The backward leaves each weight's gradient
as partial sums {U_X}, and an AllReduce adds them up. Only the optimizer waits for that sum, so the AllReduce can run
behind the rest of the backward: `scaling/strategies/data_parallel.py` does that for L layers, and can reduce several in
one bucket.
"""

# %% [markdown]
# ## Why split the batch?
# A model of N params takes 6N FLOPs for each token that it learns from, so a batch of B tokens keeps one chip of C
# FLOPs/s busy for 6NB/C seconds. Except in attention (05_context.py), the rows of a batch do not depend on each other,
# whether they are tokens of one sequence or of several. So the simplest way to use X chips gives each of them a copy of
# the model and B/X of the tokens; only the gradients have to be added up.
#
# The price is memory. Every chip has all params and all of Adam's state, 10 bytes a param with bfloat16 params and two
# float32 moments, so the 96 GB of a TPU v5p hold fewer than 10 billion params, without one activation. And the batch
# has to grow with the chips: if each has few tokens, adding up the gradients takes longer than computing them. Nor can
# the batch grow forever, because beyond some size (the critical batch size) further tokens hardly improve a step's
# gradient. Where the model fits on a chip and the batch is large, nothing is simpler or faster. Where it does not fit,
# 05_fsdp.py goes on.
#
# All chapters on strategies use these letters. A Transformer is simplified to a stack of layers with two products each,
# In W_in W_out. B is the tokens of the whole batch, D the width of the stream between layers, F the hidden width of a
# layer. The mesh axes X and Y stand for their numbers of chips, too. C is a chip's FLOPs/s, and W the bytes/s of its
# links, both directions together.

# %%
import torch
from torch.func import grad

from scaling import cost, data
from scaling.algebra import derive
from scaling.book import learning, listing
from scaling.book.page import Page
from scaling.collectives import all_reduce, einsum
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import mlp
from scaling.strategies.stack import Strategy
from scaling.strategies.stateless import call, reduce_grads
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

# The dim that must divide over --mesh: each rank has a part of the batch.
FITS = ("Tokens[B_X]",), learning.SIZES
page = Page(__doc__, mesh="X=4", fits=FITS, device=True, seed=True, **learning.OPTIONS)
X = page.args.mesh["X"]

# %% [markdown]
# ## Without parallelism
# This is one layer on one device, derived from its types, with both passes as the book numbers them. Which
# communication does each product need once its arrays are split? That is the question of the book's Appendix A, and
# every chapter on a strategy answers it line by line.

# %%
page.title("Without parallelism")
page.say(str(derive("In[B, D] * W_in[D, F] * W_out[F, D] -> Out[B, D]")))

# %% [markdown]
# ## First by types alone
# The shortest way to data parallelism takes any nn.Module, the types of its params, and torch.func.grad. (The module
# here has two nn.Linear, fc1 and fc2, with a gelu between them.) The rows of x are split, so each rank's loss is the
# sum over its own rows. The gradient of a replicated param is then unreduced over X: each rank has the terms of its own
# rows, and nobody has their sum. (In the notation this is the law of cotangents: what is replicated has an unreduced
# gradient, and the other way round.)
#
# There are two types for each param, how a rank stores it and how the module uses it; here they are equal. `call` makes
# the module a function of the params, and brings each from its stored to its used type. `reduce_grads` brings each
# gradient to the type of its param. Both only read the types, and send what these ask for.

# %%
STORED = USED = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", "fc2.weight": "V[D, F]", "fc2.bias": "c[D]"}


def gradients(module, params, x, mesh):
    """Return the gradients of sum Out^2 over the whole batch, typed as the params: params as in STORED, x[B_X, D]."""
    f = call(module, STORED, USED, mesh)  # nothing to gather: the params are replicated

    def loss(params):
        return f(params, x).square().sum()  # Loss[] {U_X}: each rank's own rows

    return reduce_grads(grad(loss)(params), STORED, mesh, over="X", loss="sum")  # the AllReduce of data parallelism


page.title("By types alone: the gradients of an nn.Module, in float64")
listing.show_module(page, gradients, STORED)

# %% [markdown]
# ## The book's layer, line by line
# These are the lines that each rank runs. {U_X} appears where a product sums over the batch, and an AllReduce removes
# it. Nothing in the layer waits for an AllReduce: its result is for the optimizer, so it can be sent while the other
# products run.
#
# Act is Tmp after the activation function, which the book leaves out. `block` has this function, the norm of the input,
# and the cotangents of both (`_vjp`). The run below compares the book's layer, where they change nothing; the training
# at the end has gelu and an RMS norm.

# %%
SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B_X, D]"}


def forward(W_in, W_out, In, mesh, block):
    """W_in[D, F], W_out[F, D], In[B_X, D] -> Out[B_X, D]."""
    Tmp = einsum("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", block.norm(In), W_in)  # 1.
    Act = block.act(Tmp)
    Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 2.
    return Out, (In, Tmp, Act)


def backward(W_in, W_out, dOut, saved, mesh, block):
    """dOut[B_X, D] -> dIn[B_X, D], dW_in[D, F], dW_out[F, D]."""
    In, Tmp, Act = saved  # 1. dOut[B_X, D] is given
    dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut)  # 2.
    dW_out = all_reduce("dW_out[F, D] {U_X} -> dW_out[F, D]", dW_out, mesh)  # 3. not on the critical path
    dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out)  # 4.
    dTmp = block.act_vjp(Tmp, dAct)
    dW_in = einsum("In[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", block.norm(In), dTmp)  # 5.
    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh)  # 6. not on the critical path
    dIn = einsum("dTmp[B_X, F] * W_in[D, F] -> dIn[B_X, D]", dTmp, W_in)  # 7. needed by the layer before
    return block.norm_vjp(In, dIn), dW_in, dW_out


LAYER = Strategy(SPECS, forward, backward)
B, D, F = 8 * X, 32, 64
there, back = listing.show_layer(page, LAYER, {"B": B, "D": D, "F": F})

# %% [markdown]
# ## Bytes moved
# Why does an AllReduce cost twice the bytes of its array? It is a ReduceScatter, which gives each rank a part of the
# sum, and an AllGather, which gives every rank all parts. In each of the two a rank sends (X - 1)/X of the array,
# nearly all of it, as `sent` shows above. So the book counts V twice: two weights of DF elements, twice, at 8 bytes in
# float64 are 32DF bytes. At the book's 2 bytes per element they are 8DF.

# %%
page.title("Bytes that one layer moves (8 bytes an element), by the book's count")
page.same([("forward", "0", 0, there), ("backward", "32DF", 32 * D * F, back)], ["pass", "formula", "bytes", "counted"])

# %% [markdown]
# ## When is it bound by communication?
# The backward has four products of 2 (B/X) DF FLOPs on each chip, so T_math = 8BDF/(XC), and T_comms = 8DF/W. D and F
# cancel: the time of the products grows with the tokens of a chip, and that of the gradients does not, so B/X decides
# which is longer. The products hide the AllReduces if B/X > C/W.
#
# The listing above is counted, in FLOPs and bytes, on 64 abstract TPU v5p, which have shapes and no data. The
# AllReduces may use all three axes of the torus, so W is three times the bandwidth of one axis. A whole pod of 8,960
# chips then needs batches of 7.6 million tokens.

# %%
v5p = chip("v5p")
C, W = v5p.flops("bf16"), v5p.bandwidth("ici", axes=3)


def times(tokens: int) -> tuple[float, float]:
    """Return (T_math, T_comms) of the backward in seconds, with so many tokens on each of 64 chips."""
    _, log = listing.both_passes(LAYER, {"B": 64 * tokens, "D": 8192, "F": 32768}, AbstractMesh({"X": 64}))
    return log.flops / C, log.book_bytes / W


page.title("The backward of a layer with D=8192, F=32768 on 64 v5p")
listing.show_times(page, "B/X", [(tokens, *times(tokens)) for tokens in (425, 850, 1700)])
least = 850 * times(850)[1] / times(850)[0]
page.check("the counted threshold is C/W", abs(least / cost.data_threshold(C, W) - 1) < 1e-9)
page.say(f"Bound by compute from B/X = C/W = {least:,.0f} tokens on; along one axis of the torus {3 * least:,.0f}.")

# %% [markdown]
# ## Four layers, and training
# Training runs the listing above over all layers, with gelu, norm and residual. If you change one of its lines, the
# training changes, or the line is refused. Steps are pure functions from params and the optimizer's state to new ones.
# The model predicts the next byte of a text from the bytes before it. `loss_and_grads` embeds these, runs `layer` over
# the stack and back, and computes the loss; `reduced` adds the loss up over the ranks, for the table alone.
#
# The last line compares the score on text that was not trained on (validation) with the text's order-0 entropy. That is
# the best score of a model that knows how often each byte occurs and nothing about its context, so training has learned
# something once it is below. It is after the 40 steps of a run, and not yet after the 3 of a run with `--small`.

# %%
CONFIG, ADAMW = learning.CONFIG, learning.ADAMW


def train(layer, mesh, text, args):
    params = mlp.init(CONFIG, args.seed, torch.float32, mesh, param_specs(layer))
    state, losses, first, began = ADAMW.init(params), [], None, learning.clock(mesh.device)
    batches = data.endless(text, CONFIG.K, args.batch, mesh, batch_axes(layer), args.seed)
    for _, (tokens, targets) in zip(range(args.steps), batches, strict=False):
        loss, grads = loss_and_grads(layer, params, tokens, targets, CONFIG, mesh)
        first = grads if first is None else first
        params, state = ADAMW.update(grads, state, params)
        losses.append(reduced(layer, loss, mesh))
    return learning.Trained(losses, first or {}, params, state, learning.clock(mesh.device) - began)


learning.show(page, LAYER, train)
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `dW_in[D, F]", dW_in, mesh)` by `dW_in[D, F]", dW_in, mesh, op="mean")`: a mean where a sum belongs.
#    What finds the mistake, and would the training show it?
#    Answer: Run as a script, the chapter is refused before a rank starts: the parts of a sum are added, not averaged.
#    In a notebook, which is not judged, dW_in says NO: it is 1/X of what it should be. The training would hardly show
#    it. The loss still falls, because AdamW divides each gradient by its own size; that is why such mistakes can
#    survive for long.
# 2. Question: how many tokens must a chip have if the AllReduces can use one axis of the torus only? Evaluate
#    `cost.data_threshold(C, v5p.bandwidth("ici", axes=1))`.
#    Answer: 2,550 tokens, three times as many, since one axis has a third of the bandwidth.
# 3. Flag: run with `--mesh X=2`. Which numbers of the listing change?
#    Answer: Only `sent`. The listing has 8 rows for each rank, so the FLOPs stay. V stays, too, but a rank sends 2 x
#    1/2 of it and not 2 x 3/4, because with fewer ranks it lacks a smaller part. In the training, whose batch is
#    fixed, a rank has twice the rows.
