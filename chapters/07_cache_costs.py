# %% [markdown]
"""Part 7, the cost of a cache: what it is in 2026, by kind of attention, beyond the book.
https://jax-ml.github.io/scaling-book/inference

    2 b L K H S        bytes of the keys and values of S tokens: L layers, K heads of H numbers, b bytes a number

The book's "Tricks for Improving Generation Throughput and Latency" make caches smaller, together "by over an order of
magnitude". This chapter counts the bytes in models that are in use: some share keys and values among query heads,
others have latents, windows, sinks, or layers with a state in place of a cache, and all may store fewer bits. Each
formula is compared with the planner's number, and each number with a cache that is allocated.
"""

# %% [markdown]
# ## Why count the bytes of a token of context?
# The weights are read once a step, whatever the batch is. Each sequence has its own cache, and a step reads all of it.
# So the bytes that a token of context adds decide how many sequences fit beside the weights. The more sequences share
# one read of the weights, and the less each step reads of caches, the less a token costs.
#
# The table shows LLaMA-3 70B on eight H200s twice: with a key and a value for each of its 64 query heads, and as it
# really is, with 8 KV heads. Weights are in FP8, caches in bf16, and a tenth of the memory stays free. The largest
# batch that fits is served at the bound of Part 7 (07_bottlenecks.py), without collectives. A GPU costs around $10 an
# hour (Part 12). If caches have an eighth of the bytes, eight times as many sequences fit. A step reads little else
# than caches, so it takes about as long for eight times as many tokens, and a token costs about an eighth.

# %%
from collections import Counter

import torch

from scaling import serve, tree
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import Config, Linear, get
from scaling.cost import serving
from scaling.cost.memory import ROOM
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer
from scaling.models.attention import dot_product_attention
from scaling.plan.serve import Service, plans
from scaling.spec import parse

page = Page(__doc__, seed=True, plot=True)
H200, GPUS, CONTEXTS = chip("h200"), 8, (8192, 131_072)
ONE = AbstractMesh({})  # one device that holds no numbers


def bound(load: serving.Load, context: int) -> tuple[int, float, float]:
    """Return the sequences that fit the GPUs, their tokens/s by Part 7's bound, and dollars for a million tokens."""
    batch = serving.largest_batch(load, context, H200, GPUS, ROOM)
    rate = batch / serving.step(load, batch, context, H200, GPUS, compute="fp8").seconds
    return batch, rate, GPUS * H200.price / 3600 / rate * 1e6


L70 = get("llama3-70b")
rows = []
for name, config in (("64 KV heads", L70.with_(K=64)), ("8 KV heads", L70)):
    load = serving.load(config, "fp8", "bf16")
    for S in CONTEXTS:
        batch, rate, dollars = bound(load, S)
        rows.append((name, f"{S:,}", f"{load.kv(1) / 1e3:,.0f}", batch, f"{rate:,.0f}", f"{dollars:.2f}"))
page.title("LLaMA-3 70B on 8 H200")
page.table(rows, ["", "context", "kB a token", "sequences", "tokens/s", "$ a million\ntokens"])

# %% [markdown]
# ## Four formulas
# In all of them S is the number of tokens, L the number of layers, and b the bytes of a number, 2 in bf16.
#
# - Multi-head attention (LLaMA-2 7B) takes 2 b L N H S bytes. Each of N heads keeps a key and a value, which is the 2,
#   of H numbers.
# - Grouped queries (LLaMA-3 70B) take 2 b L K H S bytes. Only K heads have keys and values, and N/K query heads share
#   each.
# - Latents (DeepSeek-V3) take b L (C + rope) S bytes. All heads share one latent of C = 512 numbers, from which keys
#   and values follow, and one rotary key of rope = 64. There is no factor 2, because keys and values follow from the
#   same latent, and neither N nor H occurs, because all heads share it.
# - Windows take 2 b K H (L_f S + L_w min(S, w)) bytes. L_f layers see all tokens. L_w layers see only the last w, so
#   their bytes stop growing there. Every second layer of Gemma 2 has a window of 4,096 tokens. In Gemma 3 it is five of
#   six layers and 1,024 tokens, and in GPT-OSS every second layer and 128 tokens.
#
# The book also names caches that several layers share. None of these models has them.
#
# A fifth kind has no S at all: a linear layer keeps a state of fixed size, into which it adds each token. In Qwen3-Next
# three of four layers are of this kind (gated delta rules), with n = 32 heads, each a matrix of h x v numbers in
# float32, and k = 16 heads of queries and keys, where h = v = 128. Queries, keys and values pass a convolution over w =
# 4 tokens, so the w - 1 = 3 last tokens before it are kept as well, in bf16. So a layer's state takes 4 n h v + 2 * 3
# (2 k h + n v) bytes at any context. The other layers have grouped queries. What such a layer gives up is the exact
# past: it cannot look up a token, only what the state kept of it.
#
# A state has its full size from the first token on, so the planner counts it as a window of one token. A step also
# writes the states; the planner leaves this out.

