# %% [markdown]
"""Part 10, collective matmuls: one way and both ways round the ring, in Questions 3 and 4, with Part 3.
https://jax-ml.github.io/scaling-book/jax-stuff

    A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]                           AllGather, hidden
    A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]                           ReduceScatter, hidden
    A[B, D_Y] * W[D_Y, F] -> Out[B, F]                             AllReduce, hidden as far as possible
    In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]       the MLP block: the first, then the second

A and In have B tokens of D numbers, and F is the width of the result, or of the MLP. Each form is compared with one
device, gradients included; its hops and its bytes per link are derived and counted. Then the roofline says how much of
the communication a v5e hides, and at which sizes the simple way wins.
"""

# %% [markdown]
# ## Why not gather first?
# In tensor parallelism every layer waits: a product for an AllGather, or a ReduceScatter for a product. This chapter
# splits both collectives into hops, so that each hop around the ring runs beside the product of the present shard, as
# 03_overlap.py does for the simplest case. If the links work in both directions, two shards travel at once.
#
# The price is smaller products and more lines. Where a product is short compared with its communication, the plain
# collective is faster; the last section computes where.

# %%
import torch
import torch.nn.functional as F_
from torch.func import vjp

from scaling import cost, tree
from scaling.book.answers import Answer
from scaling.book.arrays import drawn
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.collectives.rings import LinkBytes
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies.collective_matmul import gather_matmul, matmul_reduce, matmul_scatter, mlp

page = Page(__doc__, mesh="Y=4", device=True, seed=True)
EXACT, Y = 1e-12, page.args.mesh["Y"]
B, D, F = 6, 4 * Y, 8 * Y

# %% [markdown]
# ## Equal to one device
# The forms are in `scaling/strategies/collective_matmul.py`, a screen each. One way, the AllGather form is the loop of
# 10_shard_map.py: start to send the shard of A on, meanwhile multiply it by its rows of W, and wait for the next shard.
# AllGather and ReduceScatter mirror each other. In the first, shards travel and each rank multiplies them; in the
# second, sums travel and each rank adds its product. So the vjp of one is the other, in the opposite direction, and
# needs no further line.

# %%
FORMS = {
    "AllGather": (gather_matmul, ("A[B, D_Y]", "W[D, F_Y]"), "Out[B, F_Y]"),
    "ReduceScatter": (matmul_scatter, ("A[B, D_Y]", "W[D_Y, F]"), "Out[B, F_Y]"),
    "AllReduce": (matmul_reduce, ("A[B, D_Y]", "W[D_Y, F]"), "Out[B, F]"),
    "the MLP block": (mlp, ("In[B, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]"), "Out[B, D_Y]"),
}


def dense(A, W, *W_out):
    return F_.gelu(A @ W) @ W_out[0] if W_out else A @ W


problems = {}
for name, (_, types, result) in FORMS.items():
    *operands, dOut = drawn([*types, result], {"B": B, "D": D, "F": F}, page.args.seed)
    Out, pull = vjp(dense, *operands)
    problems[name] = operands, dOut, (Out, *pull(dOut))


def compare(mesh) -> dict[str, float]:
    """Return the largest difference of each form, forward and gradients, from each rank's part of one device's."""
    found = {}
    for name, (form, types, result) in FORMS.items():
        operands, dOut, wanted = problems[name]
        shards = [x.to(mesh.device) for x in tree.shard(operands, list(types), mesh)]
        cotangent = tree.shard([dOut], [result], mesh)[0].to(mesh.device)
        if "_Y" not in result:
            cotangent = cotangent / Y  # Out is replicated: the devices' cotangents are terms of one sum
        mine = tree.shard(list(wanted), [result, *types], mesh)
        for ways in (1, 2):
            out, pull = vjp(lambda *a, form=form, ways=ways: form(*a, mesh, ways=ways), *shards)
            off = difference([out, *pull(cotangent)], mine, mesh)
            found[f"{name}, {ways} way{'s' * (ways - 1)}"] = off
    return found


page.title(f"{Y} devices, result and gradients")
page.equal([(name, apart, EXACT) for name, apart in page.on_ranks(compare).items()])

