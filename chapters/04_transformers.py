# %% [markdown]
"""Part 4, All the Transformer Math You Need to Know: params, FLOPs and bytes of a Transformer, by formula and counted.
https://jax-ml.github.io/scaling-book/transformers

Every formula is compared with a real functional transformer: torch counts its operations as they run forward and
backward, and its params are its leaves. The last sections follow the share of attention. Checkpointing, caches and the
problems are in 04_problems.py.
"""

# %% [markdown]
# ## Why count?
# How long does a training step take, how many chips does it need, and which part of the model is worth making faster?
# All of this follows from three numbers: the params, which have to be stored and moved; the FLOPs, which have to be
# computed; and the bytes of the activations. They follow from the shapes of a layer's arrays alone, so one can answer
# before anything is trained. What one gives up is everything that is not a product of matrices: norms, softmax and
# activation functions cost few FLOPs, and are left out.
#
# These are the two blocks of a layer, attention and MLP, with the names of their weights:
#
#     x[B, T, D] - norm -+- W_Q[D, N, H] - Q -+
#                        +- W_K[D, K, H] - K -+- softmax(Q K) V - W_O[N, H, D] - added to x
#                        +- W_V[D, K, H] - V -+
#
#     x[B, T, D] - norm -+- W_in1[D, F] ----------+
#                        +- W_in2[D, F] - silu ---+- their product - W_out[F, D] - added to x
#
# B is the number of sequences, T their length, D the width of the stream x between the blocks, and F that of the MLP
# inside. Of each token N query heads and K heads of keys and values are computed, H wide, so G = N/K queries share a
# key. S is the number of keys, T again unless there is a cache. V is the size of the vocabulary, L the number of
# layers.

# %%
import math
import re
from functools import partial

import optree
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import MODELS, get
from scaling.cost import transformer as tm
from scaling.models import transformer
from scaling.models.attention import dot_product_attention

page = Page(__doc__, plot=True)


def counted(f, *args) -> dict[str, int]:
    """Return the FLOPs of a call by operator, as torch counts them while it runs."""
    with FlopCounterMode(display=False) as counter:
        f(*args)
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


# %% [markdown]
# ## Counting dots
# A contraction multiplies and adds once for each combination of its indices, so its FLOPs are twice the product of all
# its dims, where each dim counts once, whether both operands have it or one. Look at the last column: the FLOPs of a
# matmul grow faster than the numbers it reads, but the FLOPs of a dot product grow with them. That is why Transformers
# are made of matmuls.

# %%
CONTRACTIONS = [
    ("x[P] . y[P]", "p,p->", (1024,), (1024,)),
    ("A[N, P] x[P]", "np,p->n", (512, 1024), (1024,)),
    ("A[N, P] B[P, M]", "np,pm->nm", (512, 1024), (1024, 256)),
    ("C[GH, IJ, KL] D[GH, MN, KL]", "ghijkl,ghmnkl->ghijmn", (2, 3, 4, 5, 6, 7), (2, 3, 8, 9, 6, 7)),
]
page.title("Counting dots")
rows = []
for name, equation, *shapes in CONTRACTIONS:
    flops, numbers = tm.einsum_flops(equation, *shapes), sum(math.prod(shape) for shape in shapes)
    rows.append((name, equation, flops, numbers, f"{flops / numbers:.1f}"))
page.table(rows, ["contraction", "einsum", "FLOPs", "numbers read", "FLOPs a number"])

# %% [markdown]
# ## Transformer accounting, operation by operation
# The table has each operation of a layer, with the book's formulas for its FLOPs in training and its params. Why 6? The
# forward computes one product, 2 FLOPs for each term. The backward computes two of the same size, the gradients of both
# operands. So a param costs 6 FLOPs for each token, 2 of them in the forward. torch counts the FLOPs while the einsum
# and its two gradients run, on sizes that are all different.

