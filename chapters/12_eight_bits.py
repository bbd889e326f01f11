# %% [markdown]
"""Part 12, eight bits: what FP8, MXFP8 and NVFP4 change, with their scales in the type, beyond the book.
https://jax-ml.github.io/scaling-book/gpus

A GPU multiplies FP8 numbers twice as fast as bfloat16 ones, and a B200 multiplies four-bit numbers twice as fast again.
But so few bits cover a small range, so values are stored divided by a scale. The scales are an array, too: they are
sharded, gathered and reduced. This chapter writes them into the type, W[D_X, F] {Q_D}, and runs FSDP with it. W is a
weight of an MLP, from D numbers of a token to F hidden ones, and X is the axis over which FSDP splits it.
"""

# %%
import torch

from scaling import data, optim, tree
from scaling.book.answers import Answer
from scaling.book.learning import load_given_text
from scaling.book.listing import EXACT, difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.common.console import integer
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import mlp
from scaling.scaled import RECIPES, dequantize, quantize
from scaling.spec import format_of, parse
from scaling.strategies import fsdp
from scaling.strategies.stack import Strategy
from scaling.trace import trace
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

OPTIONS = {
    "steps": (40, "training steps", integer(1, 10**6)),
    "text": ("", "file to learn (default: the sources of Python's standard library)"),
}
FITS = ("W_in[D_X, F]", "Tokens[B_X]"), {"D": 256, "F": 512, "B": 256}
page = Page(__doc__, mesh="X=2", fits=FITS, device=True, seed=True, plot=True, **OPTIONS)
ONE = AbstractMesh({})

# %% [markdown]
# ## What eight bits change in the rooflines
# Part 5 finds that FSDP is bound by compute above C/W tokens a chip, where C is the FLOPs a second and W the bandwidth.
# In FP8 a chip has twice the C. If the weights are still gathered in bfloat16, the limit doubles. If they are gathered
# in FP8, half the bytes are sent, and the limit of the forward pass is about that of bfloat16 again. The backward pass
# gathers weights in FP8, too, but its gradients are sums, which stay in bfloat16, so its limit is half way between.
# Scales cost a little: MXFP8 has one byte for each 32 values, hence 33/64 of bfloat16's bytes.

# %%
MX = 33 / 64  # of bfloat16's bytes
rows = []
for name in ("h100", "b200", "gb200"):
    hw = chip(name)
    bf16, fp8 = (hw.intensity("scale-out", dtype) for dtype in ("bf16", "fp8"))
    rows.append((name, *(f"{n:,.0f}" for n in (bf16, fp8, fp8 * MX, fp8 * (MX + 1) / 2))))
page.title("FSDP between nodes is compute-bound from this number of tokens per GPU")
page.table(rows, ["", "bf16", "FP8 products", "... and gathers,\nforward", "... and gathers,\nbackward"])
H100 = chip("h100")
page.answers([
    Answer("H100, bf16: tokens a GPU", "2475", H100.intensity("scale-out"), "tokens"),
    Answer("H100, FP8 products, MXFP8 gathers: forward, over bf16's", "",
           MX * H100.intensity("scale-out", "fp8") / H100.intensity("scale-out"), "times", "2 x 33/64"),
])  # fmt: skip

# %% [markdown]
# ## The types of the parts
# `W[D_X, F] {Q_D}` says that values along D share a scale. The format decides how many values share one, and in which
# dtypes the values and scales are stored:
#
# - `fp8-row`: FP8 values (E4M3: 4 bits of exponent, 3 of mantissa), with one float32 scale for all of D
# - `fp8-128`: FP8 values, with one float32 scale for each block of 128
# - `mxfp8`: FP8 values, with one byte for each block of 32, a power of two
# - `nvfp4`: values of 4 bits, two in a byte, with an FP8 scale for each block of 16 and a float32 one for the array (t)
#
# The table has the parts of a weight, values (q) and scales (s). The type of each part is an ordinary one, in which
# `D/32` has one entry for each 32 of D. No shard may cut a block, and that needs no new rule: D/32 has to divide over
# X, as every dim does. If all of D shares one scale, the values that share it are on several ranks, so their largest
# magnitude (amax) takes an AllReduce.

