# %% [markdown]
"""Part 5, a whole Transformer: LLaMA's layers under data, FSDP, tensor, sequence and pipeline parallelism.
"How to Parallelize a Transformer for Training": https://jax-ml.github.io/scaling-book/training

    x[B_X, T_Y, D], W_Q[D_X, N_Y, H], W_O[N_Y, H, D_X], W_in[D_X, F_Y], W_out[F_Y, D_X] -> x[B_X, T_Y, D]

The book uses two matmuls as a model of attention and MLP. This chapter has both in the same notation: heads and
features are split over Y, the residual stream along the sequence, the vocabulary over Y. The backward is derived, and
printed as a listing. The same function runs LLaMA-3 70B on 8,192 chips in 06_train_llama.py.
"""

# %%
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vjp

from scaling import tree
from scaling.book.arrays import largest, operands
from scaling.book.layout import format_number
from scaling.book.listing import difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.attention import sdpa
from scaling.models.pointwise import rms_norm
from scaling.models.rope import rotate, tables
from scaling.spec import present
from scaling.strategies import transformer
from scaling.trace import trace

page = Page(__doc__, mesh="X=2,Y=2", seed=True)
X, Y = page.args.mesh["X"], page.args.mesh["Y"]
B, T, V = 2 * X, 8 * Y, 16 * X * Y
config = Config("tiny", L=2, D=16 * X * Y, F=24 * Y, N=4 * Y, K=2 * Y, H=8, V=V)
SPECS = {
    "x": "x[B_X, T_Y, D]",
    "W_Q": "W_Q[D_X, N_Y, H]",
    "W_K": "W_K[D_X, K_Y, H]",
    "W_V": "W_V[D_X, K_Y, H]",
    "W_O": "W_O[N_Y, H, D_X]",
    "W_in": "W_in[D_X, F_Y]",
    "W_gate": "W_gate[D_X, F_Y]",
    "W_out": "W_out[F_Y, D_X]",
}
LIMIT = 1e-11

# %% [markdown]
# ## One layer, line by line
# The letters: B sequences of T tokens; the stream x has D numbers for each token; N query heads and K heads of keys and
# values have H numbers each; F is the hidden width of the MLP. X is the axis of data and FSDP, Y that of tensors. In
# the code `rotate` turns queries and keys by their positions (RoPE), and `sdpa` is torch's attention under a causal
# mask.
#
# Attention is tensor parallelism with heads in the role of features: each rank computes its own heads. Norms and
# residuals treat every token alone, so between the blocks the stream can be split along the sequence, which is called
# sequence parallelism. An AllReduce over Y then becomes a ReduceScatter after each block and an AllGather before the
# next. The bytes are the same, but each token is normalized once instead of Y times, and a rank keeps only 1/Y of the
# stream for the backward. There is nothing to give up, except that Y must divide T.


# %%
def gathered(W, mesh):
    """Gather the layer's weights along D, which can be done ahead of time."""
    return {
        "W_Q": all_gather("W_Q[D_X, N_Y, H] -> W_Q[D, N_Y, H]", W["W_Q"], mesh),
        "W_K": all_gather("W_K[D_X, K_Y, H] -> W_K[D, K_Y, H]", W["W_K"], mesh),
        "W_V": all_gather("W_V[D_X, K_Y, H] -> W_V[D, K_Y, H]", W["W_V"], mesh),
        "W_O": all_gather("W_O[N_Y, H, D_X] -> W_O[N_Y, H, D]", W["W_O"], mesh),
        "W_in": all_gather("W_in[D_X, F_Y] -> W_in[D, F_Y]", W["W_in"], mesh),
        "W_gate": all_gather("W_gate[D_X, F_Y] -> W_gate[D, F_Y]", W["W_gate"], mesh),
        "W_out": all_gather("W_out[F_Y, D_X] -> W_out[F_Y, D]", W["W_out"], mesh),
    }


