# %% [markdown]
"""Part 8, Serving LLaMA 3-70B on TPUs: what fits, how fast a step is, what it costs, and latency for throughput.
https://jax-ml.github.io/scaling-book/applied-inference

This chapter has every table, question and problem, and the Pareto figure. The book counts 70e9 params and 160e3 bytes
of KV cache per token. The model has 70.55e9 and 163,840, and a step looks up rows of its embedding instead of reading
all of it, which explains most small differences. Weights and KV caches have the dtype that a row names. In a slice of
v5e, an axis is a ring only if it has 16 chips. The planner answers such questions for any model: python -m scaling.plan
serve --help.
"""

# %%
import math

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost import decoding, serving
from scaling.cost import transformer as tm
from scaling.hardware import chip
from scaling.plan.serve import Service, plans

page = Page(__doc__, plot=True)
V5E, L70 = chip("v5e"), get("llama3-70b")
C, W, HBM = V5E.flops(), V5E.hbm_bw, V5E.hbm_bytes
INT8 = serving.load(L70, "int8", "int8")
BOOK = serving.Load(70e9, 70e9, 160e3)  # int8, in its round numbers


def ms(load: serving.Load, batch: int, context: int, chips: int) -> float:
    return 1e3 * serving.step(load, batch, context, V5E, chips).seconds


# %% [markdown]
# ## What's the LLaMA serving story?
# A server is judged by what a token costs, so the first question is which chip to buy: a v5e gives the most FLOPs per
# dollar. It has only 16 GB, so the next question is how many are needed for the weights and for enough caches.
#
# A cache takes 2LKH bytes a token in int8, 2 for keys and values: L = 80 layers, K = 8 heads, H = 128. At a batch of
# 240, which bf16 products need (Part 7), and 32k tokens, the caches alone take 1.3 TB, far more than the weights. With
# 32 caches of 8k tokens all fits on eight chips. A step then reads what they store, so its time is the bytes over all
# bandwidths, and on twice the chips half of that.

# %%
chips = [chip("h100"), chip("v5p"), V5E]
per_dollar = {hw.name: hw.flops() * 3600 / hw.price for hw in chips}
page.title("What a dollar buys, bf16")
page.table([(hw.name, hw.flops(), f"${hw.price:g}", per_dollar[hw.name]) for hw in chips],
           ["chip", "FLOPs/s", "an hour", "FLOPs / $"])  # fmt: skip
wide, need = INT8.kv(32_768), INT8.weights + 32 * INT8.kv(8192)
limit, lines = (cost.tensor_limit(L70.F, C, V5E.bandwidth(link, axes=2)) for link in ("ici", "line"))
page.answers([
    Answer("FLOPs / $ of an H100", "3.3e17", per_dollar["h100"]),
    Answer("FLOPs / $ of a v5p", "3.9e17", per_dollar["v5p"]),
    Answer("FLOPs / $ of a v5e", "5.8e17", per_dollar["v5e"], coarse="1.97e14 x 3600 / 1.2"),
    Answer("KV cache a token, int8", "160", INT8.kv(1) / 1024, "KiB", "163,840 bytes; the book goes on with 160e3"),
    Answer("32k tokens", "5.3", wide / 1e9, "GB"),
    Answer("240 of them", "1.3", 240 * wide / 1e12, "TB"),
    Answer("240 of them beside the weights: v5e", "86", (INT8.weights + 240 * wide) / HBM, "chips",
           rounded=((70e9 + 1.3e12) / HBM, "70e9 and 1.3e12 bytes")),
    Answer("32 caches of 8192 tokens", "41.9e9", 32 * INT8.kv(8192), "bytes",
           rounded=(32 * BOOK.kv(8192), "160e3 bytes a token")),
    Answer("with the weights", "112", need / 1e9, "GB",
           rounded=((32 * BOOK.kv(8192) + 70e9) / 1e9, "these caches and 70e9")),
    Answer("with the weights: chips", "7", need / HBM, "chips"),
    Answer("4x2: chips of the smallest slice", "8", math.prod(serving.smallest_slice(need, V5E)), "chips",
           "113.5 of 128 GB"),
    Answer("4x2: a step of 32", "17", ms(INT8, 32, 8192, 8), "ms",
           'HBM binds matmuls (32 < 120) and attention; the book has "our FLOPs" for the latter'),
    Answer("4x2: tokens/s", "1882", 1e3 * 32 / ms(INT8, 32, 8192, 8), "tokens/s",
           rounded=(32 / 0.017, "17 ms")),
    Answer("4x2: tokens/s a chip", "235", 1e3 * 4 / ms(INT8, 32, 8192, 8), "tokens/s", rounded=(1882 / 8, "1882")),
    Answer("4x4: a step of 32", "8.5", ms(INT8, 32, 8192, 16), "ms"),
    Answer("TP is bound by two axes of ICI beyond Y =", "26", limit, "ways"),
    Answer("... on two axes without wraparound, as 4x2 and 4x4 are", "", lines, "ways",
           "half the bandwidth, half the ways"),
])  # fmt: skip

