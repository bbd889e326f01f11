# %% [markdown]
"""Part 7, The Basics of Transformer Inference: sampling without a KV cache and with one, and what a cache is.
https://jax-ml.github.io/scaling-book/inference

    KV[2, L, B, S, K, H]        the keys and values, which are the 2, of B sequences of S tokens

The model has L layers, each with K KV heads of H numbers. The same n tokens are sampled without a cache and with one,
and the FLOPs are counted as they run: without a cache they grow as n^2 in the MLPs and n^3 in attention, and with one
as n and n^2. Then the cache is shown as data: ragged batches, chunks, pages, int8 with its scales, and tokens that are
taken back. What binds a decode step is in 07_bottlenecks.py.
"""

# %% [markdown]
# ## Why is a cache valid?
# In a causal model a token sees the tokens before it and none after. So the numbers that a layer computes for a token,
# its key and value among them, never change when others follow, and may be stored. The next token then needs its own
# query, and the keys and values of all tokens before it: one row of work instead of a whole prefix.
#
# The price is memory, and the time to read it. The cache of a sequence grows with each token, and every step reads all
# of it. All sequences share the weights, but each has its own cache: in LLaMA-2 13B four caches of 8,192 tokens, 6.7 GB
# each, are larger than the weights. So Parts 7 and 8 ask how many caches fit, and how long it takes to read them. A
# model whose tokens see later ones, such as an encoder, cannot have a cache.

# %%
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import serve
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import Config
from scaling.cost import serving
from scaling.cost import transformer as tm
from scaling.models import transformer
from scaling.serve.types import cache_specs

page = Page(__doc__, seed=True, plot=True)
config = Config("small", L=2, D=64, F=192, N=8, K=2, H=8, V=64)
params = transformer.init(config, page.args.seed, torch.float64)
n = 32 if page.small else 192  # tokens in all, of a prompt of one
aten = torch.ops.aten


def of_attention(q, k, v, *args, **options) -> int:
    """Return the FLOPs of the two products of q[B, N, T, H] with S keys and values, masked pairs included."""
    return 4 * q[0] * q[1] * q[2] * q[3] * k[2]


def counted(f, *args, **options) -> tuple:
    """Return (FLOPs of the products with weights, FLOPs of attention, the call's result)."""
    kernel = {aten._scaled_dot_product_flash_attention_for_cpu: of_attention}
    with FlopCounterMode(display=False, custom_mapping=kernel) as counter:
        out = f(*args, **options)
    ops = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in ops.items() if "attention" in str(op))
    return sum(ops.values()) - attention, attention, out


# %% [markdown]
# ## Naive sampling, and with a cache
# Both ways take the most likely token at each step. The naive way sends the whole prefix through the model for each
# token. With a cache, a token goes through the model once, and its keys and values stay. *Prefill* writes the keys and
# values of a prompt into the cache, and returns the logits after its last token. *Decode* does the same for one further
# token; the book calls it *generation*.


# %%
def naive():
    """Yield (FLOPs with weights, FLOPs of attention) of each token, and append the token to `slow`."""
    for _ in range(n):
        *flops, logits = counted(transformer.forward, params, torch.tensor([slow]), config=config)
        slow.append(int(logits[0, -1].argmax()))
        yield flops


def cached():
    """Yield the FLOPs of each token, the first by prefill of tokens[B, T] and then by decode of tokens[B]."""
    cache = serve.init_cache(config, 1, n)
    for t in range(n):
        step, tokens = (serve.decode, fast[-1:]) if t else (serve.prefill, [fast])
        *flops, (logits, cache) = counted(step, params, torch.tensor(tokens), cache, config, donate=True)  # in place
        fast.append(int(logits[0].argmax()))
        yield flops


slow, fast = [1], [1]
each = {"naive": list(naive()), "cached": list(cached())}
page.title(f"{n} tokens, one at a time")
page.check("the same tokens", slow == fast)
page.say(f"the same tokens: {'yes' if slow == fast else 'NO'} ({slow[:12]} ...)")

# %% [markdown]
# The table has the FLOPs of all n tokens, as counted and by Part 4's formulas; the chart has those of the tokens so
# far. The cache removes one power of n: in the last table, twice the tokens take about twice the FLOPs with weights,
# and not four times as many. (FFW, for feed-forward, is the book's name for the MLP.)


# %%
def total(way: str, which: int, tokens: int) -> int:
    """Return the FLOPs of the first tokens, of products with weights (`which` = 0) or of attention (1)."""
    return sum(flops[which] for flops in each[way][:tokens])


