# %% [markdown]
"""Part 7, All About Transformer Inference: what binds a decode step, and what a KV cache costs.
https://jax-ml.github.io/scaling-book/inference

This chapter computes the critical batch of linear operations by dtype, the intensity of attention, and the bounds of a
step of PaLM and of LLaMA-2 13B. It compares ways to make caches smaller, and answers Questions 1 to 3, 5 and 6 and
Appendices A and C. Each row names its dtypes. Caches run in 07_kv_cache.py and are sharded in 07_sharded_decode.py; the
numbers of Part 8 are in 08_applied_inference.py.
"""

# %%
from scaling import cost
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost import serving
from scaling.cost import transformer as tm
from scaling.hardware import chip

page = Page(__doc__, plot=True)
V5E, H100 = chip("v5e"), chip("h100", "part12")
C, W, HBM = V5E.flops(), V5E.hbm_bw, V5E.hbm_bytes
ALPHA = V5E.intensity("hbm")  # 240 FLOPs a byte

# %% [markdown]
# ## Linear operations: what bottlenecks us?
# A matmul of B tokens with weights [D, F] does 2BDF FLOPs. If B is much smaller than D and F, nearly all that it reads
# are the weights, and it does 2B FLOPs for each of them. So a chip with C FLOPs/s and W bytes/s of HBM computes for as
# long as it reads at B = (bytes of a weight) C / 2W tokens, the *critical batch*; with fewer, it waits for HBM.
#
# In training and prefill a step has thousands of tokens, and this is no question. In generation each sequence has one
# token a step, since the next depends on it, so 240 tokens are 240 requests at the same time, with 240 caches. That is
# hard to reach. Below it a part of the chip's FLOPs is unused, and more sequences cost nearly no time.
#
# The table has the critical batch by dtype. The book writes it as the product of beta and alpha, with alpha = C/W and
# beta = bits of a weight over bits of an activation. If the products are in int8, C is that of int8, twice as high on a
# v5e.

# %%
kinds = [("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"), ("int4", "bf16")]
hardware = [chip(name) for name in ("v4p", "v5e", "v5p", "v6e", "a100")] + [H100]


def critical(weights: str, compute: str, hw=V5E) -> float:
    return cost.critical_batch(hw.flops(compute), hw.hbm_bw, dtypes=(compute, weights, compute))


page.title("Critical batch, tokens")
page.table([(f"{w} weights, {c} FLOPs", *(f"{critical(w, c, hw):,.0f}" for hw in hardware)) for w, c in kinds],
           ["", *(hw.name for hw in hardware)])  # fmt: skip
exact = cost.critical_batch(C, W, 8192, 28672)
page.answers([
    Answer("B_crit of v5e in bf16", "240", critical("bf16", "bf16"), "tokens"),
    Answer("B_crit of an H100", "280", critical("bf16", "bf16", H100), "tokens",
           erratum="9.9e14 / 3.35e12 is 295, as Part 12 has it"),
    Answer("v5e, int8 weights, bf16 FLOPs", "120", critical("int8", "bf16"), "tokens"),
    Answer("v5e, int8 weights, int8 FLOPs", "240", critical("int8", "int8"), "tokens"),
    Answer("v5e in bf16, D = 8192, F = 28672, activations counted", "", exact, "tokens",
           "DF / (DF W/C - D - F), as X and the output are read and written too"),
])  # fmt: skip

# %% [markdown]
# ## What about attention?
# In attention, T queries meet the keys and values of S tokens. A head does 4STH FLOPs and reads 4(S + T)H bytes in
# bf16, which is ST/(S + T) FLOPs per byte. In prefill S = T, and the intensity T/2 grows with the prompt. In generation
# T = 1, and the intensity is 1, or G if G query heads share a cache. A larger batch does not change it, because each
# sequence brings its own cache, while all share the weights. So attention in generation is always bound by HBM. (In the
# chart FLOPs/B are FLOPs per byte, and MHA is multi-head attention, where G = 1.)