# %%
G2 = get("gemma2-27b")
G3 = Config("gemma3-27b", 62, 5376, 21504, 32, 16, 128, 262_208, tied=True, norms="both", qk_norm=True,
            window=tuple(None if l % 6 == 5 else 1024 for l in range(62)),
            source="huggingface.co/google/gemma-3-27b-it config.json")  # fmt: skip
OSS = Config("gpt-oss-120b", 36, 2880, 2880, 64, 8, 64, 201_088, E=128, k=4, window=(128, None) * 18, sinks=True,
             attention_bias=True, output_bias=True, expert_bias=True,
             source="huggingface.co/openai/gpt-oss-120b config.json")  # fmt: skip
LINEAR = Linear(keys=16, values=32, key=128, value=128, width=4, layers=tuple(l for l in range(48) if l % 4 != 3))
QWEN = Config("qwen3-next-80b", 48, 2048, 512, 16, 2, 256, 151_936, E=512, k=10, shared=1, shared_gate=True,
              linear=LINEAR, head_gate=True, qk_norm=True, unit_offset=True, rotary_share=0.25, theta=1e7, eps=1e-6,
              source="huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct config.json")  # fmt: skip
STATE = 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128)  # bytes of a layer: 4 n h v + 2 * 3 (2 k h + n v)
STATES = len(LINEAR.layers) * STATE


def by_windows(c: Config, S: int, full: int, w: int) -> int:
    """Return the bytes of `full` layers that see all and of the others with a window, in bf16."""
    return 4 * c.K * c.H * (full * S + (c.L - full) * min(S, w))


L7, V3 = get("llama2-7b"), get("deepseek-v3")
KINDS = {
    "multi-head": (L7, "2 b L N H S", lambda S: 4 * L7.L * L7.N * L7.H * S),
    "grouped": (L70, "2 b L K H S", lambda S: 4 * L70.L * L70.K * L70.H * S),
    "latent": (V3, "b L (C + rope) S", lambda S: 2 * V3.L * (512 + 64) * S),
    "windows, 1 of 2": (G2, "2 b K H (23 S + 23 w)", lambda S: by_windows(G2, S, 23, 4096)),
    "windows, 5 of 6": (G3, "2 b K H (10 S + 52 w)", lambda S: by_windows(G3, S, 10, 1024)),
    "windows, sinks": (OSS, "2 b K H (18 S + 18 w)", lambda S: by_windows(OSS, S, 18, 128)),
    "states, 3 of 4": (QWEN, "2 b 12 K H S + states", lambda S: 4 * 12 * QWEN.K * QWEN.H * S + STATES),
}  # fmt: skip


def load_of(config: Config, kv: str = "bf16") -> serving.Load:
    """Return the planner's load with FP8 weights."""
    return serving.load(config, "fp8", kv)


# %% [markdown]
# The table compares the formulas at 131,072 tokens with the planner's `serving.load(config).kv(context)`.

# %%
page.title("Bytes of a sequence of 131,072 tokens, bf16")
page.same([(f"{kind}: {c.name}", formula, by_hand(CONTEXTS[1]), round(load_of(c).kv(CONTEXTS[1])))
           for kind, (c, formula, by_hand) in KINDS.items()],
          ["kind: model", "formula", "by hand", "planner"])  # fmt: skip

# %% [markdown]
# ## Side by side
# The table has the bytes per token of context, in bf16 and for the whole model. Without windows and states they do not
# depend on the context. With windows they fall as the context grows, until only the full layers count. A state is
# spread over more tokens in the same way. LLaMA-2 was made for 4,096 tokens; its row says what longer contexts would
# cost.
#
# The chart has the bytes of one sequence over its context. Lines of slope one grow with every token. Gemma's and
# GPT-OSS's lines bend at their windows, and Qwen3-Next's begins flat, as long as its states are larger than its caches.