# %%
mesh, sizes, W = AbstractMesh({"X": 8}), {"D": 8192, "F": 28672}, parse("W[D_X, F] {Q_D}")
held = torch.empty(1024, 28672, dtype=torch.bfloat16, device="meta")
rows = []
for name in ("fp8-row", "fp8-128", "mxfp8", "nvfp4"):
    with trace() as log:
        x = quantize("W[D_X, F] -> W[D_X, F] {Q_D}", held, mesh, name)
        y = all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", x, mesh)
    gathered = sum(event.nbytes for event in log.events if event.op == "AllGather")
    maxima = sum(event.nbytes for event in log.events if event.op == "AllReduce")
    share = gathered / (2 * 8192 * 28672)
    parts = ", ".join(str(part) for part in W.parts(name))
    rows.append((name, parts, f"{share:.4f}", f"{maxima / 1e3:,.0f}" if maxima else ""))
    whole = parse("W[D, F] {Q_D}").nbytes(sizes, mesh, name)
    kept = 0 if format_of(name).block else 4 * 28672
    kept += 4 if len(format_of(name).scales) > 1 else 0
    page.check(f"{name}: the bytes traced are those of the types", gathered == whole - kept and y.nbytes == whole)
page.title("W[D_X, F] {Q_D}, D = 8192, F = 28,672, X = 8")
page.table(rows, ["format", "held as", "gathered, of\nbf16's bytes", "amax reduced,\nkB"])

# %% [markdown]
# ## How precise each format is
# The histogram has the magnitudes of activations. One feature in sixty-four is thirty times as large as the others, as
# in trained models. E4M3 reaches from 448 down to 2^-9, so if the whole array has one scale, the largest value sets it,
# and values below half of the mark become zero. The table shows for each format the share of values that become zero,
# and the error relative to the values. With a scale per row fewer values are lost, and with a scale per block fewest.
# Integers are evenly spaced, so small values round to zero: int8 with a scale per row loses more of them than NVFP4,
# which has half the bits.
#
# The last column, the error of all values together, is mostly that of the largest ones. A float32 scale maps the
# largest value of its block to 448 exactly. MXFP8's scale is a power of two, which does not, and it is rounded down, so
# the largest value of a block may be clamped; RCEIL rounds it up.

# %%
rng = torch.Generator().manual_seed(page.args.seed)
Act = torch.randn(256, 4096, generator=rng) * torch.exp(1.5 * torch.randn(256, 4096, generator=rng))
Act[:, ::64] *= 30
exponents = Act.abs().log2().floor().int().flatten()
counts = [(int(e), int((exponents == e).sum())) for e in range(-12, 12)]
smallest = float((Act.abs().max() / 448).log2()) - 9  # the smallest E4M3 under one scale
page.chart("values", {"values": [(2.0**e, n) for e, n in counts if n]}, "size", "values of this size",
           "Activations", marks=[("x", 2**smallest, "E4M3's least, one scale")], height=10)  # fmt: skip
rows, errors = [], {}
for name in ("fp8-tensor", "fp8-row", "fp8-128", "mxfp8", "mxfp8-rceil", "nvfp4", "int8", "int8-128"):
    q = "{Q}" if name == "fp8-tensor" else "{Q_F}"
    x = quantize(f"Act[B, F] -> Act[B, F] {q}", Act, ONE, name)
    y = dequantize(f"Act[B, F] {q} -> Act[B, F]", x, ONE)
    errors[name] = float((y - Act).norm() / Act.norm())
    each = ((y - Act).abs() / Act.abs()).median()
    rows.append(
        (name, 8 * x.nbytes / Act.numel(), f"{(y == 0).float().mean():.2%}", f"{each:.4f}", f"{errors[name]:.4f}")
    )