# %%
contexts = [2**i for i in range(6, 18)]
page.chart(
    "intensity", {
        "prefill, S = T": [(T, tm.attention_intensity(T, T)) for T in contexts],
        "generation, MHA": [(T, tm.attention_intensity(1, T)) for T in contexts],
        "generation, G = 8": [(T, tm.attention_intensity(1, T, 8)) for T in contexts],
    }, "context", "FLOPs/B", "Intensity of attention, bf16", height=12, marks=[("y", ALPHA, "v5e: C/W = 240")],
)  # fmt: skip
prefill = next(T for T in range(1, 1000) if tm.attention_intensity(T, T) >= ALPHA)
l13 = get("llama2-13b")
S = 8192
page.answers([
    Answer("Prefill: intensity over T", "0.5", tm.attention_intensity(S, S) / S),
    Answer("Prefill is compute-bound from T =", "480", prefill, "tokens"),
    Answer("Generation: intensity at S = 8192", "1", tm.attention_intensity(1, S), "FLOPs/B"),
    Answer("MHA, 13B: a layer's MLP params over a cache of 8192 tokens", "",
           l13.matrices * l13.D * l13.F / (2 * S * l13.K * l13.H), "", "3DF / 2SKH: the book's 2DF/SHK, about F/S"),
])  # fmt: skip

# %% [markdown]
# ## Theoretical estimates for latency and throughput
# Everything that follows in Parts 7 and 8 rests on one bound for the time of a step:
#
#     batch KV / W + max(2 batch params / C, weights / W)
#
# KV is the bytes of a sequence's cache, weights the bytes of the weights, and C and W are those of all chips together.
# The first term is attention, which is bound by HBM. The second is the matmuls, which take as long as the slower of
# their FLOPs and their reads. The tokens per second are the batch divided by this time. A small batch has short steps
# and leaves most FLOPs unused. With a large one a token costs less, and each user waits longer for it. Once the caches
# outweigh the weights, more sequences gain little.
#
# It is a lower bound: it takes for granted that reads overlap with FLOPs and that communication is hidden.
#
# The pop quiz has 30B params in int8, bf16 FLOPs, a 4x4, and 100 kB of cache per token.

# %%
quiz = serving.Load(30e9, 30e9, 100e3)
four, many = (serving.step(quiz, batch, S, V5E, 16) for batch in (4, 256))
page.answers([
    Answer("Quiz: a cache of 8192 tokens", "819", quiz.kv(S) / 1e6, "MB"),
    Answer("Quiz: a step of 4", "2.5", 1e3 * four.seconds, "ms", f"bound by {four.bound}"),
    Answer("Quiz: a step of 256", "21", 1e3 * many.seconds, "ms", f"bound by {many.bound}"),
])  # fmt: skip

# %% [markdown]
# The same bound gives the book's figure of PaLM, from the paper "Efficiently Scaling Transformer Inference" (ESTI):
# 540B params, 118 layers with one KV head of 256 numbers, and 2,048 tokens in each cache, on 64 v4p. The batch grows
# along a curve from 1 at the top to 2,048 at the right. The cost of a token hardly falls beyond a batch of 229, where
# FLOPs begin to bind. Compare both ends of the curves: int8 weights halve the least latency, and leave the least cost
# unchanged.