# %% [markdown]
# ## Thinking about throughput
# Throughput grows with the batch, and the batch with the memory that the weights leave. For each dtype, the table takes
# the smallest slice that holds the weights, and fills the rest with caches of 8k tokens: their number is the batch. It
# is the same for all dtypes, because half the bytes an element halve the weights, the caches and the slice. The slice
# reads its whole HBM in each step, which takes 16e9 / 8.2e11 s = 19.5 ms, and a query takes 512 steps. QPS is queries
# per second.
#
# The smallest slice is not the cheapest. On twice the chips the weights leave room for three times as many caches, so
# each chip serves more queries (the last column). With int4 weights, a step there waits for its FLOPs, not its memory.


# %%
BYTES = {"bf16": 2, "int8": 1, "int4": 0.5}
SLICES = {name: math.prod(serving.smallest_slice(70e9 * size, V5E)) for name, size in BYTES.items()}
FULL = HBM / W  # seconds of a step that reads a whole HBM
loads = {name: serving.load(L70, name, name) for name in BYTES}
fits = {name: serving.largest_batch(loads[name], 8192, V5E, chips) for name, chips in SLICES.items()}
twice = {name: serving.largest_batch(loads[name], 8192, V5E, 2 * chips) for name, chips in SLICES.items()}
steps = {name: 1e-3 * ms(loads[name], twice[name], 8192, 2 * chips) for name, chips in SLICES.items()}


def qps(batch: int, chips: int, step: float = FULL) -> float:
    """Return queries/s per chip, of 512 tokens each."""
    return batch / (step * 512 * chips)


page.title("The smallest slice of v5e, context 8k")
page.table(
    [(name, load.weights / 1e9, load.kv(1) / 1e3, load.weights / HBM, SLICES[name],
      SLICES[name] * HBM / 1e9 - load.weights / 1e9, fits[name], qps(fits[name], SLICES[name]),
      qps(twice[name], 2 * SLICES[name], steps[name])) for name, load in loads.items()],
    ["dtype", "params,\nGB", "KV a token,\nkB", "chips,\nat least", "slice,\nchips", "left,\nGB", "caches",
     "QPS\na chip", "on twice\nthe chips"],
)  # fmt: skip

# %% [markdown]
# These are the numbers of the book's table. The rows below are those that differ from it in a digit, because the book
# rounded terms first, or erred. Then follow the numbers of its text.

