# %% [markdown]
"""Part 5, latent attention: how DeepSeek-V2 and V3 train it on a mesh, beyond the book.
https://jax-ml.github.io/scaling-book/training

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) projects the stream down to low ranks, once for
the queries and once for keys and values together. The second of these latents, and one rotary part K_R of the keys that
all heads share, are all that a cache has to store. With heads over Y, K_R is replicated, and its gradient is a partial
sum on every rank.
"""

# %% [markdown]
# ## Why low ranks?
# A cache of keys and values takes 2 N H numbers per token and layer, 32,768 in DeepSeek-V3, and reading caches is what
# bounds decoding. Grouped heads save memory by having fewer keys than queries, at some loss of quality. Latent
# attention keeps all heads, and computes their keys and values from one small vector per token, the latent: 576 numbers
# are cached instead of 32,768.
#
# The price is a longer chain of products, down to the latent and up to the heads, and a layout that does not suit
# heads: all heads share the latent, so if the heads are split over Y, each rank has a copy of it. Where caches are
# short, or serving is not the aim, plain heads are simpler. (B sequences have T tokens of D numbers, N is the number of
# heads and H the width of a head's output.)

# %%
import torch

from scaling import tree
from scaling.book.answers import Answer
from scaling.book.arrays import operands
from scaling.book.listing import difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, shard
from scaling.configs import Config, Latent, get
from scaling.cost import transformer as tm
from scaling.models.attention import sdpa
from scaling.models.latent import attended
from scaling.models.pointwise import rms_norm
from scaling.models.rope import tables
from scaling.models.transformer import attention_block
from scaling.spec import parse
from scaling.trace import trace

page = Page(__doc__, mesh="X=2,Y=2", seed=True)
X, Y = page.args.mesh["X"], page.args.mesh["Y"]
B, T, latent = 2 * X, 8 * Y, Latent(q_rank=6 * X, kv_rank=4 * X, nope=6, rope=4, value=8)
config = Config("tiny", L=1, D=16 * X, F=24, N=2 * Y, K=2 * Y, H=8, V=16, latent=latent)
SPECS = {
    "x": "x[B_X, T_Y, D]",
    "W_DQ": "W_DQ[D_X, R]",
    "W_DKV": "W_DKV[D_X, M]",
    "W_UQ": "W_UQ[R_X, N_Y, A]",
    "W_UKV": "W_UKV[C_X, N_Y, W]",
    "W_O": "W_O[N_Y, H, D_X]",
}
SIZES = config.sizes | {"B": B, "T": T}
LIMIT = 1e-11

# %% [markdown]
# ## The letters
# The queries' latent has R numbers, and the one for keys and values has C. A head's query and key have two parts:
# `nope` dims without rotary positions, and `rope` dims with them. A = nope + rope is the width of a query. From the
# latent each head computes W = nope + value numbers, its key without position and its value; the rotary part of the key
# is one vector K_R of I = rope numbers for all heads. So the cache stores M = C + rope numbers per token. In the names
# of weights D is down and U is up: W_DQ goes from the stream to the queries' latent, and W_UQ from there to the heads.
# Compare the widths of DeepSeek-V3: R and M together are less than a third of D, while all heads' queries have N A,
# more than three times D.

# %%
V3 = get("deepseek-v3")
ours, theirs = config.sizes, V3.sizes
page.title("Widths")
page.table([(dim, ours[dim], theirs[dim]) for dim in ("D", "R", "C", "M", "N", "A", "W", "H")],
           ["dim", "here", "DeepSeek-V3"])  # fmt: skip

# %% [markdown]
# ## Attention, line by line
# The products with W_DQ and W_DKV come first, while the stream is still split along the sequence, T_Y. So only their
# results are gathered over Y, R + M numbers per token instead of D. The rest is tensor parallelism: heads are split
# over Y, and each is computed alone.


# %%
def gathered(W, mesh):
    """Gather the weights along the dim that X splits, which can be done ahead of time."""
    return {
        "W_DQ": all_gather("W_DQ[D_X, R] -> W_DQ[D, R]", W["W_DQ"], mesh),
        "W_DKV": all_gather("W_DKV[D_X, M] -> W_DKV[D, M]", W["W_DKV"], mesh),
        "W_UQ": all_gather("W_UQ[R_X, N_Y, A] -> W_UQ[R, N_Y, A]", W["W_UQ"], mesh),
        "W_UKV": all_gather("W_UKV[C_X, N_Y, W] -> W_UKV[C, N_Y, W]", W["W_UKV"], mesh),
        "W_O": all_gather("W_O[N_Y, H, D_X] -> W_O[N_Y, H, D]", W["W_O"], mesh),
    }


# %% [markdown]
# The lines on the critical path follow. K_R comes out of the same product as C_KV, but it has no heads, so every rank
# along Y has the same K_R.