# %%
V4P, PALM = chip("v4p"), 540e9
palm = {name: serving.Load(size * PALM, PALM, 2 * 2 * 118 * 256) for name, size in (("bf16", 2), ("int8", 1))}
cost_of = {  # [(ms a step, chip-ms a token)] of batches 1 to 2,048
    name: [(1e3 * (t := serving.step(load, b, 2048, V4P, 64).seconds), 64e3 * t / b) for b in (2**i for i in range(12))]
    for name, load in palm.items()
}
page.chart(
    "palm", {f"{name} weights": points for name, points in cost_of.items()}, "ms a step", "chip-ms a token",
    "PaLM 540B on 64 v4p", height=12,
    points={"B = 256": [points[8] for points in cost_of.values()]},
)  # fmt: skip
page.answers([
    Answer("PaLM: throughput flattens around batch", "240", critical("bf16", "bf16", V4P), "tokens",
           rounded=(ALPHA, "C/W of a v5e; PaLM ran on v4")),
    Answer("PaLM: least latency in bf16 over int8", "", cost_of["bf16"][0][0] / cost_of["int8"][0][0], "times",
           "twice the bytes, and one cache"),
    Answer("PaLM: least cost in bf16 over int8", "1", cost_of["bf16"][-1][1] / cost_of["int8"][-1][1], "times"),
])  # fmt: skip

# %% [markdown]
# ## What about memory?
# Training stores params, gradients, optimizer state and what backward reads. Inference stores params, a few activations
# that do not matter, and caches, which do: four caches of 8k tokens take more than all params of LLaMA-2 13B. The
# letters are Part 4's: L layers, D the width of the residual stream, F of the MLP, N query heads, K KV heads, H numbers
# a head, V tokens in the vocabulary, E experts of which a token takes k.

# %%
toy, moe = get("part7-toy"), get("part7-moe")
page.title("The models of this part: LLaMA-2, and the problems' two")
page.table([(c.name, *(getattr(c, letter) for letter in "LDFNKHVEk")) for c in (l13, toy, moe)], ["", *"LDFNKHVEk"])
parts = tm.params(l13)
weights, kv = serving.load(l13).weights, serving.load(l13).kv(S)
page.answers([
    Answer("13B: FFW params", "8.5e9", parts["mlp"], "params"),
    Answer("13B: vocab params", "0.3e9", parts["vocab"], "params"),
    Answer("13B: attention params", "4.2e9", parts["attention"], "params"),
    Answer("13B: all", "13e9", tm.num_params(l13), "params"),
    Answer("In bf16", "26", weights / 1e9, "GB"),
    Answer("Training, float32 optimizer state ('around 100GB')", "100",
           cost.training_memory(tm.num_params(l13), grad_bytes=0).total / 1e9, "GB",
           "10 bytes a param, as in Part 5", hedged="around 100GB"),
    Answer("An activation of 8k tokens", "80", 8192 * l13.D * 2 / 2**20, "MiB"),
    Answer("A cache of 8192 tokens, bf16", "6.7", kv / 1e9, "GB"),
    Answer("Caches that exceed the params", "4", next(n for n in range(1, 9) if n * kv > weights), ""),
])  # fmt: skip

# %% [markdown]
# ## Modeling throughput and latency for LLaMA 2-13B
# The example runs on eight v5e in bf16, with 26e9 bytes of weights and caches of 6.7e9, or of a fifth of that. All 48
# numbers of the book's two tables are recomputed; they are printed as in the book, and a row below a table would name
# one that differs. The book writes GiB, but its bytes are GB. Eight v5e have 128 GB of HBM.

# %%
BATCHES = (1, 8, 16, 32, 64, 240)
caches = {"": 6.7e9 / S, "5x smaller: ": 1.34e9 / S}
loads = {name: serving.Load(26e9, 13e9, each) for name, each in caches.items()}
book = {
    "": (
        ("KV, GB", "6.7", "53.6", "107.2", "214.4", "428.8", "1608"),
        ("total, GB", "32.7", "79.6", "133.2", "240.4", "454.8", "1634"),
        ("step, ms", "4.98", "12.13", "20.30", "36.65", "69.33", "249.09"),
        ("tokens/s", "200.61", "659.30", "787.99", "873.21", "923.13", "963.53"),
    ),
    "5x smaller: ": (
        ("KV, GB", "1.34", "10.72", "21.44", "42.88", "85.76", "321.6"),
        ("total, GB", "27.34", "36.72", "47.44", "68.88", "111.76", "347.6"),
        ("step, ms", "4.17", "5.60", "7.23", "10.50", "17.04", "52.99"),
        ("tokens/s", "239.94", "1,429.19", "2,212.48", "3,047.62", "3,756.62", "4,529.34"),
    ),
}  # fmt: skip


