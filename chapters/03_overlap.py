# %% [markdown]
"""Part 3, "How to overlap matmul communication with compute": a collective matmul, chunk by chunk.
https://jax-ml.github.io/scaling-book/sharding

A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y] needs all of A on every device. Instead of gathering A first, the devices pass its
shards round a ring and multiply each shard while the next one is in flight. The numbers are the same, gradients
included, and the communication is hidden.
"""

# %% [markdown]
# ## Why take a collective apart?
# A product that needs a gathered operand waits for the whole AllGather, although part of its work could begin with the
# shard that each device already has. If the collective is written as hops around a ring, the product of each shard runs
# while the next one is in flight, and the wait is hidden.
#
# The price is more and smaller products, which reach less of a chip's FLOPs/s, and code that is harder to read. It
# pays where a product and its transfer take similar times. Where one of them is much longer, there is little to hide,
# and the plain AllGather is better.

# %%
import torch
from torch.func import vjp

from scaling import collectives as c
from scaling.book.answers import Answer
from scaling.book.arrays import drawn
from scaling.book.layout import width
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.hardware import chip
from scaling.show import bars, svg
from scaling.show.bars import Bar
from scaling.trace import trace

page = Page(__doc__, mesh="Y=4", device=True, seed=True, plot=True)
EXACT, Y = 1e-12, page.args.mesh["Y"]
B, D, F = 4, 8 * Y, 4 * Y
A, W, dOut = drawn(["A[B, D]", "W[D, F]", "dOut[B, F]"], {"B": B, "D": D, "F": F}, page.args.seed)
Out, pull = vjp(torch.matmul, A, W)  # one device's
wanted = {"Out": Out, **dict(zip(("dA", "dW"), pull(dOut), strict=True))}

# %% [markdown]
# ## The algorithm
# Device y begins with its own shard of A, column block y, and multiplies it with row block y of W. Meanwhile it sends
# the shard to its left neighbour and receives the next block from its right one. After Y products it has multiplied
# every block. It never waits for the whole of A, and never has more than two shards of it.


# %%
def collective_matmul(a: torch.Tensor, w: torch.Tensor, mesh) -> torch.Tensor:
    """A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y] on a ring over Y."""
    n, y = mesh.sizes["Y"], mesh.coord["Y"]
    to_the_left = [(j, (j - 1) % n) for j in range(n)]
    blocks, out = w.chunk(n), 0
    for i in range(n):
        if i < n - 1:
            following = c.ppermute("A[B, D_Y]", a, mesh, "Y", to_the_left, async_op=True)  # 1. send the shard on
        out = out + a @ blocks[(y + i) % n]  # 2. multiply it meanwhile
        if i < n - 1:
            a = following.wait()  # 3. receive the next one
    return out


def gathered_first(a: torch.Tensor, w: torch.Tensor, mesh) -> torch.Tensor:
    """Gather all of A, then multiply."""
    a = c.all_gather("A[B, D_Y] -> A[B, D]", a, mesh)
    return c.einsum("A[B, D] * W[D, F_Y] -> Out[B, F_Y]", a, w)


# %% [markdown]
# ## Chunk by chunk
# The table shows which block of A (and of the rows of W) each device multiplies at each step. Every device starts with
# a different one, so no link carries two blocks at once.

# %%
steps = [[chr(ord("A") + (y + i) % Y) for i in range(Y)] for y in range(Y)]
page.title(f"The block that each of {Y} devices multiplies, step by step")
page.table([(f"device {y}", *row) for y, row in enumerate(steps)], ["", *(f"step {i}" for i in range(Y))])
page.check("every device multiplies every block once", all(len(set(row)) == Y for row in steps))
page.check("no two devices the same at once", all(len(set(column)) == Y for column in zip(*steps, strict=True)))

# %% [markdown]
# ## Equal to dense, with gradients
# The loop is differentiated by `torch.func.vjp` like any function: the cotangent of a hop to the left is a hop to the
# right. Result and gradients are compared with one device's in float64. Look at the bytes, too: with V bytes in all of
# A, Y - 1 hops of a shard of V/Y send exactly what an AllGather sends. Nothing is saved but the waiting.


# %%
def compare(mesh) -> tuple[dict[str, float], int, int]:
    """Return the differences from one device (the worst of all ranks), and this rank's bytes sent in both ways."""
    types = {"Out": "Out[B, F_Y]", "dA": "A[B, D_Y]", "dW": "W[D, F_Y]"}
    a, w, cotangent = (c.shard(t, x.to(mesh.device), mesh)
                       for t, x in (("A[B, D_Y]", A), ("W[D, F_Y]", W), ("Out[B, F_Y]", dOut)))  # fmt: skip
    found, sent = {}, []
    for name, algorithm in (("collective matmul", collective_matmul), ("AllGather first", gathered_first)):
        with trace() as log:
            out, pull = vjp(lambda a, w, algorithm=algorithm: algorithm(a, w, mesh), a, w)
        sent.append(log.wire_bytes)
        got = {"Out": out, **dict(zip(("dA", "dW"), pull(cotangent), strict=True))}
        for key, x in got.items():
            found[f"{name}: {key}"] = difference(
                c.unshard(types[key], x, mesh), wanted[key], mesh
            )  # scaling: ignore[split]
    return found, *sent


