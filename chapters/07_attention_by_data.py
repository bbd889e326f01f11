# %% [markdown]
"""Part 7, attention by data: with experts over all ranks, as DeepSeek-V3 is served, beyond the book.
https://jax-ml.github.io/scaling-book/inference

All heads share a cache of latents (07_latent_decode.py), so if heads are split over Y, each rank along Y has the whole
cache. DeepSeek-V3 (arXiv:2412.19437, section 3.4.2) splits the requests instead, so that each has its whole cache on
few ranks, and spreads the experts over all ranks. Tokens travel to the experts that they chose, in numbers that the
router decides, and come back.
"""

# %% [markdown]
# ## What does one gain, and what does one give up?
# Caches are most of what a decode step reads and stores. If each is on one rank instead of Y, Y times as many sequences
# fit, and a step reads them faster. With many sequences each expert also gets more rows, so its weights are read for
# more tokens.
#
# The price is two AllToAlls in each layer, and that the ranks depend on how requests and choices of experts are spread:
# a step takes as long as the rank with the most rows. With few requests there is too little for each rank, every rank
# still reads all of attention's weights, and splitting heads is better.

# %%
import torch

from scaling import serve, tree
from scaling.book.answers import Answer
from scaling.book.decoding import decoded
from scaling.book.listing import difference, lines, show_lines
from scaling.book.page import Page
from scaling.configs import Config, get
from scaling.cost import decoding
from scaling.hardware import chip
from scaling.models import transformer
from scaling.plan.serve import Service, ServingPlan

page = Page(__doc__, mesh="E=2,Y=2", device=True, seed=True, plot=True)
E, Y = page.args.mesh["E"], page.args.mesh["Y"]
B, S = 4 * E * Y, 16
config = Config("small", L=2, D=32, F=48, N=2 * Y, K=Y, H=8, V=32 * Y, E=2 * E * Y, k=2)

# %% [markdown]
# ## One block, line by line
# B requests are split over the mesh axis E, and attention's N heads over Y. (E is also the dim of experts: in E_EY the
# experts are split over both axes.) The ranks along Y have the same requests, so before the experts each takes a share
# of them, B_EY. This is a slice, and nothing is sent. Then the rows of tokens, D numbers each, go to their experts by
# an AllToAll over all ranks and come back by another, and an AllGather over Y completes the result. Before that the
# ranks exchange how many rows will come: `load[E]` counts the tokens of each expert, and n[G, E] those that each of G
# ranks has for it. In `Row`, the dim R is that number, so it differs for each rank and expert. T is 1, one token of
# each request. V in the table is the bytes of the whole array (for `Row` and `Out`, rank 0's rows times the ranks), and
# `sent` what rank 0 sends.


# %%
def compared(mesh) -> dict:
    """Return by form: the difference from one device, the lines of a step, and [(array, op, V)] of its collectives."""
    params = transformer.init(config, page.args.seed, torch.float64, mesh.device)
    g = torch.Generator().manual_seed(page.args.seed)
    tokens = torch.randint(0, config.V, (B, S), generator=g).to(mesh.device)
    prompts = torch.full((B,), S - 2, device=mesh.device)
    whole, found = decoded(params, tokens, prompts, 2, config)[0], {}
    for form in ("heads", "experts"):
        mine = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
        logits, (*_, log) = decoded(mine, tokens, prompts, 2, config, mesh, form)
        sent = [(e.before.name, e.op, e.nbytes) for e in log.collectives() if mesh.size(e.axes) > 1]
        found[form] = difference(logits, whole, mesh), lines(log), sent
    return found


ran = page.on_ranks(compared)
first = [row for row in ran["experts"][1] if row[1]]
start = next((i for i, row in enumerate(first) if "load" in row[0]), 0) - (Y > 1)
of_layer = first[start : start + 4 + 2 * (Y > 1)]
show_lines(page, f"The collectives of a layer, on E={E}, Y={Y}, {B} requests, float64", of_layer, flops=False)
page.say()
page.equal([(form, off, 1e-12) for form, (off, *_) in ran.items()])

# %% [markdown]
# ## Which of the two sends less?
# The form `heads` on the same mesh splits experts over E and their features over Y. Each token's row goes to all Y
# ranks of a group, and the partial sums come back and are reduced. The form `experts` keeps experts whole and spreads
# the same rows over Y times as many ranks. V of the AllToAll is the same, B k D numbers for k experts a token, but a
# rank sends only its part of it, B k D / (E Y) instead of B k D / E. The table has a step's collectives by the closed
# form and as traced. The number of rows for experts depends on the router, so their V is not compared.