def column(load: serving.Load, batch: int) -> list[float]:
    """Return the KV and the total in GB, the ms and the tokens/s of a batch."""
    cached = batch * load.kv(S)
    seconds = serving.step(load, batch, S, V5E, 8).seconds
    return [cached / 1e9, (cached + load.weights) / 1e9, 1e3 * seconds, batch / seconds]


# %% [markdown]
# Only the columns whose total is below 128 GB can run. In the first table these are batches up to 15: 16 are too many,
# and more would hardly raise the tokens per second. With caches of a fifth of the size each step is shorter, 64
# sequences fit, and their throughput is four times as high. The chart has both curves, and marks the largest batch that
# fits.

# %%
for name, rows in book.items():
    columns = [column(loads[name], batch) for batch in BATCHES]
    page.title(f"LLaMA-2 13B on 8 v5e, {name or 'caches of 6.7 GB: '}by batch")
    page.table(
        [(what, *(f"{c[j]:,.2f}" for c in columns)) for j, (what, *_) in enumerate(rows)], ["", *map(str, BATCHES)]
    )
    page.answers([
        Answer(f"{name}{what}, batch {batch}", row[i], columns[i][j])
        for j, (what, *row) in enumerate(rows) for i, batch in enumerate(BATCHES)
    ], agreeing=False)  # fmt: skip
page.chart(
    "llama2-13b", {
        f"{word}, {S} tokens": [column(load, batch)[2:] for batch in range(1, 257)]
        for word, load in zip(("caches of 6.7 GB", "of 1.34 GB"), loads.values(), strict=True)
    }, "ms a step", "tokens/s", "LLaMA-2 13B on 8 v5e, bf16", height=12,
    points={"fits in 128 GB": [column(load, serving.largest_batch(load, S, V5E, 8))[2:] for load in loads.values()]},
)  # fmt: skip
fit, fit5 = (serving.largest_batch(load, S, V5E, 8) for load in loads.values())
page.answers([
    Answer("The largest batch that fits", "16", fit, "",
           erratum="133.2 GB are more than 8 x 16e9 bytes; with 16 GiB a chip 16 would fit"),
    Answer("5x smaller: a batch of 64 fits", "yes", "yes" if fit5 >= 64 else "no", "", f"up to {fit5}"),
    Answer("A cache of the table, '6.7 GiB'", "6.7", loads[""].kv(S) / 2**30, "GiB", erratum="the units are GB"),
    Answer("HBM of 8 v5e", "128", 8 * HBM / 1e9, "GB"),
    Answer("Their bandwidth ('6.5TiB/s')", "6.5", 8 * W / 1e12, "TB/s"),
    Answer("Their FLOPs ('1600TF/s')", "1600", 8 * C / 1e12, "TFLOPs/s"),
])  # fmt: skip

# %% [markdown]
# ## Tricks for a smaller cache
# A smaller cache makes every step faster and lets more sequences fit. Each trick below gives up something of the model:
# query heads that share keys and values (GQA), layers that see only the last 1,024 tokens, fewer bits. The table
# applies them one after another to LLaMA-2 13B at 32k tokens, by the bytes stored and the bytes read at each step. Of
# its 40 layers 7 still see everything in the third row, and 33 a 32nd. In the last row, layers share their caches in
# pairs. They store half, but each layer still reads its pair's cache, so steps are no faster.