# %% [markdown]
# ## Hops and bytes per link
# On n devices, one way takes n - 1 hops. Both ways at once share them, floor(n/2) to the right and the rest to the
# left. Each hop carries V/n, where V is the bytes of the array that would be gathered or reduced. An AllReduce sends
# sums round the ring and then gathers them, so it sends twice the bytes. To hide more of it, the result is cut into two
# tiles, and the gather of the first runs beside the sums of the second: three rounds, where an AllReduce without tiles
# has two. All of this is counted on an abstract ring, with arrays in float32.

# %%
rows, bytes_of = [], {}
for n in (4, 5, 8):
    mesh = AbstractMesh({"Y": n})
    wide = (B, 4), (4, 8 * n)
    shapes = {"AllGather": ((B, 4), (4 * n, 8)), "ReduceScatter": wide, "AllReduce": wide}
    for name, pair in shapes.items():
        V = 4 * B * n * (4 if name == "AllGather" else 8)
        for ways in (1, 2):
            log, hops = LinkBytes(), n - 1 if ways == 1 else n // 2
            FORMS[name][0](*(torch.empty(shape, device="meta") for shape in pair), mesh, ways=ways, log=log)
            rounds, share = (3, 2) if name == "AllReduce" else (1, 1)
            bytes_of[name, n, ways] = log.busiest
            derived = rounds * hops, share * hops * V // n
            held = page.check(f"{name}, {n} devices, {ways} ways", (log.hops, log.busiest) == derived)
            rows.append((name, n, ways, derived[0], log.hops, derived[1], log.busiest, held))
page.title("On a ring, derived and counted")
page.table(rows, ["form", "n", "ways", "hops", "counted", "bytes, busiest link", "counted", "the same"])
page.answers([
    Answer("Q4: one way over both ways, bytes of a link, 5 devices", "",
           bytes_of["ReduceScatter", 5, 1] / bytes_of["ReduceScatter", 5, 2], "times", "(n-1) / floor(n/2), n odd"),
    Answer("Q4: one way over both ways, bytes of a link, 8 devices", "",
           bytes_of["ReduceScatter", 8, 1] / bytes_of["ReduceScatter", 8, 2], "times",
           "7/4: the device opposite is reached one way only"),
])  # fmt: skip

# %% [markdown]
# ## How much does it hide?
# The book's example is A[1024, 2048] W[2048, 8192] on a mesh X=2, Y=4, with a ring along Y, in bf16 on a v5e, so a ring
# has B = 512 rows. A device multiplies its blocks one by one, each in the time of its FLOPs or of its bytes from HBM.
# One product of a ring runs beside no hop, the last one if shards travel, the first one if sums do. So a form takes
# `T/n + max(hops, T (n-1)/n)`, where T is the time of its product and `hops` that of all its hops, each at least a
# microsecond. In an AllReduce the rounds at its two ends are not hidden.
#
# In the table, `in sequence` is the collective and then the product, and the last column says whether hiding wins. It
# does if the product takes long enough. If its hops take most of the time, it loses: both ways, two hops carry V/2 over
# a link, where a library's collective carries 3V/8. The smallest AllReduce loses by the latency of its many hops.

# %%
V5E, n = chip("v5e"), 4


