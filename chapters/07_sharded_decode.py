# %% [markdown]
"""Part 7, Distributing Inference Over Multiple Accelerators: a decode step on a mesh, in four forms.
"Generation", "Sharding the KV cache", Questions 4 and 7, Appendix B: https://jax-ml.github.io/scaling-book/inference

    heads        KV[2, B, S, K_Y, H]        heads_batch  KV[2, B_Z, S, K_Y, H]
    sequence     KV[2, B, S_Z, K_Y, H]      2d           KV[2, B_X, S, K_Y, H]

These are four ways to split the keys and values of B sequences of S tokens, with K KV heads of H numbers. Each form is
derived from its one-line types, run on ranks and compared with one device, and its bytes are computed by closed form
and traced. A cache is handed from ranks that prefill to ranks that decode. The last sections compute the memory of a
cache on a chip, when ICI binds, and when 2D pays.
"""

# %% [markdown]
# ## Why other layouts than in training?
# A step of training has thousands of tokens on each chip, while a decode step has one token of each sequence. Weights
# and caches are read for a handful of rows, so reads from HBM bound the step, and more chips help because they bring
# more bandwidth. FSDP is useless here: ICI is slower than HBM, so gathering the weights would take many times as long
# as the step itself. So the weights stay where they are, and the activations, which are small, move. Data parallelism
# is of no use within a step, either: each copy of the weights has to be read whole, so one rather starts a second
# server.
#
# The remaining choice is where the caches go. There are only K KV heads to split, eight in LLaMA-3 70B. On more chips
# the cache has to be split along something else, its batch or its length, and each choice costs a collective in every
# layer. The four forms below are these choices.

# %%
import torch

from scaling import cost, serve, tree
from scaling.algebra import derive
from scaling.book.answers import Answer
from scaling.book.decoding import decoded
from scaling.book.layout import beside
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.collectives import transfer
from scaling.configs import Config, get
from scaling.cost import decoding, serving
from scaling.hardware import chip
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.plan.serve import Service, ServingPlan, plans
from scaling.plan.serve.forecast import likely_token
from scaling.show import svg
from scaling.show.frames import device_grids
from scaling.trace import trace

page = Page(__doc__, mesh="Y=2,Z=2", device=True, seed=True, plot=True)
Y, Z = (page.args.mesh[axis] for axis in "YZ")
V5E, L70 = chip("v5e"), get("llama3-70b")

# %% [markdown]
# ## The algorithms, from their types
# One line describes a block: its input and output, and how they are sharded; `*_D` is a product summed over D. x is one
# token of each of B sequences, with D numbers, and N is the number of query heads. The collectives follow from the line
# and are derived below, with the bytes of the array that each gathers, reduces or exchanges. (The book calls these
# bytes V; here V are the values.) In these lines K and V have all N heads, as if each query head had its own.
#
# - `heads` gives a chip whole heads, and needs one AllReduce. With more chips than KV heads, some hold the same head,
#   and the cache is stored more than once.
# - `heads_batch` is the book's box, whose twelve lines run in 07_decode_listing.py: two AllToAlls move the queries from
#   heads to rows of the batch, where the cache is, and the results back. The batch must divide over Z.
# - `sequence` splits the tokens of each cache, which suits few and long sequences. Each rank along Z has a part of a
#   softmax, so its maxima and sums are sent as well (they are counted below).
# - `2d` is the MLP of Question 7, with weights split over both of its dims. It pays on many chips.

# %%
SIZES = L70.sizes | {"B": 32, "S": 8192}
ATTENTION = "x[B, D] *_D W_Q[D, N_YZ, H] *_H K[{B}, {S}, N_Y, H] *_S V[{B}, {S}, N_Y, H] *_N W_O[N_YZ, H, D] -> A[B, D]"
LINES = {
    "heads": (ATTENTION.format(B="B", S="S").replace("YZ", "Y"), {"Y": 16}),
    "heads_batch": (ATTENTION.format(B="B_Z", S="S"), {"Y": 8, "Z": 2}),
    "sequence": (ATTENTION.format(B="B", S="S_Z"), {"Y": 8, "Z": 2}),
    "2d": ("In[B, D_XY] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B, D_XY]", {"X": 4, "Y": 4}),
}
sent = {}
for form, (line, sizes) in LINES.items():
    page.title(f"{form}: LLaMA-3 70B, 32 tokens in bf16, on {', '.join(f'{a}={n}' for a, n in sizes.items())}")
    page.say(line.replace(" *_S V", "\n    *_S V"))
    steps = [step for step in derive(line, sizes=SIZES, mesh=sizes).forward if step.op != "Loss"]
    sent[form] = [step.op for step in steps if step.op != "Einsum"]
    page.table([(i, str(step), step.nbytes(SIZES, sizes, 2) or "") for i, step in enumerate(steps, 1)],
               ["", "line", "bytes"])  # fmt: skip