def by_formula(way: str, which: int) -> int:
    """Return the FLOPs of all n tokens by Part 4's formulas.

    For its token t, the naive way sends t tokens through the model and computes all their logits. With a cache, one
    token attends to t.
    """
    found = 0
    for t in range(1, n + 1):
        parts = tm.forward_flops(config, 1, t) if way == "naive" else tm.forward_flops(config, 1, 1, t)
        found += parts["attention"] if which else parts["mlp"] + parts["projections"] + parts["unembed"]
    return found


kinds = [(way, which) for way in each for which in (0, 1)]
words = ("products with weights", "attention")
page.same([(f"{way}: {words[which]}", {"naive": ("n^2", "n^3"), "cached": ("n", "n^2")}[way][which],
            by_formula(way, which), total(way, which, n)) for way, which in kinds],
          ["FLOPs", "grows as", "by formula", "counted"])  # fmt: skip
page.chart(
    "flops", {f"{way}, {('weights', 'attention')[which]}": [(t, total(way, which, t)) for t in range(1, n + 1)]
              for way, which in kinds},
    "tokens", "FLOPs", "FLOPs of all tokens so far", height=14,
)  # fmt: skip
growth = {(way, which): total(way, which, n) / total(way, which, n // 2) for way, which in kinds}
page.answers([
    Answer("Naive: twice the tokens, FFW FLOPs times", "4", growth["naive", 0], "", "n^2"),
    Answer("Naive: twice the tokens, attention FLOPs times", "8", growth["naive", 1], "", "n^3"),
    Answer("Cached: twice the tokens, FFW FLOPs times", "2", growth["cached", 0], "", "n"),
    Answer("Cached: twice the tokens, attention FLOPs times", "4", growth["cached", 1], "", "n^2"),
])  # fmt: skip

# %% [markdown]
# ## A cache is data
# A cache is a pytree, and each leaf has a type. KV[2, L, P, page, K, H] has the keys and the values of L layers, K
# heads and H numbers a head, in P pages of a few tokens each. With pages a sequence takes only as much memory as its
# tokens need, in whatever pages are free; without them, each would need room for the longest.
#
# A sequence of S tokens takes 2 b L K H S bytes, with b bytes a number. Fewer KV heads make it smaller: in multi-head
# attention (MHA) each of the 8 query heads has its own, in grouped-query attention (GQA) four share one here, and in
# multi-query attention (MQA) all do.

# %%
S = 128
rows, sizes = [], []
for name, K, dtype, size in (("MHA", 8, torch.float32, 4), ("GQA", 2, torch.float32, 4), ("MQA", 1, torch.float32, 4),
                             ("GQA, bf16", 2, torch.bfloat16, 2), ("GQA, int8", 2, torch.int8, 1)):  # fmt: skip
    heads = config.with_(K=K)
    cache = serve.init_cache(heads, 1, S, dtype=dtype, page=16)
    held = {leaf: cache[leaf].nbytes for leaf in ("KV", "scale") if leaf in cache}
    rows.append((name, cache_specs(heads, page=16)["KV"], held["KV"], held.get("scale", "-")))
    sizes.append((name, "2 b L K H S", serving.load(heads, kv=size).kv(S), held["KV"]))
page.title("A row of 128 tokens, in pages of 16")
page.table(rows, ["", "type, 16 tokens a page", "KV, bytes", "scales"])
page.say()
page.same(sizes, ["cache", "formula", "value", "held"])

# %% [markdown]
# ## Which caches give the same result?
# A cache may be filled in many ways, and the logits must not depend on it. A server batches prompts of different
# lengths, cuts long prompts into chunks so that other requests need not wait, puts pages wherever there is room, and
# takes tokens back that a draft model guessed wrongly (07_speculative.py). Here four prompts are run in these ways.
# Each row is compared with its prompt alone, by the logits of its last prompt token and of the tokens after it, in
# float64.

# %%
g = torch.Generator().manual_seed(page.args.seed)
lengths, more = torch.tensor([5, 1, 9, 7]), 3
tokens = torch.randint(0, config.V, (4, 9 + more), generator=g)


def follow(logits, cache):
    """Logits[B, 1 + more, V]: those after the prompts, and after each further token."""
    found = [logits]
    for step in range(more):
        logits, cache = serve.decode(params, tokens[torch.arange(4), lengths + step], cache, config)
        found.append(logits)
    return torch.stack(found, 1)


def chunked(cache):
    """Extend the cache by chunks of at most three tokens, all but each row's last, and then decode that one."""
    done = torch.zeros_like(lengths)
    while bool((done < lengths - 1).any()):
        part = (lengths - 1 - done).clamp(0, 3)
        chunk = torch.stack([row[d : d + 3] for row, d in zip(tokens, done.tolist(), strict=True)])
        _, cache = serve.extend(params, chunk, cache, config, lengths=part)
        done = done + part
    return serve.decode(params, tokens[torch.arange(4), lengths - 1], cache, config)


def prompts(cache):
    return serve.prefill(params, tokens, cache, config, lengths=lengths)


def back(cache):
    """Append two wrong tokens to each row, and take them back."""
    logits, cache = prompts(cache)
    _, longer = serve.extend(params, tokens[:, :2], cache, config)
    return logits, longer | {"lengths": cache["lengths"]}


def anywhere():
    """Return a cache whose pages are in random order."""
    cache = serve.init_cache(config, 4, 16, page=4)
    order = torch.randperm(16, generator=g)
    return cache | {"pages": order[cache["pages"]]}


# %% [markdown]
# Each way is compared with each prompt alone, which runs through the model without a cache.

# %%
alone = torch.stack([
    transformer.forward(params, tokens[b : b + 1, : int(length) + more], config=config)[0, int(length) - 1 :]
    for b, length in enumerate(lengths)
])  # fmt: skip
fresh = serve.init_cache(config, 4, 16)
ways = {
    "a ragged batch": prompts(fresh), "prompts in chunks of 3": chunked(fresh), "pages anywhere": prompts(anywhere()),
    "tokens taken back": back(fresh),
}  # fmt: skip
page.title("Against each row alone, without a cache")
page.equal([
    (name, float((follow(*way) - alone).abs().max() / alone.abs().max()), 1e-12) for name, way in ways.items()
], "each row alone")  # fmt: skip

# %% [markdown]
# ## int8, with its scales
# int8 halves the bytes of a bf16 cache's numbers, and what one gives up is precision. Each token and head has a scale
# in float32, max |x| / 127, so each number is off by at most half a scale. With the H = 8 of this small model the
# scales add half as much again (the table above has their bytes), and 3% with the usual H = 128. A cache without its
# scales is refused, because they would silently count as 1.

# %%
_, exact = prompts(fresh)
logits8, small = prompts(serve.init_cache(config, 4, 16, dtype=torch.int8))
off = (small["KV"] * small["scale"][..., None].double() - exact["KV"]).abs()[:, :1]  # layer 0 has the same input
share = float((off / (small["scale"][:, :1, ..., None].double() / 2).clamp(min=1e-30)).max())
drift = float((logits8 - alone[:, 0]).abs().max() / alone[:, 0].abs().max())
page.title("Keys and values in int8")
page.say(
    f"largest error over the bound of scale / 2: {share:.3f} (layer 0)\nlogits differ by {drift:.1e} of the largest"
)
page.check("int8 stays within half a scale", 0.9 < share <= 1 + 1e-6)
page.check("its logits stay close", 0 < drift < 0.05)
try:
    serve.decode(params, tokens[:, 0], {k: v for k, v in small.items() if k != "scale"}, config)
    page.check("a cache without scales is refused", False)
except ValueError as error:
    page.say(str(error))
    page.check("a cache without scales is refused", "without its scales" in str(error))
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `return logits, longer | {"lengths": cache["lengths"]}` by `return logits, longer`: the wrong tokens
#    stay. Which row tells?
#    Answer: "Tokens taken back" says NO, with a difference of 0.34: the lengths still count the tokens that were taken
#    back, so later tokens are written behind them and attend to them.
# 2. Question: how many times the cached FLOPs with weights does naive sampling take for these n tokens? Evaluate
#    `total("naive", 0, 32) / total("cached", 0, 32)`.
#    Answer: 16.5: naive sampling computes 1 + 2 + ... + n rows, and n rows are enough; the ratio is (n + 1) / 2.
# 3. Flag: run with `--plot cache.svg`. At how many tokens does naive attention overtake naive products with weights?
#    Answer: Beyond the figure, at about 575 tokens: attention grows as 512 n^3 / 3 FLOPs and the products as 196,608
#    n^2 / 2. At 32 tokens, where `--small` ends, they are 5.9e6 and 1.04e8.