# %%
tables = []
for name, params, kv, chips, actual, left, count, rate, more in (
    ("bf16", "140", "324", "8.75", "16", "116", "43", "0.27", "0.44"),
    ("int8", "70", "162", "4.38", "8", "58", "43", "0.55", "0.90"),
    ("int4", "35", "81", "2.81", "4", "29", "43", "1.11", "1.80"),
):
    load, size, slice_, exact = loads[name], BYTES[name], SLICES[name], loads[name].weights / HBM
    late = {"erratum": f"FLOPs bind beyond 60 tokens: a step takes {1e3 * steps[name]:.1f} ms, not 19.5"}
    few = {"erratum": "35e9 / 16e9 = 2.19"} if name == "int4" else {"rounded": (70e9 * size / HBM, "70e9 params")}
    tables += [
        Answer(f"{name}: params", params, load.weights / 1e9, "GB"),
        Answer(f"{name}: KV a token", kv, load.kv(1) / 1e3, "kB",
               rounded=(162 * size, "162 kB in int8") if name != "int4" else None),
        Answer(f"{name}: chips at least", chips, exact, "chips", **few),
        Answer(f"{name}: chips of the slice", actual, slice_, "chips"),
        Answer(f"{name}: HBM left", left, (slice_ * HBM - load.weights) / 1e9, "GB",
               rounded=((slice_ * HBM - 70e9 * size) / 1e9, "70e9 params") if name == "bf16" else None),
        Answer(f"{name}: caches of 8k", count, fits[name], "", "whole ones"),
        Answer(f"{name}: queries/s a chip", rate, qps(fits[name], slice_), "/s",
               rounded=(43 / (0.019 * 512 * slice_), "43 caches, 19 ms") if name != "bf16" else None),
        Answer(f"{name}: queries/s a chip on twice the chips", more, qps(twice[name], 2 * slice_, steps[name]), "/s",
               **late if name == "int4" else {"rounded": (140 / (0.019 * 512 * 2 * slice_), "140 caches, 19 ms")}),
    ]  # fmt: skip
page.answers(tables, agreeing=False)

# %% [markdown]
# The next table has the batch from which a step is bound by FLOPs, and the time of a step.

# %%
kinds = (("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"))  # of weights, of FLOPs
critical = {(w, c): cost.critical_batch(V5E.flops(c), W, dtypes=(c, w, c)) for w, c in kinds}
page.answers([
    Answer("bf16 weights, bf16 FLOPs: compute-bound from B =", "240", critical["bf16", "bf16"], "tokens"),
    Answer("int8 weights, bf16 FLOPs", "120", critical["int8", "bf16"], "tokens"),
    Answer("int8 weights, int8 FLOPs", "240", critical["int8", "int8"], "tokens"),
    Answer("A step with the HBM full", "19", 1e3 * FULL, "ms"),
    Answer("512 of them", "9", 512 * FULL, "s", coarse="512 x 19.5 ms"),
    Answer("int4, reading params alone", "10", 1e3 * loads["int4"].read(1) / (4 * W), "ms"),
    Answer("Queries/s of the slice: 4.42", "4.42", qps(fits["bf16"], 1), "/s",
           rounded=(43 / (0.019 * 512), "43 caches, 19 ms")),
    Answer("bf16 on 4x8: HBM left for caches", "372", (32 * HBM - loads["bf16"].weights) / 1e9, "GB",
           rounded=((32 * HBM - 140e9) / 1e9, "70e9 params")),
    Answer("bf16 on 4x8: caches", "140", twice["bf16"], "", "whole ones"),
    Answer("bf16 on 4x8: queries/s of the slice", "14.39", qps(twice["bf16"], 1), "/s",
           rounded=(140 / (0.019 * 512), "140 caches, 19 ms")),
])  # fmt: skip

# %% [markdown]
# ## How to shard it
# How many chips can model parallelism use? More chips shorten the products and the reading of weights, but not the
# sending of activations, since each chip receives all of them. The example is one matmul in bf16 on 4x8: B tokens of D
# numbers and weights [D, F], on Y chips with C FLOPs/s and W bytes/s each:
#
#     T_ici = 2BD / W_ici        T_hbm = 2DF / (Y W_hbm)        T_math = 2BDF / (Y C)
#
# If the batch is large enough to be compute-bound, ICI takes longer than the FLOPs beyond 26 ways, so a 4x8 is too
# large. With a batch of 64, reading the weights takes longest, and ICI takes less time than that up to 49 ways (56 in
# the book, which rounds). So a small batch can use more chips than 26. Its steps become shorter, and the price is fewer
# tokens per chip.