page.check("two AllToAlls and an AllReduce", sent["heads_batch"] == ["AllToAll", "AllToAll", "AllReduce"])

# %% [markdown]
# The picture has three caches, each drawn once for each of four devices. What a device holds of it bears the device's
# number (or, in a notebook, its colour). Columns are the KV heads, split over Y; rows are the batch in the first two
# and the sequence in the third. In the first, only heads are split, so the devices along Z hold the same: twice the
# memory, and twice the bytes to read.

# %%
CACHES = ("heads[B, K_Y]", "heads_batch[B_Z, K_Y]", "sequence[S_Z, K_Y]")
page.title("The cache on each of four devices")
page.show(
    beside(device_grids(cache, {"Y": 2, "Z": 2}) for cache in CACHES), lambda: svg.types(CACHES, {"Y": 2, "Z": 2})
)

# %% [markdown]
# ## The four forms on ranks
# Here `scaling.serve` runs in float64: it prefills prompts of unequal lengths, and then decodes. The table has the
# difference of each form's logits from one device's. The form `heads` has all ranks along Y, and `2d` has X where the
# others have Z.

# %%
R = Y * Z  # ranks
config = Config("small", L=1 if page.small else 2, D=16 * R, F=24 * R, N=4 * R, K=R, H=8, V=16 * R)
B, S, STEPS = 2 * Z, 8 * Y * Z, 2 if page.small else 6
OWN = {"heads": {"Y": Y * Z}, "heads_batch": {"Y": Y, "Z": Z}, "sequence": {"Y": Y, "Z": Z}, "2d": {"X": Z, "Y": Y}}


def problem(device):
    """Return (params, tokens[B, S], the length of each row's prompt)."""
    g = torch.Generator().manual_seed(page.args.seed)
    params = transformer.init(config, page.args.seed, torch.float64, device)
    tokens = torch.randint(0, config.V, (B, S), generator=g)
    return params, tokens.to(device), torch.randint(1, S - STEPS, (B,), generator=g).to(device)


def all_forms(mesh):
    """Return by form: (difference from one device, collectives of a decode step as (op, V))."""
    params, tokens, lengths = problem(mesh.device)
    whole, found = decoded(params, tokens, lengths, STEPS, config)[0], {}
    for form, sizes in OWN.items():
        own = Mesh(sizes, mesh.device, mesh.checked)
        mine = tree.shard(params, serve.specs(config, own, form=form), own)
        logits, logs = decoded(mine, tokens, lengths, STEPS, config, own, form)
        found[form] = difference(logits, whole, mesh), [(event.op, event.nbytes) for event in logs[-1].collectives()]
    return found


ran = page.on_ranks(all_forms)
page.title(f"Decode steps on {Y * Z} ranks, float64")
page.equal([(form, off, 1e-12) for form, (off, _) in ran.items()])

# %% [markdown]
# What does a whole step send? The table has the bytes of all its collectives by the closed form and as traced. Besides
# the lines above there is an AllReduce after the embedding and after each MLP (in `2d` a ReduceScatter, and an
# AllGather before what follows), and an AllGather of the logits at the end. An AllReduce counts once here, although it
# takes twice the time. The AllReduces of `sequence` are larger, by the maxima of the softmax.

# %%
rows = []
for form, sizes in OWN.items():
    moved = decoding.collectives(form, config, B, sizes, dtype="fp64")
    for op in ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"):
        if closed := sum(m.nbytes * m.times for m in moved if m.op == op):
            rows.append((form, op, closed, sum(nbytes for name, nbytes in ran[form][1] if name == op)))
page.title("The collectives of a decode step, bytes")
page.same(rows, ["form", "collective", "closed form", "traced"])

# %% [markdown]
# ## Prefill on some ranks, decode on others
# A prompt is bound by FLOPs and a decode step by HBM, so they want different meshes, and on the same ranks a prompt
# makes all other requests wait. A *disaggregated* server has a mesh for each, and pays by moving every cache once. Here
# half of the ranks prefill by heads, KV[2, B, S, K_Y, H]. The cache then moves to the other half, where it is KV[2, B,
# S_Z, K, H], by a planned reshard between two sets of ranks. The other half decodes the next token. Only positions that
# have tokens are sent, so S in the formula is the length of the longest row.