# %%
SIZE = {"B": 2, "T": 5, "S": 7, "D": 12, "F": 20, "N": 6, "K": 3, "G": 2, "H": 4, "V": 11}
OPERATIONS = [  # part, operation, einsum, train FLOPs, params
    ("MLP", "A[B,T,D] W_in1[D,F]", "btd,df->btf", "6BTDF", "DF"),
    ("", "A[B,T,D] W_in2[D,F]", "btd,df->btf", "6BTDF", "DF"),
    ("", "A[B,T,F] W_out[F,D]", "btf,fd->btd", "6BTDF", "DF"),
    ("attention", "A[B,T,D] W_Q[D,N,H]", "btd,dnh->btnh", "6BTDNH", "DNH"),
    ("", "A[B,T,D] W_K[D,K,H]", "btd,dkh->btkh", "6BTDKH", "DKH"),
    ("", "A[B,T,D] W_V[D,K,H]", "btd,dkh->btkh", "6BTDKH", "DKH"),
    ("", "A[B,T,N,H] W_O[N,H,D]", "btnh,nhd->btd", "6BTDNH", "DNH"),
    ("dot product", "Q[B,T,K,G,H] K[B,S,K,H]", "btkgh,bskh->btskg", "6BTSNH", ""),
    ("", "S[B,T,S,K,G] V[B,S,K,H]", "btskg,bskh->btkgh", "6BTSNH", ""),
    ("vocabulary", "A[B,T,D] W_unembed[D,V]", "btd,dv->btv", "6BTDV", "DV"),
]


def value(monomial: str) -> int:
    """Return the value of the book's "6BTDNH" at these sizes."""
    number, letters = re.fullmatch(r"(\d*)([A-Z]*)", monomial).groups()
    return int(number or 1) * math.prod(SIZE[letter] for letter in letters)


def train(equation: str) -> int:
    """Count the FLOPs of an einsum and of the gradients of both operands."""
    operands = [torch.ones([SIZE[x.upper()] for x in dims]) for dims in equation.split("->")[0].split(",")]
    return sum(counted(lambda: torch.func.grad(lambda *xs: torch.einsum(equation, *xs).square().sum() / 2,
                                               argnums=(0, 1))(*operands)).values())  # fmt: skip


page.title("The operations of a layer: train FLOPs and params")
found = {equation: train(equation) for _, _, equation, *_ in OPERATIONS}
rows = []
for part, operation, equation, flops, params in OPERATIONS:
    same = page.check(f"{operation}: FLOPs", found[equation] == value(flops))
    shape = re.search(r"W_\w+\[(.*)\]", operation)
    leaf = math.prod(SIZE[dim] for dim in shape[1].split(",")) if shape else 0
    page.check(f"{operation}: params", not params or leaf == value(params))
    rows.append((part, operation, flops, value(flops), found[equation], same, params))
page.table(rows, ["", "operation", "the book's", "value", "counted", "same", "params"])

# %% [markdown]
# ## Params and FLOPs of models
# The same formulas describe real models. They are compared with the functional transformer on meta tensors, which have
# shapes but no data. Active params are those that one token uses: a model with experts uses a few of them (05_moe.py).
# Look at how small a part of the params belongs to attention. The KV cache, the keys and values that a model keeps of
# each token while it generates text, is in bf16. The FLOPs of training over 6 x params x tokens (6PT) are near 1,
# because nearly all FLOPs are products with params. They are more where the model is small or has as many heads as
# deepseek-v3 (1.25), so that the products of queries and keys, which have no params, count.

# %%
B, T = 1, 4096
page.title(f"Models, T = {T}")
rows = []
for name, config in MODELS.items():
    parts, flops, verdict = tm.params(config), tm.forward_flops(config, B, T), "-"
    if transformer.computes(config):
        leaves = optree.tree_leaves(transformer.init(config, device="meta"))
        verdict = page.check(f"{name}: params", sum(leaf.numel() for leaf in leaves) == sum(parts.values()))
        if not config.moe:  # which expert computes what depends on the tokens: no FLOPs on meta tensors
            two = config.with_(L=2, window=config.windows[:2])  # counting walks every layer, and two are enough
            tokens = torch.zeros(B, T, dtype=torch.long, device="meta")
            ran = counted(partial(transformer.forward, config=two), transformer.init(two, device="meta"), tokens)
            same = sum(ran.values()) == sum(tm.forward_flops(two, B, T).values())
            verdict += f", {page.check(f'{name}: FLOPs', same)}"
    total, active = sum(parts.values()), tm.num_params(config, active=True)
    ratio = 3 * sum(flops.values()) / tm.rule_of_thumb(config, B * T)
    share = [f"{parts[part] / total:.0%}" for part in ("mlp", "attention")]
    kv = f"{tm.kv_cache_bytes(config) / 1e3:,.0f}"
    rows.append((name, f"{total / 1e9:,.2f}", f"{active / 1e9:,.2f}", *share, kv, f"{ratio:.3f}", verdict))