page.title("What each format keeps of the activations")
page.table(rows, ["format", "bits a value", "became 0", "error, median,\nof a value", "error, of all"])
page.check("blocks keep more than one scale a row, in int8", errors["int8-128"] < errors["int8"] / 2)

# %% [markdown]
# ## The lines of FSDP in eight bits
# A product multiplies the sum over a block by the block's scales, so the values that it sums over must share them. The
# forward pass therefore quantizes along the dim that it sums over, D for W_in, and the backward pass along the other
# one. One form cannot be computed from the other, so each pass quantizes this rank's shard again, from the master copy,
# and gathers its own form. Keeping both forms would take more memory than bfloat16. Gradients are partial sums, and are
# reduced without scales. Autograd could not derive these lines from the forward pass, so arrays with scales refuse it.
#
# The same rule says why tensor parallelism gains little. Y gathers activations: `y[B, T_Y, D] -> y[B, T, D]`. The
# forward product sums over D, and the gradient of the weight over the tokens, so y is needed in two forms, which are
# 33/32 of its bytes in bfloat16, where it is gathered once and kept. Only a layer that is computed again, which gathers
# y twice, sends less: three gathers of one byte a value in place of two of two bytes. This code gathers activations in
# the run's dtype.
#
# Below, `r` is a recipe: the formats of both operands in the forward pass (`forward`), of the weights in the backward
# pass (`weights`), of activations where a weight's gradient is computed (`gradients`), and of the gradients that flow
# back (`cotangents`). `block` has the norm and the activation, which stay in the wide dtype.

# %%
SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]", "Out": "Out[B_X, D]"}


def scaled_fsdp(r) -> Strategy:
    """Return FSDP in the formats of a recipe."""

    def forward(W_in, W_out, In, mesh, block):
        W_in = quantize("W_in[D_X, F] -> W_in[D_X, F] {Q_D}", W_in, mesh, r.forward)
        W_out = quantize("W_out[F, D_X] -> W_out[F, D_X] {Q_F}", W_out, mesh, r.forward)
        W_in = all_gather("W_in[D_X, F] {Q_D} -> W_in[D, F] {Q_D}", W_in, mesh, async_op=True)
        W_out = all_gather("W_out[F, D_X] {Q_F} -> W_out[F, D] {Q_F}", W_out, mesh, async_op=True)
        x = quantize("In[B_X, D] -> In[B_X, D] {Q_D}", block.norm(In), mesh, r.forward)
        Tmp = einsum("In[B_X, D] {Q_D} * W_in[D, F] {Q_D} -> Tmp[B_X, F]", x, W_in)
        Act = block.act(Tmp)
        a = quantize("Act[B_X, F] -> Act[B_X, F] {Q_F}", Act, mesh, r.forward)
        Out = einsum("Act[B_X, F] {Q_F} * W_out[F, D] {Q_F} -> Out[B_X, D]", a, W_out)
        return Out, (In, Tmp, Act)

    def backward(W_in, W_out, dOut, saved, mesh, block):
        In, Tmp, Act = saved
        W_out = quantize("W_out[F, D_X] -> W_out[F, D_X] {Q_D}", W_out, mesh, r.weights)  # from the master copy
        W_in = quantize("W_in[D_X, F] -> W_in[D_X, F] {Q_F}", W_in, mesh, r.weights)
        W_out = all_gather("W_out[F, D_X] {Q_D} -> W_out[F, D] {Q_D}", W_out, mesh, async_op=True)
        W_in = all_gather("W_in[D_X, F] {Q_F} -> W_in[D, F] {Q_F}", W_in, mesh, async_op=True)
        a = quantize("Act[B_X, F] -> Act[B_X, F] {Q_B}", Act, mesh, r.gradients)
        d = quantize("dOut[B_X, D] -> dOut[B_X, D] {Q_B}", dOut, mesh, r.cotangents)
        dW_out = einsum("Act[B_X, F] {Q_B} * dOut[B_X, D] {Q_B} -> dW_out[F, D] {U_X}", a, d)
        dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F, D_X]", dW_out, mesh, async_op=True)  # sums stay wide
        d = quantize("dOut[B_X, D] -> dOut[B_X, D] {Q_D}", dOut, mesh, r.cotangents)
        dAct = einsum("dOut[B_X, D] {Q_D} * W_out[F, D] {Q_D} -> dAct[B_X, F]", d, W_out)
        dTmp = block.act_vjp(Tmp, dAct)
        x = quantize("In[B_X, D] -> In[B_X, D] {Q_B}", block.norm(In), mesh, r.gradients)
        t = quantize("dTmp[B_X, F] -> dTmp[B_X, F] {Q_B}", dTmp, mesh, r.cotangents)
        dW_in = einsum("In[B_X, D] {Q_B} * dTmp[B_X, F] {Q_B} -> dW_in[D, F] {U_X}", x, t)
        dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True)
        t = quantize("dTmp[B_X, F] -> dTmp[B_X, F] {Q_F}", dTmp, mesh, r.cotangents)
        dIn = einsum("dTmp[B_X, F] {Q_F} * W_in[D, F] {Q_F} -> dIn[B_X, D]", t, W_in)
        return block.norm_vjp(In, dIn), dW_in, dW_out

    return Strategy(SPECS, forward, backward)


