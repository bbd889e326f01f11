# %% [markdown]
"""Part 4, Miscellaneous Math and the problems: checkpointing, KV caches, attention's intensity, DeepSeek's MFU.
https://jax-ml.github.io/scaling-book/transformers

This chapter computes, counts and measures what a transformer saves for its backward pass and what it computes again,
sizes caches, and answers Questions 1 to 8. The operations of a layer, one by one, are in 04_transformers.py.
"""

# %%
from bisect import bisect_left

import optree
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.collectives import einsum
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.hardware import chip
from scaling.models import transformer
from scaling.models.attention import dot_product_attention
from scaling.models.remat import matmul_weight
from scaling.models.rope import tables
from scaling.spec import parse_line
from scaling.trace import trace

page = Page(__doc__, plot=True)
V5E, ALPHA = chip("v5e"), chip("v5e").intensity("hbm")  # 240 FLOPs a byte


def counted(f, *args) -> int:
    """Return the FLOPs of a call, as torch counts them while it runs."""
    with FlopCounterMode(display=False) as counter:
        f(*args)
    return counter.get_total_flops()


# %% [markdown]
# ## Gradient checkpointing
# The backward pass needs activations of the forward pass, for every token of the batch and in every layer. With a large
# batch these are more than all params. Gradient checkpointing (remat) saves fewer of them and computes the others
# again, so it trades FLOPs for memory. `block` saves only the input of each layer, `matmuls` the results of the
# products with weights, and `none` is the step without remat, which saves everything.
#
# The table compares formulas with a small transformer. A step without remat has 6 FLOPs for each param and token, 2 in
# the forward and 4 in the backward; to compute the forward again adds 2. The FLOPs are counted, and written such that
# the step without remat has 6. The saved tensors are measured, in numbers a token, as the difference between two layers
# and one. For `none` this may differ from the formula by a few percent, because autograd saves some small arrays, too.
# Recomputing everything would be 8; it is 7.9, since the unembedding is not recomputed.

# %%
small = get("part4-q1").with_(name="small", L=4, D=64, F=256, N=8, K=8, H=8, V=256)
batch, length = 2, 16 if page.small else 32


def weigh(remat: str) -> float:
    """Return the elements per token that autograd saves for a layer's backward pass: two layers' minus one layer's."""
    params = optree.tree_map(lambda p: p.requires_grad_(), transformer.init(small))
    own = {leaf.untyped_storage()._cdata for leaf in optree.tree_leaves(params)}

    def held(layers: int) -> int:
        storages = {}

        def pack(x):
            storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        shallow = params | {"layers": {name: p[:layers] for name, p in params["layers"].items()}}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = transformer.forward(shallow, torch.zeros(batch, length, dtype=torch.long), remat)
        return sum(s.nbytes() for key, s in storages.items() if key not in own) // out.element_size()

    return (held(2) - held(1)) / (batch * length)


params = transformer.init(small, device="meta")
tokens = torch.zeros(batch, length + 1, dtype=torch.long, device="meta")
page.title(f"A transformer of D=64, F=256, 8 heads, {batch} x {length} tokens")
rows, steps = [], {}
for remat in tm.REMAT:
    formula = sum(tm.train_flops(small, batch, length, remat=remat).values())
    steps[remat] = counted(lambda remat=remat: torch.func.grad(transformer.loss)(params, tokens, remat))
    width, held = sum(tm.saved_widths(small, remat).values()), weigh(remat)
    near = abs(held / width - 1) < 0.06 if remat == "none" else held == width
    verdict = page.check(f"remat {remat}", steps[remat] == formula and near)
    times = f"{6 * steps[remat] / steps['none']:.2f}"
    rows.append((remat, formula, steps[remat], times, f"{width / small.D:.2f}", f"{held / small.D:.2f}", verdict))
page.table(
    rows, ["remat", "FLOPs,\nformula", "counted", "where none\nis 6", "saved / D,\nformula", "measured", "equal"]
)