differences, by_hops, by_gather = page.on_ranks(compare)
page.title(f"A[{B}, {D}] W[{D}, {F}] over {Y} devices")
page.equal([(name, apart, EXACT) for name, apart in differences.items()])
page.say()
page.same([
    ("in hops", "(Y - 1) V/Y", (Y - 1) * A.nbytes // Y, by_hops),
    ("by an AllGather", "V (Y - 1)/Y", (Y - 1) * A.nbytes // Y, by_gather),
], ["bytes sent by a device", "formula", "value", "counted"])  # fmt: skip

# %% [markdown]
# ## The overlap, drawn
# How much does it hide? The time lines below are of four v5p in a ring that sends one way; M is a product and H a hop.
# If A is gathered first, the MXU waits for all hops. Chunk by chunk, it takes little more than the longer of the two,
# all hops or all products. With F = 32768 a product takes longer than a hop, and sending is hidden; with F = 8192 the
# MXU still waits for each hop.

# %%
V5P, TOKENS, WIDTH, N = chip("v5p"), 4096, 8192, 4


def times(F: int) -> tuple[float, float]:
    """Return the seconds of a product with one of N blocks, and of a hop of one shard of A, in bf16."""
    return 2 * TOKENS * WIDTH * F / N / N / V5P.flops(), 2 * TOKENS * WIDTH / N / V5P.need("link_bw")


def serial(F: int) -> list[Bar]:
    product, hop = times(F)
    hops = [Bar("ICI", f"H{i}", (i - 1) * hop, i * hop) for i in range(1, N)]
    starts = [(N - 1) * hop + i * product for i in range(N)]
    return [*hops, *(Bar("MXU", f"M{i}", start, start + product) for i, start in enumerate(starts))]


def overlapped(F: int) -> list[Bar]:
    product, hop = times(F)
    works, end = [Bar("ICI", f"H{i}", (i - 1) * hop, i * hop) for i in range(1, N)], 0.0
    for i in range(N):
        start = max(end, i * hop)  # block i has arrived, and the product before it is done
        end = start + product
        works.append(Bar("MXU", f"M{i}", start, end))
    return works


# %% [markdown]
# First both widths as time lines, then the time of both algorithms at every width. From F = Y C/W on, sending costs
# nothing, where C is the chip's FLOPs/s and W the bytes/s of one link.

# %%
rows = []
for F in (8192, 32768):
    page.title(f"bf16 A[{TOKENS}, {WIDTH}_Y] W[{WIDTH}, {F}_Y] on a ring of {N} v5p, one way")
    for name, run in (("AllGather, then multiply", serial(F)), ("collective matmul", overlapped(F))):
        picture = bars.text(run, width() - 7, bars.end_of(serial(F)))
        title = f"{name}: {1e6 * bars.end_of(run):,.0f} us"
        page.show(f"{title}\n{picture}", lambda title=title, run=run: svg.time_lines([(title, run)], unit="in s"))
        took = bars.busy(run, "ICI"), bars.busy(run, "MXU"), bars.end_of(run)
        rows.append((F, name, *(f"{1e6 * t:,.0f}" for t in took)))
page.say()
page.table(rows, ["F", "algorithm", "sending us", "computing us", "in all us"])
turn = N * V5P.flops() / V5P.need("link_bw")  # where a product takes as long as a hop
Fs = sorted({turn, *(1024 * 2 ** (i / 2) for i in range(15))})
page.chart(
    "overlap", {
        "AllGather, then multiply": [(F, bars.end_of(serial(F))) for F in Fs],
        "collective matmul": [(F, bars.end_of(overlapped(F))) for F in Fs],
        "multiply alone": [(F, N * times(F)[0]) for F in Fs],
    }, "F", "seconds", f"A[{TOKENS}, {WIDTH}_Y] W[{WIDTH}, F_Y] on {N} v5p, one way round",
    marks=[("x", turn, f"F = Y C/W = {turn:,.0f}")], height=14,
)  # fmt: skip
product, hop = times(32768)
hidden = 1 - (bars.end_of(overlapped(32768)) - N * product) / ((N - 1) * hop)
page.answers([
    Answer("Hidden of the sending, F = 32768", "", 100 * hidden, "%", "each hop is shorter than a product"),
    Answer("Time over that of AllGather, then multiply, F = 32768", "",
           bars.end_of(overlapped(32768)) / bars.end_of(serial(32768)), "times",
           "4 products over 4 products and 3 hops"),
    Answer("F from which everything is hidden, one way", "", turn, "",
           "2BDF/(Y^2 C) = 2BD/(Y W): F/Y = C/W of one link, whatever B and D"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `[(j, (j - 1) % n) for j in range(n)]` by `[(j, (j + 1) % n) for j in range(n)]`. The blocks now
#    come from the left. Which index of W has to change with it, and what does the comparison say until it does?
#    Answer: `blocks[(y + i) % n]` must become `blocks[(y - i) % n]`, because after i hops from the left a device has
#    the block of device y - i. Until then result and gradients are wrong by as much as they are large, and nothing is
#    refused: no type knows which block a device holds.
# 2. Question: how much of the sending is hidden with F = 8192? Evaluate `1 - (bars.end_of(overlapped(8192)) - N *
#    times(8192)[0]) / ((N - 1) * times(8192)[1])`.
#    Answer: 40%: a hop takes longer than a product, so the MXU waits at each hop for the rest of it.
# 3. Flag: run with `--mesh Y=2`. How many hops are left, and is there anything to overlap?
#    Answer: One hop, which is in flight during the first of the two products. So half of the work can hide it, and
#    only the second product comes after.