def attention(W, x, mesh):
    """x[B_X, T_Y, D] -> Attn[B_X, T_Y, D]."""
    y = all_gather("y[B_X, T_Y, D] -> y[B_X, T, D]", rms_norm(x, eps=config.eps), mesh)  # on the critical path
    Q = einsum("y[B_X, T, D] * W_Q[D, N_Y, H] -> Q[B_X, T, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_X, T, D] * W_K[D, K_Y, H] -> K[B_X, T, K_Y, H]", y, W["W_K"])
    V = einsum("y[B_X, T, D] * W_V[D, K_Y, H] -> V[B_X, T, K_Y, H]", y, W["W_V"])
    rope = tables(torch.arange(T), config.H, config.theta, None, x.dtype)
    O = sdpa(rotate(Q, *rope), rotate(K, *rope), V)  # each head alone: nothing is sent
    Attn = einsum("O[B_X, T, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_X, T, D] {U_Y}", O, W["W_O"])
    return reduce_scatter("Attn[B_X, T, D] {U_Y} -> Attn[B_X, T_Y, D]", Attn, mesh)  # on the critical path


def mlp(W, x, mesh):
    """x[B_X, T_Y, D] -> Out[B_X, T_Y, D]."""
    y = all_gather("y[B_X, T_Y, D] -> y[B_X, T, D]", rms_norm(x, eps=config.eps), mesh)  # on the critical path
    Tmp = einsum("y[B_X, T, D] * W_in[D, F_Y] -> Tmp[B_X, T, F_Y]", y, W["W_in"])
    Gate = einsum("y[B_X, T, D] * W_gate[D, F_Y] -> Gate[B_X, T, F_Y]", y, W["W_gate"])
    Out = einsum("Act[B_X, T, F_Y] * W_out[F_Y, D] -> Out[B_X, T, D] {U_Y}", F.silu(Gate) * Tmp, W["W_out"])
    return reduce_scatter("Out[B_X, T, D] {U_Y} -> Out[B_X, T_Y, D]", Out, mesh)  # on the critical path


def layer(W, x, mesh):
    W = gathered(W, mesh)
    x = x + attention(W, x, mesh)
    return x + mlp(W, x, mesh)


# %% [markdown]
# The layer must equal the library's own layer on one device, in the result, dx and every leaf's gradient. `trace`
# records what is sent and computed, forward and backward.


# %%
def whole_layer(W, x):
    """Compute the library's own layer on one device; its norms have gains, which are ones here."""
    ones = {"norm_attn": torch.ones(config.D).double(), "norm_mlp": torch.ones(config.D).double()}
    rope = tables(torch.arange(T), config.H, config.theta, None, x.dtype)
    x = x + model.attention_block(W | ones, x, sdpa, rope, config)
    return x + model.mlp_block(W | ones, x, config)


def one_layer(mesh) -> dict:
    types = SPECS | {"dx": SPECS["x"]}
    whole, own = operands(types, config.sizes | {"B": B, "T": T}, mesh, page.args.seed, 1 / 4)
    (x, dx), (own_x, own_dx) = ((arrays.pop("x"), arrays.pop("dx")) for arrays in (whole, own))
    want, pull = vjp(whole_layer, whole, x)
    want_W, want_x = pull(dx)
    with trace() as forward:
        Out, pull = vjp(lambda W, x: layer(W, x, mesh), own, own_x)
    with trace() as backward:
        dW, dIn = pull(own_dx)
    got, wanted = tree.unshard(dW | {"x": Out, "dx": dIn}, types, mesh), want_W | {"x": want, "dx": want_x}
    differences = [(name, difference(x, wanted[name], mesh), LIMIT) for name, x in got.items()]
    return {"forward": lines(forward), "backward": lines(backward), "differences": differences}


result = page.on_ranks(one_layer)
title = f"Forward on X={X}, Y={Y}, as rank 0 ran it: B={B} T={T} D={config.D} F={config.F} N={config.N}, float64"
show_lines(page, title, result["forward"])

# %% [markdown]
# ## The backward, derived
# These lines are written nowhere: each is the transpose of a line above, from the last to the first, by the law of
# cotangents. An AllGather becomes a ReduceScatter, so the gradients of the weights come out as shards, and a
# ReduceScatter becomes an AllGather. (The transposes of the products are torch's own and are not listed.)