# %%
page.title("kB per token of context, bf16")
page.table([(kind, c.name, *(f"{load_of(c).kv(S) / S / 1e3:,.1f}" for S in CONTEXTS),
             *(f"{load_of(c).kv(S) / 1e9:,.2f}" for S in CONTEXTS)) for kind, (c, *_) in KINDS.items()],
           ["kind", "model", "at 8k", "at 128k", "GB at 8k", "GB at 128k"])  # fmt: skip
page.chart(
    "bytes", {c.name: [(S, load_of(c).kv(S)) for S in (2**i for i in range(6, 21))] for c, *_ in KINDS.values()},
    "context", "bytes", "Cache of a sequence, bf16", height=20,
)  # fmt: skip
grown = {c.name: load_of(c).kv(CONTEXTS[1]) / load_of(c).kv(CONTEXTS[0]) for c, *_ in KINDS.values()}
page.answers([
    Answer("LLaMA-3 70B, int8: bytes a token (Part 8)", "160e3", serving.load(L70, kv="int8").kv_token, "bytes"),
    Answer("LLaMA-2 7B: kB a token", "", load_of(L7).kv_token / 1e3, "kB", "2 b L N H"),
    Answer("DeepSeek-V3: kB a token", "", load_of(V3).kv_token / 1e3, "kB", "b L (C + rope)"),
    Answer("Gemma 3: kB of a token beyond its windows", "", load_of(G3).kv_token / 1e3, "kB", "10 of 62 layers"),
    Answer("GPT-OSS: times the bytes at 128k over 8k", "", grown["gpt-oss-120b"], "times",
           "16 without windows"),
    Answer("Qwen3-Next: a layer's state in tokens of keys and values", "", STATE / (4 * QWEN.K * QWEN.H), "tokens",
           "a layer with a cache takes as much from there on"),
])  # fmt: skip

# %% [markdown]
# ## Does a cache hold as many bytes?
# The planner's numbers are formulas, too, so they are compared with caches that `serve.init_cache` allocates, on a
# device that holds no numbers. Layers with the same window are allocated together, with room for the window, or for the
# context if it is shorter. Linear layers add their states.
#
# The last column is a cache of all layers in one array, as `init_cache` allocates it without pages, in multiples of the
# planner's number. There windowed layers have room for the whole context, too. A step reads only the window, except
# where the sequence is split over ranks, so it takes as long as planned, but the memory is larger. `python -m
# scaling.serve` keeps pages instead, and in windowed layers only those within the window.


# %%
def allocated(c: Config, S: int) -> int:
    """Return the bytes of one cache for all layers of a sequence, in bf16, and of the states of linear layers."""
    cache = serve.init_cache(c, 1, S, mesh=ONE, dtype=torch.bfloat16)
    return sum(cache[name].nbytes for name in ("KV", "S", "tail") if name in cache)


rows = []
for c, *_ in KINDS.values():
    for S in CONTEXTS:
        kinds = Counter(min(S, window or S) for window in c.windows)
        planned = round(serving.load(c).kv(S))
        counted = sum(allocated(c.with_(L=n, window=None), length) for length, n in kinds.items())
        same = page.check(f"{c.name}: {S:,} tokens", planned == counted)
        rows.append((c.name, f"{S:,}", planned, counted, same, f"{allocated(c, S) / planned:.1f}"))
page.title("Bytes of a sequence's keys and values")
page.table(rows, ["model", "context", "planner", "init_cache", "the same", "in one array,\ntimes"])

# %% [markdown]
# ## Is what lies before the window never read?
# A window saves bytes only if nothing reads the older places. A small model of two windowed layers and a full one has
# read a prompt of 20 tokens. The keys and values of some layers and places are overwritten, and one more token is
# decoded. With a window of w = 4 it sees itself and the 3 tokens before it. So nothing reads places 0 to 16 of the
# windowed layers any more, while place 17, and every place of the full layer, is still read. A server may therefore
# keep w places per sequence in these layers, as a ring.

# %%
tiny = Config("tiny", 3, 32, 64, 4, 2, 8, 64, window=(4, 4, None))
params = transformer.init(tiny, page.args.seed, torch.float64)
prompt = torch.randint(0, tiny.V, (1, 20), generator=torch.Generator().manual_seed(page.args.seed))
_, cache = serve.prefill(params, prompt, serve.init_cache(tiny, 1, 21), tiny)