# %%
LONG = 32768
grouped = l13.with_(K=8)
local = grouped.with_(window=tuple(None if layer % 6 == 0 else 1024 for layer in range(l13.L)))
tricks = {
    "as it is, bf16": serving.load(l13), "GQA: 8 KV heads": serving.load(grouped),
    "... 5 of 6 layers see 1,024 tokens": serving.load(local), "... and int8": serving.load(local, kv="int8"),
}  # fmt: skip
held = {name: load.kv(LONG) for name, load in tricks.items()}
page.title("A cache of 32k tokens")
page.table(
    [(name, size / 1e9, size / 1e9, held["as it is, bf16"] / size) for name, size in held.items()]
    + [("GQA, pairs of layers share", held["GQA: 8 KV heads"] / 2e9, held["GQA: 8 KV heads"] / 1e9,
        2 * held["as it is, bf16"] / held["GQA: 8 KV heads"])],
    ["", "held, GB", "read, GB", "times smaller"],
)  # fmt: skip
page.answers([
    Answer("All of them: times smaller ('over an order of magnitude')", "",
           held["as it is, bf16"] / held["... and int8"], "", "5 x 40/(7 + 33/32) x 2"),
])  # fmt: skip

# %% [markdown]
# ## Questions 1 to 3, 5 and 6
# A row begins with the number of its question. The toy model is all in int8, unless a row says otherwise, and the
# second model, with E = 16 experts, is for Questions 5 and 6. In Question 6, experts are split over Z and F over Y. If
# one takes the types literally, the other weights (attention, vocabulary) are split over Y alone, so each chip holds
# more of them.

# %%
one, active = tm.num_params(toy), tm.num_params(moe, active=True)
room, single = 16 * HBM, serving.load(toy.with_(K=1), "int8", "int8")
small, big = serving.load(toy, "int8", "int8"), serving.load(moe, "int8", "int8")
a_chip = big.experts / 128 + (big.weights - big.experts) / 8
page.answers([
    Answer("1 params", "18.4e9", one, "params"),
    Answer("1 KV cache a token", "262", small.kv(1) / 1e3, "kB"),
    Answer("2 a cache of 128e3 tokens", "33.5", small.kv(128e3) / 1e9, "GB"),
    Answer("2 largest batch on 4x4", "7", serving.largest_batch(small, 128e3, V5E, 16), "",
           "6 if 128k are 131,072 tokens"),
    Answer("2 with K = 1", "56", serving.largest_batch(single, 128e3, V5E, 16), "", "W_K and W_V are smaller too"),
    Answer("3 loading all params, 4x4", "1.4", 1e3 * small.weights / (16 * W), "ms"),
    Answer("5.1 all params", "212e9", tm.num_params(moe), "params"),
    Answer("5.1 times the dense model's ('about 12x')", "12", tm.num_params(moe) / one, "times"),
    Answer("5.1 active params", "31.2e9", active, "params"),
    Answer("5.2 compute-bound from B =", "1920", ALPHA * cost.expert_inflation(moe.E, moe.k), "tokens", "bf16"),
    Answer("5.3 KV cache a token", "262", big.kv(1) / 1e3, "kB"),
    Answer("5.4 FLOPs of a token", "", 2 * active, "FLOPs", "2 x active params"),
    Answer("5 experts that a step of 8 tokens reads, of 16", "", (big.read(8) - big.weights) / big.experts * 16 + 16,
           "", "16 (1 - (1 - 2/16)^8), routed at random"),
    Answer("6.1 loading the weights on 8x16, split over all", "", 1e3 * big.weights / (128 * W), "ms", "212e9 / 128 W"),
    Answer("6.1 ... experts over YZ, the rest over Y alone", "", 1e3 * a_chip / W, "ms", "[E_Z, D, F_Y] and N_Y"),
    Answer("6.1 free HBM a chip, split over all", "", (HBM - big.weights / 128) / 1e9, "GB", "16 less 1.65"),
    Answer("6.1 ... experts over YZ: free HBM", "", (HBM - a_chip) / 1e9, "GB", "16 less 2.3"),
    Answer("6.2 smallest slice", "", "x".join(map(str, serving.smallest_slice(big.weights, V5E))), "", "13.2 chips"),
])  # fmt: skip