# %% [markdown]
# ## The text's numbers
# The book's example has 4M tokens and 64 layers of width 8192. It counts about 20 arrays a layer. How many autograd
# saves depends on F, and with F = 4D there are more. To generate text, a model keeps the keys and values of all earlier
# tokens, its KV cache: one key and one value of H numbers for each token, layer and KV head. That is possible because
# of the causal mask: no later token changes the keys and values of an earlier one.


# %%
big, million = get("part4-q1").with_(D=8192, F=4 * 8192, N=64, K=64), 4_000_000  # F = 4D, NH = KH = D
seen = []  # a layer's products with weights, in order


def noted(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    seen.append(tuple(weight.shape))
    return matmul_weight(y, weight)


layer, x = {name: leaf[0] for name, leaf in params["layers"].items()}, torch.zeros(1, 4, small.D, device="meta")
rope = tables(torch.arange(4, device="meta"), small.H, small.theta, small.rope_scaling, x.dtype)
transformer.attention_block(layer, x, dot_product_attention, rope, small, noted)
transformer.mlp_block(layer, x, small, noted)
cache = torch.empty(2, 8192, 64, 64, 128, dtype=torch.int8, device="meta")  # [2, S, L, K, H]
ratio = cost.all_to_all(1e9, chip("v5p"), 16) / cost.all_gather(1e9, chip("v5p"), 16)
page.answers([
    Answer("Full activations, 20 arrays of width D a layer", "84",
           cost.checkpoint_bytes(4e6, [8192] * 20, 64) / 1e12, "TB"),
    Answer("Full activations by what autograd holds, F = 4D", "", tm.saved_bytes(big, million, "none") / 1e12, "TB",
           f"{sum(tm.saved_widths(big, 'none').values()) / big.D:.1f} D a token and layer"),
    Answer("Block remat, 1 array a layer", "4.2", tm.saved_bytes(big, million, "block") / 1e12, "TB"),
    Answer("Block remat: FLOPs, where none is 6", "8", 6 * steps["block"] / steps["none"], "", "counted above"),
    Answer("Big matmuls only: products with weights a layer", "7", len(seen), "", "counted as a layer runs"),
    Answer("Big matmuls only, F = 4D", "", tm.saved_bytes(big, million, "matmuls") / 1e12, "TB",
           f"{sum(tm.saved_widths(big, 'matmuls').values()) / big.D:.0f} D a token and layer: two are F wide"),
    Answer("KV cache of 8k tokens in int8, L = 64, KH = 8192", "8", cache.nbytes / 2**30, "GiB"),
    Answer("AllToAll over AllGather on a bidirectional ring", "0.25", ratio, "times"),
])  # fmt: skip
page.say()
page.same([("KV cache", "2SLKH", 2 * 8192 * 64 * 8192, tm.kv_cache_bytes(big, 8192, "int8"))],
          ["8k tokens in int8", "formula", "value", "by the config"])  # fmt: skip


# %% [markdown]
# ## Questions 1 to 3
# Params and caches follow from formulas; the FLOPs of a sharded and of a general contraction are traced and counted. In
# Question 2, the product does not use the axis Z, so the computation is repeated along it, and the devices together do
# Z times the necessary work.

# %%
q1 = get("part4-q1")
parts = tm.params(q1)
line, mesh, sizes = "A[B_X, D_Y] * W[D_Y, F] -> C[B_X, F] {U_Y}", {"X": 4, "Y": 8, "Z": 4}, {"B": 64, "D": 128, "F": 32}
with trace() as log:
    einsum(line, *(torch.empty(s.local_shape(sizes, mesh), device="meta") for s in parse_line(line).operands))
whole = 2 * sizes["B"] * sizes["D"] * sizes["F"]
shapes = (2, 3, 4, 5), (2, 3, 6, 7, 8)
general = counted(lambda: torch.einsum("ijkl,ijmno->klmno", *(torch.ones(shape) for shape in shapes)))
page.answers([
    Answer("1 params", "16e9", tm.num_params(q1), "params", rounded=(
        64 * (3 * 4e3 * 16e3 + 4 * 4e3 * 4e3 + 2 * 4e3) + 2 * 4e3 * 32e3, "4e3 for 4096, 16e3 for 16384")),
    Answer("1 attention's share of a layer's params", "0.25", parts["attention"] / (parts["attention"] + parts["mlp"])),
    Answer("1 KV cache a token, int8", "512", tm.kv_cache_bytes(q1, 1, "int8") / 1024, "KiB"),
    Answer("2 FLOPs of all devices over 2BDF: Z", "4", log.flops * 4 * 8 * 4 / whole, "times", "traced"),
    Answer("2 FLOPs of a device: 2BDF over XY", "32", whole / log.flops, "", "traced"),
    Answer("3 FLOPs over IJKLMNO", "2", general / (2 * 3 * 4 * 5 * 6 * 7 * 8), "", "counted"),
])  # fmt: skip

# %% [markdown]
# ## Question 4: the intensity of attention
# Does attention use the chip well? Let T queries attend to S keys, with G query heads for each KV head. A kernel that
# keeps its scores on the chip reads Q, K and V and writes O once, which makes TSG/(TG + S) FLOPs per byte. In prefill,
# when a whole prompt is read and T = S, this grows with the context. In decoding, where each sequence has one new token
# and T = 1, it stays below G, far less than a chip needs. The plot compares the time of attention with that of the MLP,
# by roofline, for LLaMA-3 70B on a v5e. In decoding, all sequences of a batch share the weights of the MLP, but each
# reads a cache of its own, so attention overtakes the MLP at one or two thousand tokens.


# %%
def relative_cost(T: int, batch: int = 240) -> tuple[float, float]:
    """Return the time of attention over that of the MLP at a context of T: in prefill, and in decoding `batch`
    sequences."""
    config = get("llama3-70b")
    C, W = V5E.flops(), V5E.need("hbm_bw")
    flops = tm.forward_flops(config.with_(L=1), 1, T, causal=True)
    moved = 2 * (2 * T * config.N + 2 * T * config.K) * config.H
    weights = 2 * config.matrices * config.D * config.F
    prefill = cost.roofline(flops["attention"], moved, C, W).lower / cost.roofline(flops["mlp"], weights, C, W).lower
    read = batch * tm.kv_cache_bytes(config.with_(L=1), T)
    attention = cost.roofline(batch * 4 * T * config.N * config.H, read, C, W).lower
    return prefill, attention / cost.roofline(batch * 2 * config.matrices * config.D * config.F, weights, C, W).lower


def compute_bound_from(G: int) -> int:
    """Return the shortest S = T whose prefill has v5e's critical intensity."""
    return next(S for S in range(1, 10**5) if tm.attention_intensity(S, S, G) >= ALPHA)


def as_much(which: int) -> int:
    """Return the context at which attention takes as long as the MLP: in prefill (0) or in decoding (1)."""
    return 1 + bisect_left(range(1, 2**22), True, key=lambda T: relative_cost(T)[which] >= 1)


# %% [markdown]
# First the ratio by context, in prefill and in decoding; then both intensities by formula; then the answers.

# %%
contexts = [2**i for i in range(8, 20)]
page.chart(
    "question-4", {name: [(T, relative_cost(T)[i]) for T in contexts] for i, name in
                   enumerate(("prefill, causal", "decoding 240 sequences"))},
    "context", "time of attention / time of the MLP", "Question 4: LLaMA-3 70B on a v5e", height=12,
    marks=[("y", 1, "as long as the MLP"), *(("x", as_much(i), f"T = {as_much(i):,}") for i in (0, 1))],
)  # fmt: skip
page.say()
page.same([
    ("prefill, T = S = 1000, G = 8", "TG/(G + 1)", 1000 * 8 / 9, tm.attention_intensity(1000, 1000, 8)),
    ("decoding, T = 1, S = 8192, G = 8", "SG/(S + G)", 8192 * 8 / (8192 + 8), tm.attention_intensity(1, 8192, 8)),
], ["intensity, FLOPs a byte", "formula", "value", "4BTSNH over bytes"])  # fmt: skip
page.answers([
    Answer("4 decoding: intensity for S = 2^20, G = 8 (-> G)", "8", tm.attention_intensity(1, 2**20, 8), "FLOPs/B"),
    Answer("4 prefill is compute-bound from S =", "240", compute_bound_from(1), "tokens", erratum=
           "of one query head a KV head: 240 (G + 1)/G, which is 240 for many heads a KV head only"),
    Answer("4 prefill with G = 8 is compute-bound from S =", "", compute_bound_from(8), "tokens", "240 (G + 1)/G"),
    Answer("4 prefill: attention takes as long as the MLP at T =", "", as_much(0), "tokens",
           "4 T/2 N H = 2 3 D F: a causal mask counts half"),
    Answer("4 decoding 240: attention takes as long as the MLP at T =", "", as_much(1), "tokens",
           "both wait for HBM: 240 caches of 4 T K H bytes for 6 D F bytes of weights"),
])  # fmt: skip

# %% [markdown]
# ## Questions 5 to 8
# Question 5 asks when attention costs as much as its projections, and Question 6 what it costs to compute it again,
# which is counted while a step runs with and without remat. Question 7 compares the FLOPs that DeepSeek-V3 needed with
# those that its GPUs could have computed in the hours they ran, the model FLOPs utilization (MFU). In Question 8 each
# of E = 256 experts sees only k/E of the tokens, so the critical batch is E/k times as large.

# %%
grouped = q1.with_(L=1, N=64, K=8, V=8)
T, tree = (64 if page.small else 512), transformer.init(grouped, device="meta")
tokens = torch.zeros(1, T + 1, dtype=torch.long, device="meta")
again, plain = (counted(lambda r=r: torch.func.grad(transformer.loss)(tree, tokens, r)) for r in ("matmuls", "none"))
square = q1.with_(L=1)
crossover = next(T for T in range(1, 10**6) if tm.forward_flops(square, 1, T)["attention"]
                 >= tm.forward_flops(square, 1, T)["projections"])  # fmt: skip
v3, hours, peak = get("deepseek-v3"), 2.79e6, 3026e12 / 2  # FP8 without sparsity
needed = 6 * 37e9 * 14.8e12
batch = cost.critical_batch(V5E.flops(), V5E.hbm_bw, dtypes=("bf16", "int8", "bf16"))
page.answers([
    Answer("5 T at which attention does as much as QKVO, D = 4096", "8192", crossover, "tokens", "T = 2D"),
    Answer("6 FLOPs to rematerialize over BT^2NH", "4", (again - plain) / (T**2 * grouped.N * grouped.H), "",
           "counted"),
    Answer("7 FLOPs that 2.79M H800 hours offer", "1.52e25", hours * 3600 * peak, "FLOPs"),
    Answer("7 FLOPs that 14.8T tokens need", "3.3e24", tm.rule_of_thumb(v3, 14.8e12), "FLOPs"),
    Answer("7 DeepSeek-V3's utilization", "21.7", 100 * cost.mfu(needed, hours * 3600, 1, peak), "%"),
    Answer("7 DeepSeek-V3's active params, by its config", "37e9", tm.num_params(v3, active=True), "params"),
    Answer("8 int8 weights, bf16 FLOPs: compute-bound from B =", "120", batch, "tokens"),
    Answer("8 DeepSeek, E = 256, k = 8: compute-bound from B =", "3840", batch * cost.expert_inflation(v3.E, v3.k),
           "tokens"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `.with_(name="small", L=4, D=64` by `.with_(name="small", L=16, D=64`. Why does block remat cost
#    more FLOPs, relatively, in a deeper model?
#    Answer: The unembedding is not recomputed, and it is a smaller part of a deeper model. So the factor comes closer
#    to 8: 7.97 with 16 layers, where 4 have 7.89.
# 2. Question: from which batch on is Mixtral 8x7B (E = 8, k = 2) with int8 weights compute-bound on a v5e? Evaluate
#    `batch * cost.expert_inflation(get("mixtral-8x7b").E, get("mixtral-8x7b").k)`.
#    Answer: 480 tokens, four times 120: each expert sees k/E = 1/4 of them.
# 3. Flag: run with `--plot attention.svg`. Where does attention take as long as the MLP, in prefill and in decoding?
#    Answer: At 86,015 tokens in prefill and at 1,434 in decoding, where the chart has its marks.