# %%
B, Y, beta = 64, 32, W / V5E.bandwidth("ici")
ici, hbm = 2 * B * L70.D / V5E.bandwidth("ici"), 2 * L70.D * L70.F / (Y * W)
sent = decoding.collectives("heads", L70, B, {"Y": 32})
whole = sum(decoding.collective_seconds(moved, V5E, (4, 8), {"Y": 32}) for moved in sent)
page.answers([
    Answer("A compute-bound batch: a power of two up to 26", "16", 2 ** int(math.log2(limit)), "ways",
           "so not 4x8 in bf16; 4x4 in int8 and 2x4 in int4"),
    Answer("B = 64: bound by HBM up to Y =", "56", decoding.bandwidth_limit(L70.F, B, W, V5E.bandwidth("ici")), "ways",
           coarse="beta = 8.2e11 / 9e10 is 9.1, not 8"),
    Answer("T_ici of a matmul", "11", 1e6 * ici, "us", "one ring, or two axes without wraparound"),
    Answer("T_hbm of a matmul", "18", 1e6 * hbm, "us"),
    Answer("T_math of a matmul", "4", 1e6 * 2 * B * L70.D * L70.F / (Y * C), "us",
           coarse="2 x 64 x 8192 x 28672 / (32 x 1.97e14) is 4.77"),
    Answer("All collectives of a step on 4x8, no wraparound", "", 1e3 * whole, "ms",
           "161 AllReduces of x[64, 8192] and the logits, by bandwidth"),
    Answer("HBM time of that step's weights", "", 1e3 * loads["bf16"].read(B) / (32 * W), "ms", "bf16 over 32 chips"),
])  # fmt: skip

# %% [markdown]
# ## What about prefill?
# A prompt is compute-bound, so its time is its FLOPs over the chips' FLOPs/s, here at 40% of the peak. In each decode
# step of B = 32 sequences some end and leave the batch. With answers of G tokens, B/G of them end in a step on average,
# and each leaves a cache of P + G tokens, where P is the length of its prompt. Prefill servers must supply as many new
# sequences, or the decode servers run half empty.

# %%
attended = tm.prefill_flops(L70, 8192)
plain = cost.seconds_at(2 * tm.num_params(L70) * 8192, 16, C, 0.4)
ended, evicted = serving.turnover(32, 8192, 4096)
page.answers([
    Answer("A prefill of 8192 on 16 v5e at 40%", "0.91", plain, "s"),
    Answer("... with causal attention, the unembedding once", "", cost.seconds_at(attended, 16, C, 0.4), "s",
           "2 params T + 2 T^2 N H L, the embedding not counted"),
    Answer("32 sequences of 8192 + 4096: ended a step", "0.0078", ended, ""),
    Answer("32 sequences of 8192 + 4096: tokens evicted a step", "96", evicted, "tokens"),
    Answer("Prefill servers a generation server, G = 512", "3", serving.prefill_servers(plain, FULL, 32, 512), "",
           "batch 32, as the book takes it"),
    Answer("... with the 42 caches that fit", "", serving.prefill_servers(plain, FULL, fits["bf16"], 512), "",
           "42 x 0.92 / (19.5 ms x 512)"),
])  # fmt: skip

# %% [markdown]
# ## Visualizing the latency throughput tradeoff
# How long should a user wait so that tokens are cheap? The book's figure shows latency against throughput, for int8
# weights and caches, bf16 FLOPs, a 4x4, and no collectives. Each point is a batch. On the left, where the weights bind,
# more throughput costs almost no latency. Further right, caches bind, or FLOPs at short contexts, and each gain costs
# latency. A curve ends where the HBM is full; at long contexts that is before the FLOPs are used.


# %%
def points(context: int) -> list[tuple[int, float, float]]:
    """Return (batch, ms, tokens/ms per chip) of each batch that fits."""
    most = min(512, serving.largest_batch(INT8, context, V5E, 16))
    ms = {b: 1e3 * serving.step(INT8, b, context, V5E, 16).seconds for b in range(1, most + 1)}
    return [(b, each, b / (each * 16)) for b, each in ms.items()]


fronts = {context: serving.pareto(points(context), lambda p: p[1], lambda p: p[2])
          for context in (1024, 2048, 4096, 8192, 32768)}  # fmt: skip