# %% [markdown]
# ## Appendix A: how real is the batch size > 240 rule?
# How good is the roofline? A layer of two matmuls, 8192 x 32768 in bf16 and sharded 4 ways, is compared with what the
# book measured (read off its figures). From a batch of 16 to one of 128 the measured time grows by a third while the
# batch grows eightfold; from 256 on it doubles with the batch. So the rule finds where the time begins to grow. It does
# not give the time: no measurement beats the bound, and they take 1.5 to 2.9 times as long.

# %%
size = cost.LayerShape(1, 8192, 32768).params
figure = {16: 500, 32: 520, 64: 615, 128: 665, 256: 1000, 512: 1930, 1024: 3870}
layer = serving.Load(2 * size, size)
roof = {batch: 1e6 * serving.step(layer, batch, 0, V5E, 4).seconds for batch in figure}
page.title("Microseconds a layer")
rows = [(b, roof[b], us, b / us, f"{roof[b] / us:.0%}", page.check(f"the bound at batch {b}", roof[b] <= us))
        for b, us in figure.items()]  # fmt: skip
page.table(rows, ["batch", "bound", "measured", "tokens/us\nmeasured", "bound over\nmeasured", "not beaten"])
page.answers([
    Answer("App. A: params", "600e6", size, "params", erratum="2 x 8192 x 32768"),
    Answer("App. A: least latency", "365", roof[16], "us", erratum="537e6 x 2 / (4 x 8.2e11); 365 is of 600e6"),
])  # fmt: skip

# %% [markdown]
# ## Appendix C: latency bound communications
# In a decode step the activations are so small that bandwidth matters less than the hops. An AllGather takes at least a
# microsecond per hop, X/2 hops on a ring of X chips. In that time a link moves 45 kB (4.5e10 bytes/s one way), so a
# gather is bound by latency if the whole array has less than X times 45 kB.

# %%
ring, wide = cost.latency_bound_bytes(V5E, 8, wrap=True), get("llama3-70b").D  # 8192
page.answers([
    Answer("App. C: 8 ways, a ring: latency-bound below", "360", ring / 1e3, "kB"),
    Answer("App. C: activations of 16 tokens, D = 8192, int8", "131", 16 * wide / 1e3, "kB"),
    Answer("App. C: latency-bound below so many W_ICI x 1e-6 ('total bytes')", "1", ring / (V5E.ici_bw * 1e-6), "times",
           erratum="bytes per shard, one way: 45 kB for each of the 8"),
    Answer("App. C: 16 tokens, D = 8192, int8: latency-bound from Y > BD/45,000 =", "", 16 * wide * 8 / ring, "ways",
           "131 kB over 45 kB a way"),
    Answer("App. C: 8 ways on a line, as 8 of a v5e without wraparound", "",
           cost.latency_bound_bytes(V5E, 8, wrap=False) / 1e3, "kB", "7 hops, and 7/8 of the bytes, over one link"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `quiz = serving.Load(30e9, 30e9, 100e3)` by `quiz = serving.Load(15e9, 30e9, 100e3)`: int4 weights.
#    Which of the two steps becomes faster?
#    Answer: The step of 4, which takes 1.39 ms in place of 2.54: it mainly reads weights. The step of 256 stays at 20.9
#    ms, as reading the KV cache binds it.
# 2. Question: from which batch on is an MLP in int4 weights with int8 FLOPs compute-bound on a v6e? Evaluate
#    `critical("int4", "int8", chip("v6e"))`.
#    Answer: 287.5: each weight is half a byte, so it is half of the 575 with int8 weights and int8 FLOPs.
# 3. Flag: run with `--plot inference.svg`. Which batch of LLaMA-2 13B is the last that fits?
#    Answer: 15, since 16 caches of 6.7 GB and the weights take 133 GB. With caches that are five times smaller it is
#    76. Both points are marked in the figure of LLaMA-2 13B.