# %% [markdown]
# The table has the collectives of the listing in MXFP8: first the values and then the scales of each weight are
# gathered, once for each pass, and gradients are reduced without scales, here in float64. Below it, the result and the
# gradients on the mesh are compared with one device. They are computed in float64, in which the order of a sum is too
# small a difference to change a rounding to eight bits. They are equal in every format, because the maximum of a block
# does not depend on the mesh.

# %%
RECIPE = {name: r._replace(gradients=r.gradients or "fp8-row") for name, r in RECIPES.items()}
ALONE = AbstractMesh({"X": 1}).optional  # one device: every line drops X
D, F, B = (FITS[1][dim] for dim in "DFB")
WEIGHTS = {"W_in": "W_in[L, D_X, F]", "W_out": "W_out[L, F, D_X]"}
PARAMS = {"W_in": torch.randn(1, D, F, generator=rng).double(), "W_out": torch.randn(1, F, D, generator=rng).double()}
PARAMS = {"W_in": PARAMS["W_in"] / D**0.5, "W_out": PARAMS["W_out"] / F**0.5}
ROWS = [torch.randn(B, D, generator=rng).double() for _ in range(2)]  # In and dOut


def one_layer(mesh, name: str, params: dict, In, dOut) -> dict:
    """Return Out and the gradients of a layer with gelu."""
    layer = scaled_fsdp(RECIPE[name])
    Out, saved = layer.forward(params, In, mesh)
    dIn, grads = layer.backward(dOut, saved, params, mesh)
    return {"Out": Out, "dIn": dIn} | grads


def compared(mesh) -> tuple:
    """Return the lines of MXFP8, and by format the difference from one device."""
    params, rows = (tree.map(lambda x: x.to(mesh.device), x) for x in (PARAMS, ROWS))
    own, (In, dOut) = tree.shard(params, WEIGHTS, mesh), tree.shard(rows, [SPECS["In"], SPECS["Out"]], mesh)
    types, listed, off = {"Out": SPECS["Out"], "dIn": SPECS["In"]} | WEIGHTS, [], []
    for name in RECIPE:
        with trace() as log:
            ours = one_layer(mesh, name, own, In, dOut)
        listed += lines(log) if name == "mxfp8" else []
        alone = one_layer(ALONE, name, params, *rows)
        off.append((name, difference(tree.unshard(ours, types, mesh), alone, mesh), EXACT))
    return listed, off