page.chart(
    "pareto", {f"context {context:,}": [(t, rate) for _, t, rate in front] for context, front in fronts.items()},
    "ms a step", "tokens/ms a chip", "LLaMA-3 70B in int8 on a v5e 4x4", height=16, log=False,
    marks=[("y", C / (2e3 * INT8.params), "compute alone")],
)  # fmt: skip

# %% [markdown]
# The table divides a step into its parts, at two contexts. The weights take the same time at any batch, and the others
# grow with it. A step takes the time of reading the caches, and then that of the weights or of the FLOPs, whichever is
# longer. Beyond a context of about 3,500 tokens, reading the caches takes longer than the FLOPs at every batch; see the
# rows of 8,192. There a larger batch cannot make use of the FLOPs. A smaller cache would help.

# %%
breakdown = []
for context in (2048, 8192):
    for batch in [*(b for b in (1, 32, 64, 120, 240) if b < len(points(context))), len(points(context))]:
        s = serving.step(INT8, batch, context, V5E, 16)
        times = [1e3 * t for t in (s.weights, s.kv, s.math, s.seconds)]
        breakdown.append((f"{context:,}", batch, *times, batch / (16e3 * s.seconds), s.bound))
page.title("The parts of a step on a 4x4, in int8")
page.table(breakdown, ["context", "batch", "weights,\nms", "KV,\nms", "FLOPs,\nms", "step,\nms", "tokens/ms\na chip",
                       "binds"])  # fmt: skip
doubled = {context: max(rate for _, t, rate in front if t <= 2 * front[0][1]) for context, front in fronts.items()}
equal = 2 * INT8.params / C * W / INT8.kv(1)  # context at which reading a cache takes as long as the FLOPs
code = [b for b in range(1, 1024, 4) if 2 ** math.ceil(math.log2((INT8.kv(8192 * b) + 70e9) / 16e9)) <= 16]
page.answers([
    Answer("Latency at batch 1, 8k", "5.5", points(8192)[0][1], "ms",
           rounded=(ms(serving.Load(70e9, 70e9, 163_840), 1, 8192, 16), "70e9 params, embedding and all")),
    Answer("Latency at the largest batch, 8k", "20", points(8192)[-1][1], "ms", "138 fit"),
    Answer("Throughput plateaus at 2k context at ('around')", "1", doubled[2048], "tokens/ms", hedged="around 1"),
    Answer("Doubling the latency lowers the cost by", "100", doubled[1024] / fronts[1024][0][2], "times",
           f"1k, from batch 1; {doubled[2048] / fronts[2048][0][2]:.0f} at 2k", hedged="a roughly 100x reduction"),
    Answer("Compute binds from B =", "120", INT8.read(1) / W * C / (2 * INT8.params), "tokens"),
    Answer("Reading caches takes longer than FLOPs beyond", "2048", equal, "tokens",
           coarse="at any batch; of lengths that double, 4096 is the first"),
    Answer("Its code's flops_time over 2 params B / C, in bf16", "1", loads["bf16"].weights / tm.num_params(L70), "",
           erratum="it takes param_size, in bytes, for params: in int8 they are one"),
    Answer("Its code at 8k: the largest batch", str(len(code) - 1), len(points(8192)), "", erratum=
           "the index of a range in steps of 4 is taken for the batch"),
])  # fmt: skip

# %% [markdown]
# ## Problems
# The book gives no answers; a row below begins with the number of its question. Question 3 is answered by the planner,
# with caches in int8, 8k of context, and the largest batch whose step ends within 15 ms. Its form says how the caches
# are split (07_sharded_decode.py). The last column says what the same chips would do if nothing had to be sent. On 64
# chips (8x8) that is 149 tokens/s a chip. With collectives it is less than half, since the axes of an 8x8 are no rings.

# %%
L405, L8 = get("llama3-405b"), get("llama3-8b")
big, small = serving.load(L405, "int8", "int8"), serving.load(L8, "int8", "int8")
wanted = Service(L405, 8192, latency=0.015, headroom=1.0)


def alone(chips: int) -> int:
    """Return the largest batch in 15 ms if nothing had to be sent."""
    most = serving.largest_batch(big, 8192, V5E, chips)
    return max((b for b in range(1, most + 1) if ms(big, b, 8192, chips) <= 15), default=0)