# %%
def attention(W, x, mesh):
    """x[B_X, T_Y, D] -> Attn[B_X, T_Y, D]."""
    y = rms_norm(x, eps=config.eps)
    A_Q = einsum("y[B_X, T_Y, D] * W_DQ[D, R] -> A_Q[B_X, T_Y, R]", y, W["W_DQ"])
    A_KV = einsum("y[B_X, T_Y, D] * W_DKV[D, M] -> A_KV[B_X, T_Y, M]", y, W["W_DKV"])
    C_Q, (C_KV, K_R) = rms_norm(A_Q, eps=1e-6), A_KV.split([latent.kv_rank, latent.rope], -1)
    C_Q = all_gather("C_Q[B_X, T_Y, R] -> C_Q[B_X, T, R]", C_Q, mesh)  # on the critical path
    C_KV = all_gather("C_KV[B_X, T_Y, C] -> C_KV[B_X, T, C]", rms_norm(C_KV, eps=1e-6), mesh)  # on the critical path
    K_R = all_gather("K_R[B_X, T_Y, I] -> K_R[B_X, T, I]", K_R, mesh)  # shared by all heads
    Q = einsum("C_Q[B_X, T, R] * W_UQ[R, N_Y, A] -> Q[B_X, T, N_Y, A]", C_Q, W["W_UQ"])
    KV = einsum("C_KV[B_X, T, C] * W_UKV[C, N_Y, W] -> KV[B_X, T, N_Y, W]", C_KV, W["W_UKV"])
    O = attended(Q, KV, K_R, sdpa, ROPE, config)  # rotates, joins K_R to each head's key, attends: nothing is sent
    Attn = einsum("O[B_X, T, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_X, T, D] {U_Y}", O, W["W_O"])
    return reduce_scatter("Attn[B_X, T, D] {U_Y} -> Attn[B_X, T_Y, D]", Attn, mesh)  # on the critical path


ROPE = tables(torch.arange(T), latent.rope, config.theta, None, torch.float64)

# %% [markdown]
# The derivative of `attention` needs no further lines, since each collective has its dual. What remains is to reduce
# the gradients of the gathered weights, off the critical path. A weight's gradient is unreduced over each axis that
# splits the tokens but not the weight. W_DQ and W_DKV multiply tokens that are split over Y as well, so their gradients
# are {U_XY}. All results must equal one device's.


# %%
def reduced(dW, mesh):
    """Reduce the gradients to the types of the weights, which nothing but the optimizer waits for."""
    A, M = "dW_DQ[D, R] {U_XY} -> dW_DQ[D, R] {U_X}", "dW_DKV[D, M] {U_XY} -> dW_DKV[D, M] {U_X}"
    dW |= {"W_DQ": all_reduce(A, dW["W_DQ"], mesh), "W_DKV": all_reduce(M, dW["W_DKV"], mesh)}
    return {
        "W_DQ": reduce_scatter("dW_DQ[D, R] {U_X} -> dW_DQ[D_X, R]", dW["W_DQ"], mesh),
        "W_DKV": reduce_scatter("dW_DKV[D, M] {U_X} -> dW_DKV[D_X, M]", dW["W_DKV"], mesh),
        "W_UQ": reduce_scatter("dW_UQ[R, N_Y, A] {U_X} -> dW_UQ[R_X, N_Y, A]", dW["W_UQ"], mesh),
        "W_UKV": reduce_scatter("dW_UKV[C, N_Y, W] {U_X} -> dW_UKV[C_X, N_Y, W]", dW["W_UKV"], mesh),
        "W_O": reduce_scatter("dW_O[N_Y, H, D] {U_X} -> dW_O[N_Y, H, D_X]", dW["W_O"], mesh),
    }


# %% [markdown]
# The inputs are random weights, x and dAttn in float64. They are compared with `scaling.models.transformer`, which the
# tests compare with Hugging Face's class for DeepSeek-V3.


# %%
def on_one_device(W, x):
    """Compute the library's block on one device; its norms have gains, which are ones here."""
    ranks = {"norm_attn": config.D, "norm_CQ": latent.q_rank, "norm_CKV": latent.kv_rank}
    return attention_block(W | {name: torch.ones(n).double() for name, n in ranks.items()}, x, sdpa, ROPE, config)


def compared(mesh):
    """Return (rows of differences from one device, the lines of both passes)."""
    types = {"Attn": SPECS["x"], "dx": SPECS["x"]} | {f"d{name}": text for name, text in SPECS.items() if name != "x"}
    whole, own = operands(SPECS | {"dAttn": SPECS["x"]}, SIZES, mesh, page.args.seed, 1 / 4)
    (x, dAttn), (own_x, own_dAttn) = ([arrays.pop(name) for name in ("x", "dAttn")] for arrays in (whole, own))
    Attn, pull = torch.func.vjp(on_one_device, whole, x)
    dW, dx = pull(dAttn)
    wanted = {"Attn": Attn, "dx": dx} | {f"d{name}": dW[name] for name in dW}
    with trace() as log:
        Attn, pull = torch.func.vjp(lambda W, x: attention(W, x, mesh), gathered(own, mesh), own_x)
        dW, dx = pull(own_dAttn)
    dW = reduced(dW, mesh)
    got = tree.unshard({"Attn": Attn, "dx": dx} | {f"d{name}": dW[name] for name in dW}, types, mesh)
    return [(name, difference(got[name], wanted[name], mesh), LIMIT) for name in got], lines(log)