def decoded_with(layers: slice, places: slice) -> torch.Tensor:
    """Return the logits of the next token after these layers' places were overwritten."""
    KV = cache["KV"].clone()
    KV[:, layers, :, places] = 100.0
    return serve.decode(params, torch.tensor([1]), cache | {"KV": KV}, tiny)[0]


whole = decoded_with(slice(0), slice(0))
rows = []
for what, layers, places, is_read in (("windowed layers, places 0 to 16", slice(2), slice(17), False),
                                      ("windowed layers, place 17", slice(2), slice(17, 18), True),
                                      ("full layer, place 0", slice(2, 3), slice(1), True)):  # fmt: skip
    off = float((decoded_with(layers, places) - whole).abs().max())
    rows.append((what, f"{off:.1e}", "yes" if off else "no", page.check(what, bool(off) == is_read)))
page.title("Logits after places were overwritten")
page.table(rows, ["overwritten", "change", "read", "as expected"])

# %% [markdown]
# ## Sinks cost nothing
# GPT-OSS has a learned score s per layer and head, the sink. It is the score of a key that every query sees and that
# has no value. The softmax over scores a has one more term in its denominator, exp(a_i) / (exp(s) + sum_j exp(a_j)).
# Without a sink the weights of a query add up to 1, even if no token in the window matters. With one they add up to
# less.
#
# The first table compares the library's attention with this formula. The second compares GPT-OSS with the same model
# without sinks: the bytes that `init_cache` allocates, and the params that `transformer.init` makes, both on a device
# that holds no numbers. There are L N more params, and the cache is the same.

# %%
g = torch.Generator().manual_seed(page.args.seed)
Q, K, V = (torch.randn(1, n, 4, 8, generator=g, dtype=torch.float64) for n in (1, 20, 20))
s = torch.randn(4, generator=g, dtype=torch.float64)
A = torch.einsum("bnh,bsnh->bns", Q[:, 0], K) / 8**0.5
P = A.exp() / (s.exp()[:, None] + A.exp().sum(-1, keepdim=True))
O = torch.einsum("bns,bsnh->bnh", P, V)
ours = dot_product_attention(Q, K, V, sinks=s)[:, 0]
page.title("A sink")
page.equal([("attention with sinks", float((ours - O).abs().max() / O.abs().max()), 1e-14)], "the formula")
page.say(f"The weights of a query add up to {', '.join(f'{x:.2f}' for x in P.sum(-1)[0])} in its four heads.\n")


def made(c: Config) -> int:
    """Return the number of params of the model as it is made."""
    return sum(x.numel() for x in tree.leaves(transformer.init(c, 0, torch.bfloat16, "meta")))


plain, S = OSS.with_(sinks=False), CONTEXTS[1]
page.same([("bytes of a cache of 131,072 tokens", "the same", allocated(plain, S), allocated(OSS, S)),
           ("params", "L N more", made(plain) + OSS.L * OSS.N, made(OSS))],
          ["GPT-OSS", "formula", "without sinks", "with sinks"])  # fmt: skip

# %% [markdown]
# ## Fewer bits
# Quantization divides the bytes of any kind, and needs scales. An int8 cache of this library has one float32 scale for
# each token and head, 4/H of its bytes. The planner counts the numbers without their scales. Four bits are usually in
# blocks of 32 with a scale each, here in float32, so 32 numbers take 20 bytes. No cache of this library is in int4: its
# row follows from the planner's half a byte a number and from the type of such an array, `KV[I, L, B, S, K, H] {Q_H}`.
# There I is 2, for keys and values, and {Q_H} says that the scales are of blocks along H.

# %%
S = CONTEXTS[0]
typed, sizes = parse("KV[I, L, B, S, K, H] {Q_H}"), L70.sizes | {"I": 2, "B": 1, "S": S}
int8 = serve.init_cache(L70, 1, S, mesh=ONE, dtype=torch.int8)
held_by = {"bf16": load_of(L70).kv(S), "int8": int8["KV"].nbytes + int8["scale"].nbytes,
           "int4": typed.nbytes(sizes, ONE, "int4-32")}  # fmt: skip