listed, off = page.on_ranks(compared)
show_lines(
    page,
    f"MXFP8 on X={page.args.mesh['X']}: what is sent, from float64",
    [row for row in listed if row[1]],
    flops=False,
)
page.say()
page.equal(off)

# %% [markdown]
# ## Does it train?
# The byte model of Part 5 is trained on real text, with the listing above for its two layers, in float32 and in each
# format. Embedding and head stay in float32, as do params, the optimizer and all sums. All runs see the same batches.
# The table has the mean of the last losses, and its difference from the run without scales. Published runs report
# differences of this size: Llama 8B, with a loss of 1.274 in bfloat16, ended 0.007 lower in MXFP8 and 0.002 lower in
# NVFP4. They are too small to rank the formats in so short a run.

# %%
CONFIG = mlp.MLPConfig(L=2, D=D, F=F)
STEPS = min(page.args.steps, 3) if page.small else page.args.steps


def train(mesh, name: str) -> list[float]:
    """Return the losses of a run in a format, "float32" for none."""
    layer = fsdp if name == "float32" else scaled_fsdp(RECIPE[name])
    text = data.split(load_given_text(page.args, mesh.device))[0]
    params, adamw, losses = (
        mlp.init(CONFIG, page.args.seed, torch.float32, mesh, param_specs(layer)),
        optim.adamw(3e-3),
        [],
    )
    state = adamw.init(params)
    batches = data.endless(text, CONFIG.K, B, mesh, batch_axes(layer), page.args.seed)
    for _, (tokens, targets) in zip(range(STEPS), batches, strict=False):
        loss, grads = loss_and_grads(layer, params, tokens, targets, CONFIG, mesh)
        params, state = adamw.update(grads, state, params)
        losses.append(float(reduced(layer, loss, mesh)))
    return losses


def all_runs(mesh) -> dict[str, list[float]]:
    return {name: train(mesh, name) for name in ("float32", *RECIPE)}


runs = page.on_ranks(all_runs)
tail = max(1, STEPS // 4)
last = {name: sum(losses[-tail:]) / tail for name, losses in runs.items()}
page.title(f"Loss in nats a byte, mean of the last {tail} of {STEPS} steps")
page.table([(name, f"{x:.4f}", f"{x - last['float32']:+.4f}") for name, x in last.items()], ["", "loss", "difference"])
page.chart("loss", {name: [*enumerate(losses, 1)] for name, losses in runs.items()}, "step", "loss",
           "The byte model in float32 and in each format", log=False, height=12)  # fmt: skip
page.check("every format is within 0.1 of float32", all(abs(x - last["float32"]) < 0.1 for x in last.values()))
page.say("python -m scaling.train --precision mxfp8 trains a Transformer in these formats, on any mesh.")
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `Act[:, ::64] *= 30` by `Act[::64] *= 30`, so that whole rows are large. Which formats gain?
#    Answer: By the column "became 0", those with a scale for each row or for a part of one. With `fp8-row` 0.16% of the
#    values become 0 in place of 0.68%, and with `int8-128` 28% in place of 39%, because a large value no longer shares
#    its scale with small ones. `fp8-tensor` has one scale for all and hardly gains: 4.8% in place of 5.1%.
# 2. Question: what share of its bytes in bfloat16 does LLaMA-3 70B's W_in take in NVFP4? Evaluate
#    `parse("W[D, F] {Q_D}").nbytes(sizes, ONE, "nvfp4") / (2 * 8192 * 28672)`.
#    Answer: 0.281: 4 bits, and a scale of 8 bits for 16 values, are 4.5 of 16 bits.
# 3. Flag: run with `--mesh X=1`. Which of the lines still send something?
#    Answer: None: all ten lines are left with their V, and the column of bytes sent is empty. The formats still
#    quantize, and the results equal one device's.