# %%
show_lines(page, "The backward pass, as torch.func.vjp ran it", result["backward"])
page.title("The result, the gradient of each weight, and dx, whole, against one device's")
page.equal(result["differences"])

# %% [markdown]
# ## The whole model, on any mesh
# `scaling.strategies.transformer` adds what a model has around its layers: embedding and loss with the vocabulary over
# Y (no rank ever has all logits of a token), fewer KV heads than Y, stages, context and experts. One text serves every
# mesh, because an axis that the mesh lacks drops out of the lines. P is the axis of pods, Z of pipeline stages, and C
# of the sequence. Compare the bytes of the same model and batch: two axes of two ranks need fewer than one axis of
# four, because each collective then moves only a part, and two stages need the fewest.

# %%
n = X * Y
MESHES = [{"X": n}, {"Y": n}, {"X": X, "Y": Y}, {"C": X, "Y": Y}, {"Z": X, "Y": Y}, {"P": X, "X": Y}]
MESHES = MESHES[:: 2 if page.small else 1]


def whole_model():
    """Return the params, tokens and weights of a problem with uneven weights, one row of them 0."""
    rng = torch.Generator().manual_seed(page.args.seed)
    b, t = 2 * n, 8 * n
    tokens = torch.randint(0, V, (b, t + 1), generator=rng)
    weights = torch.rand(b, t, generator=rng, dtype=torch.float64)
    weights[0] = 0
    params = model.init(config.with_(N=4 * n, K=2, L=2 * X), page.args.seed, torch.float64)
    return params, tokens, weights


def on_meshes(mesh):
    params, tokens, weights = whole_model()
    used = config.with_(N=4 * n, K=2, L=2 * X)
    grads, loss = grad_and_value(lambda p: model.loss(p, tokens, config=used, weights=weights))(params)
    rows = []
    for sizes in MESHES:
        at = Mesh(sizes, mesh.device, mesh.checked)
        local = [tree.shard(x.contiguous(), str(present("t[B_PX, T_C]", at)), at)
                 for x in (tokens[:, :-1], tokens[:, 1:], weights)]  # fmt: skip
        own = transformer.shard(params, used, at)
        with trace() as log:
            got, dparams = transformer.loss_and_grads(own, *local[:2], used, at, weights=local[2], microbatches=2)
        whole = transformer.unshard(dparams, used, at)
        off = difference(got, loss, mesh), difference(whole, grads, mesh)
        rows.append((", ".join(f"{a}={s}" for a, s in sizes.items()), *off, log.wire_bytes))
    return rows


page.title("Loss and the worst gradient leaf against one device: K=2, 2 microbatches")
rows = page.on_ranks(on_meshes)
page.table([(at, f"{a:.0e}", f"{b:.0e}", format_number(sent), page.check(at, largest((a, b)) < LIMIT))
            for at, a, b, sent in rows], ["mesh", "loss", "gradients", "bytes sent by rank 0", "equal"])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `Attn[B_X, T_Y, D]", Attn, mesh)` by `Attn[B_X, T_Y, D]", Attn, mesh, op="mean")`: a mean over the
#    heads' ranks where their sum belongs. What finds it?
#    Answer: Run as a script, the chapter is refused before a rank starts: the parts of a sum are added, not averaged.
#    In a notebook, which is not judged, all that depends on attention says NO, the result and its gradients.
# 2. Question: what is the type of W_K where Y = 4 does not divide the K = 2 heads? Evaluate
#    `transformer.specs(config.with_(K=2), {"X": 2, "Y": 4})["layers"]["W_K"]`.
#    Answer: `W_K[L, D_X, K, H]`: it is whole over Y. Each rank along Y has the terms of its own queries, so the
#    gradient is reduced over Y.
# 3. Flag: run with `--mesh X=1,Y=4`: which of the lines still send?
#    Answer: Those over Y. The AllGathers of weights are listed, but X has one rank, so each weight is whole along D
#    already.