def product_seconds(B: int, D: int, F: int, form: str) -> float:
    """Return the seconds of one device's products, by FLOPs or by bytes: W's columns, or W's rows and A's columns."""
    rows, columns = (D, F // n) if form == "AllGather" else (D // n, F)
    return cost.matmul(B, rows, columns, V5E.flops(), V5E.hbm_bw).lower


def seconds(B: int, D: int, F: int, form: str, ways: int) -> tuple[float, float, float]:
    """Return (the product, collective and product in sequence, the collective matmul) in seconds.

    They are for n v5e in a ring and A[B, D] W[D, F] in bf16.
    """
    product = product_seconds(B, D, F, form)
    V, link = 2 * B * (D if form == "AllGather" else F), V5E.need("link_bw")
    hops = n - 1 if ways == 1 else n // 2

    def travel(part):
        return hops * max(V * part / n / link, V5E.hop_latency)

    optimal = max(V * (n - 1) / n / (2 * link), n // 2 * V5E.hop_latency)  # a library's collective, both ways
    if form != "AllReduce":
        return product, product + optimal, product / n + max(travel(1), product * (n - 1) / n)
    rest = product * (n - 1) / n / 2
    ring = product / n + max(travel(1 / 2), rest) + max(2 * travel(1 / 2), rest) + travel(1 / 2)
    return product, product + 2 * optimal, ring


rows, ratios = [], {}
for size in ((512, 2048, 8192), (512, 2048, 2048), (64, 2048, 8192), (4096, 8192, 8192), (16, 1024, 1024)):
    for form in ("AllGather", "ReduceScatter", "AllReduce"):
        product, serial, _ = seconds(*size, form, 1)
        one, both = (seconds(*size, form, ways)[2] for ways in (1, 2))
        ratios[size, form] = min(one, both) / serial
        verdict = "wins" if min(one, both) < 0.99 * serial else "loses" if min(one, both) > 1.01 * serial else "even"
        rows.append((f"{size}", form, *(f"{1e6 * t:.1f}" for t in (product, serial, one, both)), verdict))
page.title(f"us on {n} v5e in a ring along Y, by the roofline: B, D, F")
page.table(rows, ["size", "form", "product", "in sequence", "one way", "both ways", "hiding"])
book = (512, 2048, 8192)
product, serial, _ = seconds(*book, "AllGather", 2)
page.answers([
    Answer("The example's product on a device, v5e, bf16", "", 1e6 * product, "us",
           "2 * 512 * 2048 * 2048 FLOPs; the book's 224 us are of older chips, whatever its comment says"),
    Answer("Hidden over in sequence, AllGather, v5e", "", ratios[book, "AllGather"], "times", "as in the table"),
    Answer("Q3.1: hidden over in sequence, AllReduce, v5e", "", ratios[book, "AllReduce"], "times",
           "the sums of the first tile and the gather of the last are not hidden"),
])  # fmt: skip

# %% [markdown]
# The block of the questions is an AllGather form and then a ReduceScatter form, In[B, D_Y] W_in[D, F_Y] and Tmp[B, F_Y]
# W_out[F_Y, D], here with the same sizes. The rows divide its time in sequence by its time with hidden collectives, so
# hiding wins above 1.

# %%
block = {}
for ways in (1, 2):
    (_, *one), (_, *two) = seconds(512, 2048, 8192, "AllGather", ways), seconds(512, 8192, 2048, "ReduceScatter", ways)
    block[ways] = [a + b for a, b in zip(one, two, strict=True)]  # in sequence, and hidden
page.answers([
    Answer("Q3.1: Out[B_X, F] is, over Y", "not replicated",
           "replicated" if "Y" in parse("Out[B_X, F]").replicated({"X": 2, "Y": 2}) else "not replicated",
           erratum="an AllReduce over Y leaves the same on every device of Y, as the type says"),
    Answer("Q3.3: the block, in sequence over hidden, one way, v5e", "", block[1][0] / block[1][1], "times",
           "hops one way are longer than their products"),
    Answer("Q4: the block, in sequence over hidden, both ways, v5e", "", block[2][0] / block[2][1], "times",
           "2 hops in place of 3, still longer than their products"),
    Answer("Q4: the block, one way over both ways", "", block[1][1] / block[2][1], "times", "2 hops in place of 3"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `cotangent = cotangent / Y` by `cotangent = cotangent * 1`. Which form fails, why by Y - 1 times its
#    gradients, and which row of the law of cotangents (notation.md) says so?
#    Answer: The AllReduce form, one way and both ways, whose gradients differ by 3.0 times their largest element. The
#    row of replicated arrays says that their cotangent is unreduced: the terms of the four devices add up to it. Four
#    whole cotangents add up to Y times the gradients, which is off by Y - 1 = 3 times.
# 2. Question: from which F on are all hops of the AllGather form hidden, one way? Evaluate
#    `n * V5E.flops() / V5E.need("link_bw")`; `tests/benchmarks/collective_matmul.py` times all forms on a paced wire.
#    Answer: 17,511: a hop sends 2 B D / Y bytes while the device computes 2 B (D/Y) (F/Y) FLOPs, so F has to be Y C /
#    W, and B and D cancel.
# 3. Flag: run with `--mesh Y=3`. Both ways at once there is one hop: what does it hide?
#    Answer: It brings the shards of both neighbours while the device multiplies its own, so a third of the product
#    hides all communication if the product is long enough. The other two thirds send nothing.