rows = []
for name, held in held_by.items():
    numbers = load_of(L70, name).kv(S)
    batch, rate, _ = bound(serving.load(L70, "fp8", 2 * held / held_by["bf16"]), S)  # bytes of a number and its scale
    rows.append((name, f"{numbers / 1e9:.3f}", f"{(held - numbers) / 1e9:.3f}", batch, f"{rate:,.0f}"))
page.title("LLaMA-3 70B, a sequence of 8,192 tokens")
page.table(rows, ["format", "GB of numbers", "GB of scales", "sequences on\n8 H200", "tokens/s"])
page.check("int8: by its type as init_cache has it", typed.nbytes(sizes, ONE, "int8") == held_by["int8"])

# %% [markdown]
# ## How many sequences fit, and what does a token cost?
# Each model is served by eight H200s, with FP8 weights and a bf16 cache. The bound shares everything among the GPUs and
# sends nothing. The planner chooses a mesh and one of the forms of 07_sharded_decode.py; E is an axis over which
# requests and experts are split. It counts copies of caches and weights, and collectives where they take longer than
# reading the weights. Qwen3-Next's states are split by heads alone, so it has one form.
#
# From 8k to 128k of context the price of a token rises sixteenfold where nearly all bytes are caches that grow. These
# are LLaMA-2 and GPT-OSS, whose windows are short. The price rises less where windows or states are a large part of the
# bytes at 8k, as in Gemma and Qwen3-Next, or weights are, as in DeepSeek-V3. DeepSeek-V3 is the largest model here, and
# yet its token at 128k costs less than half of LLaMA-3 70B's, since its caches are less than a quarter as large.

# %%
rows, price = [], {}
for c, *_ in KINDS.values():
    for S in CONTEXTS:
        batch, rate, price[c.name, S] = bound(load_of(c), S)
        service = Service(c, S, weights="fp8", kv="bf16", compute="fp8")
        best = plans(service, H200, chips=GPUS)[0]
        chosen = f"{best.form}, {' '.join(f'{a}={n}' for a, n in best.sizes if n > 1)}"
        rows.append((c.name, f"{S // 1024}k", batch / GPUS, f"{rate:,.0f}", f"{price[c.name, S]:.2f}",
                     f"{best.tokens_per_second:,.0f}", chosen))  # fmt: skip
page.title("The largest batch on 8 H200")
headers = ["model", "S", "sequences\na GPU", "bound,\ntokens/s", "$ a million", "planner,\ntokens/s", "form, mesh"]
page.table(rows, headers)
dearer = {c.name: price[c.name, CONTEXTS[1]] / price[c.name, CONTEXTS[0]] for c, *_ in KINDS.values()}
page.check("DeepSeek-V3's token costs less than half", 2 * price["deepseek-v3", S] < price["llama3-70b", S])
page.answers([
    Answer("LLaMA-3 70B at 128k: sequences on 8 H200", "", bound(load_of(L70), S)[0], "", "room / kv(S)"),
    Answer("... with 64 KV heads", "", bound(load_of(L70.with_(K=64)), S)[0], "", "room / 8 kv(S)"),
    Answer("Price of a token at 128k over 8k: LLaMA-3 70B", "", dearer["llama3-70b"], "times", "nearly 16"),
    Answer("Price of a token at 128k over 8k: Gemma 3", "", dearer["gemma3-27b"], "times", "52 of 62 layers stay"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `window=(4, 4, None)` by `window=(4, None, None)`. Which row tells that a layer lost its window?
#    Answer: The row "windowed layers, places 0 to 16" says NO. Those places are outside of every window, so overwriting
#    them must change nothing, but a layer without a window reads them.
# 2. Question: how many times as large is a sequence of a million tokens in LLaMA-2 7B as in Qwen3-Next? Evaluate
#    `load_of(L7).kv(2**20) / load_of(QWEN).kv(2**20)`.
#    Answer: 21: LLaMA-2 7B caches 32 heads of 128 in each of 32 layers, and Qwen3-Next 2 heads of 256 in 12 of its 48.
# 3. Flag: run with `--plot bytes.svg`. From which context on is Qwen3-Next's cache smaller than GPT-OSS's?
#    Answer: From about 5,900 tokens on. Below, the states of Qwen3-Next's linear layers weigh more, which do not grow:
#    at 64 tokens it holds 79 MB, and GPT-OSS 4.7 MB.