# %%
rows = []
for form in ran:
    for op in ("AllGather", "AllReduce", "AllToAll"):
        moved = decoding.collectives(form, config, B, page.args.mesh, dtype="fp64")
        closed = sum(m.nbytes * m.times for m in moved if m.op == op and m.what != "tokens to experts")
        ours = sum(V for name, kind, V in ran[form][2] if kind == op and (kind != "AllToAll" or name == "n"))
        rows.append((form, op, closed, ours))
page.title("The collectives of a whole step, V bytes")
page.same(rows, ["form", "collective", "closed form", "traced"])

# %% [markdown]
# ## When does it beat heads over Y?
# The table is for DeepSeek-V3 on 64 H800s in fp8 with a bf16 cache: ms of a step by the planner's bound, with a star
# where memory does not suffice. Each row is a context and a batch. The columns go from heads split over all ranks to
# requests split over all ranks; with Y=1, the last, the two forms are equal. Heads over all 64 ranks keep 64 copies of
# the latent cache. They win only for few and short requests, where a step mainly reads weights. With more or longer
# requests, a smaller Y is best.

# %%
V3, H800 = get("deepseek-v3"), chip("h800")
WAYS = {"heads,\nY=64": ("heads", 64, 1), "heads,\nY=8 E=8": ("heads", 8, 8), "experts,\nY=8 E=8": ("experts", 8, 8),
        "experts,\nY=2 E=32": ("experts", 2, 32), "heads,\nE=64": ("heads", 1, 64)}  # fmt: skip
BATCHES = (64, 256, 1024, 4096)


def way(context: int, batch: int, form: str, Y: int, E: int) -> ServingPlan:
    service = Service(V3, context, weights="fp8", kv="bf16", compute="fp8")
    return ServingPlan(service, H800, (64,), form, (("Y", Y), ("E", E)), batch)


def cell(one: ServingPlan) -> str:
    return f"{1e3 * one.step.seconds:,.1f}{'' if one.fits else ' *'}"


page.title("ms of a decode step")
page.table([(context, batch, *(cell(way(context, batch, *each)) for each in WAYS.values()))
            for context in (1024, 4096, 32768) for batch in BATCHES], ["context", "batch", *WAYS])  # fmt: skip
page.chart("attention-by-data", {name.replace("\n", " "): [(b, 1e3 * way(4096, b, *each).step.seconds) for b in BATCHES]
                                 for name, each in WAYS.items()}, "batch", "ms", "a step at context 4096")  # fmt: skip


def crossing(context: int) -> int:
    """Return the smallest batch, a multiple of 64, at which attention by data over 64 ranks beats heads over 64."""
    return next(b for b in range(64, 8192, 64) if way(context, b, "heads", 1, 64).step.seconds
                < way(context, b, "heads", 64, 1).step.seconds)  # fmt: skip


latent = V3.latent
page.answers([
    Answer("Bytes of a token's latent cache, all layers, bf16", "", 2 * V3.L * (latent.kv_rank + latent.rope), "",
           "2 L (kv_rank + rope)"),
    Answer("Copies of it with heads over 64", "", way(4096, 64, "heads", 64, 1).copies, "", "one on each rank"),
    Answer("Attention by data is faster at context 1024 from a batch of", "", crossing(1024), "", "multiples of 64"),
    Answer("... at context 4096", "", crossing(4096), "", "multiples of 64"),
    Answer("Rows that an expert gets of 4,096 tokens, on average", "", 4096 * V3.k / V3.E, "", "B k / E"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `weights="fp8"` by `weights="bf16"`. Which mesh is now the best for few requests, and why?
#    Answer: For 64 requests of 1,024 tokens heads over Y=64, now at 7.3 ms; for 64 of 4,096 tokens heads over Y=8, E=8,
#    at 7.9 ms, where Y=2, E=32 was the best in fp8. Each rank reads its own copy of the attention's weights, which are
#    not split over E, and with two bytes a weight the copies cost twice as much: E=64 takes 14.8 ms in place of 7.4.
# 2. Question: how many rows does an expert get of 16,384 tokens? Evaluate `16384 * V3.k / V3.E`.
#    Answer: 512 on average: each token goes to 8 of 256 experts.
# 3. Flag: run with `--mesh E=1,Y=4`. All ranks have the same requests: what does "experts" still save?
#    Answer: The AllReduce after the experts. Both forms reduce the attention's output, but `experts` ends with an
#    AllGather, which sends half as many bytes as an AllReduce. Its AllReduces have 12,416 bytes and its AllGathers
#    24,576; those of `heads` have 20,480 and 16,384.