within, best = [], {}
for chips in (32, 64, 128, 256):
    found = plans(wanted, V5E, chips=chips)
    best |= {chips: found[0]} if found else {}
    how = (found[0].form, found[0].batch, found[0].per_chip) if found else ("-", "-", "-")
    within.append((chips, ms(big, 1, 8192, chips), *how, alone(chips) / 0.015 / chips))
fastest = plans(Service(L405, 8192, headroom=1.0), V5E, objective="latency")[0]
page.title("Question 3: LLaMA-3 405B within 15 ms a step")
page.table(within, ["chips", "batch 1:\nms by HBM", "form", "batch", "tokens/s\na chip", "... without\ncollectives"])
page.answers([
    Answer("1 FLOPs a token of 405B", "", 2 * big.params / 1e9, "GFLOPs", "2 a param, the embedding looked up"),
    Answer("1 least time of a token on N chips, by FLOPs", "", 2e3 * big.params / C, "ms / N", "2 params / (N C)"),
    Answer("1 least time of a step on N chips, by HBM, in int8", "", 1e3 * big.read(1) / W, "ms / N",
           "params / (N W), whatever the batch"),
    Answer("2 8B in int8: params", "", small.weights / 1e9, "GB", "a byte each"),
    Answer("2 240 caches of 8k", "", 240 * small.kv(8192) / 1e9, "GB", "65,536 bytes a token"),
    Answer("2 peak activations: the MLP's, bf16", "", 240 * L8.F * 2 / 1e6, "MB", "240 x 14336; twice with the gate's"),
    Answer("2 ... and the logits in float32", "", 240 * L8.V * 4 / 1e6, "MB", "240 x 128256"),
    *(Answer(f"2 smallest slice at {context // 1024}k", "", "x".join(map(str, serving.smallest_slice(
        small.weights + 240 * small.kv(context), V5E))), "", "next above params and caches over 16 GB")
      for context in (8192, 4096, 2048)),
    Answer("3 smallest slice that holds 405B", "", math.prod(serving.smallest_slice(big.weights, V5E)), "chips",
           "but its step is over 15 ms"),
    Answer("3 best form within 15 ms, on 8x8", "", best[64].form, "", "KV[2, B_Z, S, K_Y, H], Y = Z = 8"),
    Answer("3 its batch", "", best[64].batch, "", "bound by 253 AllReduces of x over two lines of 8"),
    Answer("3 its tokens/s a chip", "", best[64].per_chip, "tokens/s", "batch over the step, over 64"),
    Answer("3 if nothing were sent: the batch in 15 ms", "", alone(64), "",
           "143 (0.0403 + 0.0641) = 15 ms, of FLOPs and caches"),
    Answer("3 least step on the pod, by HBM", "", 1e3 * big.read(1) / (256 * W), "ms", "405e9 / (256 x 8.2e11)"),
    Answer("3 least step of all, with collectives", "", 1e3 * fastest.step.seconds, "ms",
           f"on {fastest.chips} chips by {fastest.form}: hops of 1 us, {fastest.step.bound} bind"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `INT8 = serving.load(L70, "int8", "int8")` by `INT8 = serving.load(L70, "int8", "bf16")`. What does
#    a cache in bf16 do to the batch and to the step?
#    Answer: It halves the batch: 69 caches of 8k tokens fit on a 4x4 in place of 138. A step of 32 on a 4x2 takes 23.7
#    ms in place of 17.1, but its 156 GB no longer fit on the 8 chips.
# 2. Question: how many caches of 128k tokens of LLaMA-3 70B in int8 fit on a 4x8? Evaluate
#    `serving.largest_batch(INT8, 131072, V5E, 32)`.
#    Answer: 20: 32 chips have 441 GB left beside the weights, and a cache takes 21.5 GB.
# 3. Flag: run with `--plot pareto.svg`. At which contexts does the curve end before it is flat?
#    Answer: At 32,768: memory ends it at 34 sequences and 19.2 ms, with 0.111 tokens/ms and still rising. The others
#    have room for more than the 120 sequences from which compute binds.