page.table(rows, ["model", "params\n1e9", "active\n1e9", "MLP", "atten-\ntion", "KV kB a\ntoken", "FLOPs\n/6PT",
                  "counted:\nparams, FLOPs"])  # fmt: skip

# %% [markdown]
# ## Fractional cost of attention with context length
# When does attention dominate? The dot products take 12BT^2NH FLOPs, and all other matmuls of the layer 18BTDF and
# 24BTDNH. With F = 4D and NH = KH = D these are 12BT^2D and 96BTD^2, and the first over the second is T/(8D). So a wide
# model can have long contexts before attention costs as much as the rest. The points are counted on a small
# transformer, D = 64, as the FLOPs of batched matmuls (scores and values) over the FLOPs of the other matmuls.


# %%
def proportioned(D: int, heads: int = 128):
    """Return a config of this width with the book's proportions: F = 4D, NH = KH = D."""
    return get("part4-q1").with_(D=D, F=4 * D, N=D // heads, K=D // heads, H=heads)


narrow = proportioned(64, 16).with_(L=1, V=16)
points, tree = [], transformer.init(narrow, device="meta")
for length in (64, 512, 2048):
    by_op = counted(lambda *a: transformer.forward(*a, attention=dot_product_attention), tree,
                    torch.zeros(1, length, dtype=torch.long, device="meta"))  # fmt: skip
    scores = sum(flops for op, flops in by_op.items() if "bmm" in op)
    others = sum(by_op.values()) - scores - 2 * length * narrow.D * narrow.V
    points.append((length, scores / others))
    page.check(f"attention over the rest, T = {length}", math.isclose(points[-1][1], length / (8 * 64), rel_tol=1e-9))
Ts = [2**i for i in range(5, 19)]
page.chart(
    "attention", {f"D = {D}": [(T, tm.attention_fraction(proportioned(D, 64 if D == 64 else 128), T)) for T in Ts]
                  for D in (64, 4608, 8192)},
    "context T", "attention FLOPs / other matmuls", "T/(8D): where attention dominates",
    points={"counted, D = 64": points}, height=14,
    marks=[("y", 1, "as much as the rest"), ("x", 8 * 8192, "T = 8 x 8192")],
)  # fmt: skip


# %% [markdown]
# ## What should you take away from this section?
# The formulas sum up to the book's table of takeaways, for multi-head attention (MHA, K = N). Each row is the
# difference between two layers and one, counted on the transformer. The dot products overtake the MLP in FLOPs at T =
# 6D, and MLP and projections together at T = 8D, where 6 x params x tokens is half of the FLOPs. Far below, it is a
# good estimate.

# %%
layer = get("part4-q1").with_(D=256, F=1024, N=4, K=4, H=64, V=64)
B, T = 2, 64
one, two = (transformer.init(layer.with_(L=L), device="meta") for L in (1, 2))
tokens = torch.zeros(B, T + 1, dtype=torch.long, device="meta")
ran = [
    counted(lambda t=t: torch.func.grad(transformer.loss)(t, tokens, "none", dot_product_attention)) for t in (one, two)
]
scores = [sum(flops for op, flops in by_op.items() if "bmm" in op) for by_op in ran]
rest = [sum(by_op.values()) - score for by_op, score in zip(ran, scores, strict=True)]
leaves = {name: leaf[0].numel() for name, leaf in two["layers"].items()}
D, F, N, H, V, BT = layer.D, layer.F, layer.N, layer.H, layer.V, B * T
page.title(f"Takeaways, D={D}, F={F}, N=K={N}, H={H}, {B} sequences of {T}")
page.same([
    ("MLP: params", "3DF", 3 * D * F, sum(leaves[x] for x in ("W_in", "W_gate", "W_out"))),
    ("attention: params", "4DNH", 4 * D * N * H, sum(leaves[f"W_{x}"] for x in "QKVO")),
    ("other: params", "2D", 2 * D, sum(n for x, n in leaves.items() if "norm" in x)),
    ("vocabulary: params, once", "DV", D * V, two["unembed"].numel()),
    ("MLP and projections: train FLOPs", "18BTDF + 24BTDNH", 18 * BT * D * F + 24 * BT * D * N * H, rest[1] - rest[0]),
    ("dot products: train FLOPs", "12BT^2NH", 12 * BT * T * N * H, scores[1] - scores[0]),
    ("vocabulary: train FLOPs, once", "6BTDV", 6 * BT * D * V, 2 * rest[0] - rest[1]),
], ["of a layer", "formula", "value", "counted"])  # fmt: skip

# %% [markdown]
# The rules of thumb are 6 FLOPs a param and token in training, and the T from which the dot products of attention cost
# as much as the rest.

# %%
A, B = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
forward = sum(counted(torch.matmul, A, B).values())
both = sum(counted(lambda: torch.func.grad(lambda A, B: (A @ B).sum(), argnums=(0, 1))(A, B)).values())
v3 = get("deepseek-v3")
page.answers([
    Answer("Forward FLOPs of a matmul over NPM", "2", forward / (64 * 32 * 16), "", "counted"),
    Answer("Backward over forward FLOPs of a matmul", "2", (both - forward) / forward, "times", "counted"),
    Answer("Training over NPM", "6", both / (64 * 32 * 16), "", "counted"),
    Answer("T = 8D where attention dominates, D = 8192", "64", tm.attention_crossover(proportioned(8192)) / 1024, "Ki"),
    Answer("Takeaways: the MLP dominates the FLOPs up to T over D", "8", 18 * F / (12 * D), "", "F = 4D",
           erratum="12BT^2NH is 18BTDF at T = 6D; at 8D it is all other matmuls of the layer"),
    Answer("T = 8D for D = 4608, which the book calls Gemma 27B", "37e3", tm.attention_crossover(proportioned(4608)),
           "tokens"),
    Answer("Gemma 2 27B as it is: attention as much as the rest at", "", tm.attention_crossover(get("gemma2-27b")),
           "tokens", "(3DF + 2D(N+K)H) / (2NH), windows aside: its MLP is 8D wide, and NH = 4096 < D"),
    Answer("FLOPs of the vocabulary over BTDV", "12", (2 * rest[0] - rest[1]) / (BT * D * V), "", erratum=
           "6BTDV, as in the section before: the embedding is a look-up, no matmul"),
    Answer("DeepSeek-V3's sparsity E/k lies in 8 to 64", "yes", "yes" if 8 <= v3.E / v3.k <= 64 else "no"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `"N": 6, "K": 3, "G": 2` by `"N": 6, "K": 3, "G": 1`. Why do the formulas of the dot products not
#    match the counts any more, though the formulas of the projections do?
#    Answer: G must be N/K = 2. With G = 1 the einsum has K G = 3 heads and the formula N = 6, so it counts twice what
#    runs. The projections have N and K of their own and no G.
# 2. Question: how many params does LLaMA-3 8B have without its two vocabulary matrices? Evaluate
#    `tm.num_params(get("llama3-8b")) - tm.params(get("llama3-8b"))["vocab"]`.
#    Answer: 7.0 billion: its vocabulary of 128,256 words has a billion params, half of them for the look-up.
# 3. Flag: run with `--plot share.svg`. How many times as much as the rest is attention at T = 2^18 for D = 8192?
#    Answer: 4 times, T/(8D) = 2^18 / 2^16.