# %%
def handed_over(mesh):
    """Return (difference from one device, bytes of keys and values that rank 0 sends)."""
    half = mesh.size() // 2
    here = Mesh({"Y": half}, mesh.device, mesh.checked, ranks=range(half))
    there = Mesh({"Z": half}, mesh.device, mesh.checked, ranks=range(half, 2 * half))
    params, tokens, lengths = problem(mesh.device)
    cache = logits = None
    if here.member:
        mine, empty = tree.shard(params, serve.specs(config, here), here), serve.init_cache(config, B, S, mesh=here)
        _, cache = serve.prefill(mine, tokens, empty, config, here, lengths=lengths)
    with trace() as log:
        cache = serve.move(cache, config, here, there, target_form="sequence")
    if there.member:
        mine = tree.shard(params, serve.specs(config, there, form="sequence"), there)
        next_tokens = tokens[torch.arange(B), lengths]
        logits, _ = serve.decode(mine, next_tokens, cache, config, there, form="sequence")
    logits = transfer("logits[B, V] -> logits[B, V]", logits, there, here)
    whole = decoded(params, tokens, lengths, 1, config)[0][:, 1]
    off = difference(logits if here.member else whole, whole, mesh)
    return off, sum(event.wire_bytes for event in log.events if event.before.name == "KV")


if Y * Z % 2 == 0:
    off, moved = page.on_ranks(handed_over)
    page.title(f"A cache handed from {Y * Z // 2} ranks to as many others")
    page.equal([("logits after the move", off, 1e-12)])
    page.say()
    held = 2 * config.L * B * int(problem("cpu")[2].max()) * config.K * config.H * 8 // (Y * Z // 2)
    if page.first:
        page.same([("sent by rank 0", "2 L B S K_Y H", held, moved)], ["bytes", "formula", "value", "traced"])

# %% [markdown]
# ## The memory of a cache on a chip
# The example is LLaMA-3 70B, with 32 sequences of 8k in int8 on a v5e 4x4. It has 8 KV heads, so Y = 16 stores each
# head twice. Splitting the batch or the sequence over Z instead costs two collectives per layer, and halves the bytes
# of cache that a chip reads. The columns have the milliseconds of a step's parts (`ICI` is its collectives, on links
# without wraparound), and which of them binds it. A step takes as long as reading the caches (KV) plus the longer of
# reading the weights and of the collectives. `2d` at X=2 is a little faster still, because only there does no chip hold
# a copy of W_K and W_V; on more chips along X its collectives bind.

# %%
rows = []
for one in plans(Service(L70, 8192, headroom=1.0), V5E, chips=16, batch=32):
    if one.form in ("heads", "2d") or dict(one.sizes)["Z"] == 2:
        step, mesh = one.step, " ".join(f"{a}={n}" for a, n in one.sizes)
        ms = [1e3 * t for t in (step.kv, step.weights, step.comms, step.seconds)]
        rows.append((one.form, mesh, one.kv_bytes / 1e9, *ms, step.bound))
page.title("32 x 8k tokens on a 4x4")
page.table(rows, ["form", "mesh", "KV,\nGB", "KV,\nms", "weights,\nms", "ICI,\nms", "step,\nms", "binds"])
twice = {name: kv for name, _, kv, *_ in rows}
page.check("heads over 16 store the cache twice", twice["heads"] == 2 * twice["heads_batch"] == 2 * twice["sequence"])

# %% [markdown]
# ## Question 4: the toy model on a 4x4, all in int8
# The toy model is that of 07_bottlenecks.py, with 8 KV heads. For prefill, one takes model parallelism up to the ICI
# bound and then splits the sequence. For decode, one splits the weights over all 16 chips, and the cache over its 8
# heads and 2 parts of the batch.

# %%
toy = get("part7-toy")
load = serving.load(toy, "int8", "int8")
bound = cost.tensor_limit(toy.F, V5E.flops("int8") / 2, V5E.bandwidth("line", axes=2))  # int8 moves half the bytes


def question_4(batch: int, context: float) -> float:
    """Return the ms of a step by HBM alone; the embedding is tied, so all weights are read."""
    return 1e3 * serving.step(load, batch, context, V5E, 16, "int8").seconds