rows, ran = page.on_ranks(compared)
over_y = [row for row in ran if row[1] and "_Y(" in row[0]]
show_lines(page, f"Sent over Y on X={X}, Y={Y}, both passes, float64", over_y, flops=False)
page.say()
page.equal(rows)

# %% [markdown]
# ## The gradient that is forgotten
# It is tempting to leave out the gather of the rotary keys, and to let every rank compute K_R of all tokens from a y
# that it has whole. The forward is the same, and nothing is sent. But each rank then differentiates through its own
# heads alone, so its dK_R is one term of a sum over Y. The type says so, and a line must reduce it. A published case is
# a model whose heads share keys: without this reduction its loss was 3.74 where 2.64 was right
# (github.com/bigcode-project/Megatron-LM/pull/37).

# %%
typed = parse("K_R[B_X, T, I]").cotangent(("Y",))
page.say(f"\nK_R[B_X, T, I] is replicated over Y; its cotangent is {typed}")


def shared_keys(mesh):
    """Return the differences of dK_R from one device's: of each rank's own, and after the AllReduce."""
    g = torch.Generator().manual_seed(page.args.seed)
    shapes = [(config.N, ours["A"]), (config.N, ours["W"]), (latent.rope,), (config.N, latent.value)]
    Q, KV, K_R, dO = (torch.randn(B, T, *shape, generator=g, dtype=torch.float64) for shape in shapes)
    wanted = torch.func.vjp(lambda K_R: attended(Q, KV, K_R, sdpa, ROPE, config), K_R)[1](dO)[0]
    Q, KV, dO = (shard("h[B, T, N_Y, H]", x, mesh) for x in (Q, KV, dO))
    (own,) = torch.func.vjp(lambda K_R: attended(Q, KV, K_R, sdpa, ROPE, config), K_R)[1](dO)
    total = all_reduce("dK_R[B, T, I] {U_Y} -> dK_R[B, T, I]", own, mesh)
    alone = difference(own, wanted, mesh)  # scaling: ignore[partial-plus-whole]
    return alone, difference(total, wanted, mesh)


alone, whole = page.on_ranks(shared_keys)
page.title("dK_R against one device's")
page.table([("each rank's own", f"{alone:.1e}"), ("reduced over Y", f"{whole:.1e}")], ["dK_R", "difference"])
page.check("a rank's own dK_R is wrong where heads are split, and the sum is right",
           (alone > 0.1) == (Y > 1) and whole < LIMIT)  # fmt: skip

# %% [markdown]
# ## Cost and savings
# Over Y, a rank gathers R + M numbers for each token instead of D, and scatters as many gradients in the backward,
# while the outputs of attention have D as always. The cache is where latent attention pays: in the last row, a key and
# a value for each head would take 57 times as many bytes.

# %%
R, C, M, D = (theirs[dim] for dim in "RCMD")
heads = V3.with_(latent=None)
page.answers([
    Answer("DeepSeek-V3: numbers of a token gathered over Y, compared with plain heads", "", (R + M) / D, "",
           "(R + M) / D"),
    Answer("... bytes over Y of a layer's attention, both passes, compared with plain heads", "",
           (2 * (R + M) + 2 * D) / (4 * D), "", "(2 (R + M) + 2 D) / 4 D"),
    Answer("Params of its attention, one layer", "", tm.attention_params(V3) / 1e6, "M",
           "D (R + M) + R N A + C N W + N H D"),
    Answer("... with a key and a value for each of 128 heads", "", tm.attention_params(heads) / 1e6, "M", "4 D N H"),
    Answer("Bytes of a token in the cache, bf16, all layers", "", tm.kv_cache_bytes(V3, 1, "bf16"), "", "2 L M"),
    Answer("... with keys and values", "", tm.kv_cache_bytes(heads, 1, "bf16") / tm.kv_cache_bytes(V3, 1, "bf16"),
           "times", "2 N H / M"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `all_reduce(A, dW["W_DQ"], mesh)` by `dW["W_DQ"]`. Whose gradient is wrong, and what finds it?
#    Answer: That of W_DQ: each rank along Y has the terms of its own tokens only. Run as a script, the chapter is
#    refused before a rank starts: the next line wants {U_X}, and the gradient is still {U_XY}. In a notebook, which is
#    not judged, the row of dW_DQ says NO.
# 2. Question: how wide may the latents be until gathering the stream is cheaper? Evaluate `D - M`.
#    Answer: 6,592 numbers for the queries' latent: with M = 576 for keys and values, both together then have D, and
#    nothing is saved over Y.
# 3. Flag: run with `--mesh X=1,Y=4`. Which lines are left?
#    Answer: All that are sent over Y. X has one rank, so the weights are not split and the gathers over X send
#    nothing.