moved = decoding.collectives("heads_batch", toy, 32, {"Y": 8, "Z": 2})
ici = sum(decoding.collective_seconds(m, V5E, (4, 4), {"Y": 8, "Z": 2}) for m in moved)
page.answers([
    Answer("4.1 axes of a 4x4 that are rings", "", sum(V5E.wraps((4, 4))), "", "only an axis of 16 is one"),
    Answer("4.2 model parallelism is bound by ICI from Y =", "", bound, "ways",
           "F x 2 x 4.5e10 / 1.97e14, two lines: prefill 8-way is marginal"),
    Answer("4.3 ways over the batch: KV[2, B_Z, S, K_Y, H]", "", 16 // toy.K, "", "8 over the KV heads"),
    Answer("4 a step of 1, context 8k", "", question_4(1, 8192), "ms", "(2.1e9 + 18.4e9) / (16 x 8.2e11)"),
    Answer("4 a step of 32, context 8k", "", question_4(32, 8192), "ms", "(68.7e9 + 18.4e9) / (16 x 8.2e11)"),
    Answer("4 a step of 7, context 128e3", "", question_4(7, 128e3), "ms", "Question 2's batch"),
    Answer("4 collectives of a step of 32, if nothing hides them", "", 1e3 * ici, "ms",
           "129 AllReduces of 2 x 6 us, 128 AllToAlls of 1 us, the logits: latency"),
])  # fmt: skip

# %% [markdown]
# ## When ICI binds a step
# How far does model parallelism go? In training it ends where its collectives take longer than the FLOPs. In generation
# FLOPs do not matter, so it ends only where the collectives take longer than reading the weights. A matmul of an MLP
# with weights [D, F] gathers 2BD bytes over ICI in 2BD / W_ici seconds, and each of Y chips reads its share of the
# weights from HBM in 2DF / (Y W_hbm). The two are equal at Y = F/(B beta), with beta = W_hbm/W_ici. More tokens lower
# this number of chips, and int8 weights halve it.

# %%
W, ici_bw = V5E.hbm_bw, V5E.bandwidth("ici")
batches = [2**i for i in range(2, 9)]
page.chart(
    "ways", {
        f"F = {F:,}, {dtype}": [(b, decoding.bandwidth_limit(F, b, W, ici_bw, weights=dtype)) for b in batches]
        for F, dtype in ((16384, "bf16"), (28672, "bf16"), (28672, "int8"))
    }, "batch", "ways", "Model parallelism that HBM still binds, one ring of v5e", height=10,
    marks=[("y", cost.tensor_limit(28672, V5E.flops(), ici_bw), "compute-bound batch, F = 28,672: 13")],
)  # fmt: skip
page.answers([
    Answer("beta = W_hbm / W_ici of v5e ('around 8')", "8", W / ici_bw, "", "8.2e11 / 9e10", hedged="around 8"),
    Answer("beta of v6e", "8", chip("v6e").hbm_bw / chip("v6e").bandwidth("ici"), "", "1.6e12 / 1.8e11",
           hedged="around 8"),
    Answer("F = 16384, B = 32: up to Y =", "64", decoding.bandwidth_limit(16384, 32, W, ici_bw), "ways",
           coarse="16384 / (32 x 9.1); the book takes 8 for 9.1"),
    Answer("Prefill: F = 16384 on one axis up to Y =", "", cost.tensor_limit(16384, V5E.flops(), ici_bw), "ways",
           "F W_ici / C"),
    Answer("B = 32, F = 16384 on a line, without wraparound", "",
           decoding.bandwidth_limit(16384, 32, W, V5E.bandwidth("line")), "ways", "half of it"),
    Answer("FSDP: gathering all weights on a 4x4 over reading a 16th", "", 16 * W / V5E.bandwidth("line", axes=2),
           "times", "16 W_hbm over two lines: what the book calls impossible"),
])  # fmt: skip

# %% [markdown]
# ## How close does a server come?
# The bound assumes that everything overlaps and runs at its peak. In a real server it does not. It reads memory at
# three quarters of the peak, starts each layer's kernels and two AllReduces one at a time, and runs other requests'
# prompts between its steps. Splitting each layer over more GPUs (TP, tensor parallelism) divides the reads and not the
# rest, so the bound becomes a smaller share of the time.
#
# The table has the bound, the terms of the planner's forecast, and what TensorRT-LLM was measured to take. (The
# forecast also has the caches' reads and the time lost to prompts, which have no column.) The last two columns are the
# bound over the forecast and over what was measured. The measured share falls from 71% on one GPU to 28% on eight, and
# the forecast says why: the kernels take as long as before, and collectives are added. The forecast's share falls
# faster, and the two differ by less than ten percentage points.

# %%
H200 = chip("h200")
served = Service(L70, 2048, 1024, "fp8", "fp8", "fp8", over_time=True)
MEASURED = {1: 21.122, 2: 12.425, 4: 8.2368, 8: 6.7158}  # TensorRT-LLM, ms; aiconfigurator, systems/silicon_sample.csv
rows, share = [], {}
for ranks, measured in MEASURED.items():
    one = ServingPlan(served, H200, (ranks,), "heads", (("Y", ranks),), batch=8)
    likely, least = likely_token(one), 1e3 * (one.step.kv + one.step.weights)
    share[ranks] = least / 1e3 / likely.seconds
    rows.append((ranks, least, *(1e3 * getattr(likely, name) for name in ("weights", "kernels", "collectives")),
                 1e3 * likely.seconds, measured, f"{share[ranks]:.0%}", f"{least / measured:.0%}"))  # fmt: skip
page.title("LLaMA-3 70B in fp8 on H200s, batch 8, 1,024 tokens in and out: ms a token")
page.table(rows, ["TP", "bound", "weights", "kernels", "collec-\ntives", "fore-\ncast", "measured",
                  "share,\nforecast", "share,\nmeasured"])  # fmt: skip
page.check("the share falls as measured, to a tenth", all(
    abs(share[ranks] - float(row[-1].rstrip("%")) / 100) < 0.1 for ranks, row in zip(MEASURED, rows, strict=True)
))  # fmt: skip

# %% [markdown]
# ## Question 7: when does 2D pay?
# If the weights are split over F alone (1D), every chip gathers and scatters activations of D numbers a token. Over
# three axes, each with links of W bytes/s, this takes 4BD/3W seconds, however many chips there are. If they are split
# over D by X and over F by YZ (2D), each chip moves only a part of D and a part of F, which takes 2BD/(XW) + 4BF/(YZ W)
# seconds. This falls as the number of chips N = XYZ grows, and is least at X = sqrt(ND/2F). An MLP with a gate has a
# second hidden array to reduce, which doubles the second term, so 2D then pays from twice as many chips.

# %%
D, F, N = 8192, 32768, [2**i for i in range(4, 13)]
two = {n: decoding.stationary_2d(1, D, F, *decoding.best_2d(n, D, F), ici_bw) for n in N}
one = decoding.stationary_1d(1, D, ici_bw)
gated = next(n for n in range(1, 1000) if decoding.stationary_2d(1, D, 2 * F, *decoding.best_2d(n, D, 2 * F), ici_bw)
             < one)  # fmt: skip
page.chart(
    "2d", {"1D": [(n, 1e6 * one) for n in N], "2D": [(n, 1e6 * t) for n, t in two.items()]}, "chips",
    "us a token", "Collectives of an MLP, D = 8192, F = 4D, rings of v5e's bandwidth", height=10,
    marks=[("x", decoding.threshold_2d(D, F), "N = 72")],
)  # fmt: skip
page.answers([
    Answer("7 2D pays from N >", "72", decoding.threshold_2d(D, F), "chips"),
    Answer("7 T_2D in BD / (sqrt(N) W)", "11.3", two[64] * 8 * ici_bw / D),
    Answer("7 X over sqrt(N/8)", "1", decoding.best_2d(64, D, F)[0] / 8**0.5),
    Answer("7 YZ over sqrt(8N)", "1", decoding.best_2d(64, D, F)[1] / 512**0.5),
    Answer("7 the general condition over F/D", "18", decoding.threshold_2d(D, 3 * D) / 3, "", "32 (3/4)^2"),
    Answer("7 with a gate, F = 4D: the first N", "", gated, "chips", "above 36 F/D = 144"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `heads_batch": (ATTENTION.format(B="B_Z", S="S")` by `heads_batch": (ATTENTION.format(B="B", S="S")`:
#    the cache's batch is whole, each chip along Z keeps all of it. What is sent instead of the AllToAlls?
#    Answer: Nothing: each chip along Z has the whole batch, and slices its heads from the cache (lines 2 and 4). Only
#    the AllReduce is left, so the check of two AllToAlls and an AllReduce fails. The price is memory, because each chip
#    along Z keeps a copy of the cache.
# 2. Question: up to which Y does HBM bind a step of 8 tokens in int8 of LLaMA-3 405B (F = 53,248)? Evaluate
#    `decoding.bandwidth_limit(53248, 8, W, ici_bw, weights="int8")`.
#    Answer: 365: F / B = 6,656, over 2 as a weight has one byte and an activation two, and over 9.1, the ratio of the
#    bandwidths.
# 3. Flag: run with `--mesh Y=4,Z=1`. Which collectives are left?
#    Answer: AllGather and AllReduce in all forms, and the ReduceScatter of `2d`. The AllToAlls of `heads_batch` and the
#    ReduceScatter of `sequence` are over Z, so they disappear.
