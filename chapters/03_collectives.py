# %% [markdown]
"""Part 3, the communication primitives: their results and cotangents, the rings behind them, and their time here.
https://jax-ml.github.io/scaling-book/sharding

Every collective runs on ranks, forward and backward, and is compared with the same function on one device, which sees
the operands of all ranks. Rings are drawn hop by hop and their links counted (Question 10), AllGather and ReduceScatter
are written as matrices, and all four collectives are timed (Question 8). Their cost on TPUs is in 03_timings.py.
"""

# %%
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.func import jacrev, vjp

from scaling import collectives as c
from scaling.book.answers import Answer
from scaling.book.arrays import largest
from scaling.book.layout import table
from scaling.book.page import Page
from scaling.collectives import rings
from scaling.collectives.op import dual_line
from scaling.show import svg

page = Page(
    __doc__, mesh="X=4", device=True, seed=True, plot=True, largest=(1 << 24, "bytes of the largest array timed")
)
EXACT, n = 1e-12, page.args.mesh["X"]
RING = [(i, (i + 1) % n) for i in range(n)]

# %% [markdown]
# ## Why few primitives, and why their derivatives?
# Ranks could send each other any messages. A program of single messages is hard to read, can deadlock, and has no
# derivative that one could write down. All strategies of the book need only a few patterns, in which all ranks of an
# axis take part, so these are the words of the language. Training differentiates through them: if a forward line is an
# AllGather, the backward has to know which collective brings the gradient back. PyTorch's own collectives leave that to
# the programmer, and a wrong choice gives wrong gradients without any error.
#
# ## The primitives
# A collective is a function from the arrays of all ranks to new arrays on all ranks. So one device can compute it, too:
# `stacked` takes the operands of all n ranks, stacked to [n, I, J], and returns all results. The derivative of the loss
# with respect to an array is the array's cotangent, and torch derives it for this function. Look at the fourth column.
# A cotangent is `{U_X}` where the array was replicated over X, and replicated where the array was `{U_X}`. So AllGather
# and ReduceScatter are each other's transpose. (The root is the one rank that a Broadcast or a Scatter sends from, and
# that a Reduce or a Gather sends to.)


# %%
def everyone(whole: torch.Tensor) -> torch.Tensor:
    """Return the whole array once for every rank."""
    return whole.expand(n, *whole.shape)


def root_only(stack: torch.Tensor) -> torch.Tensor:
    return torch.cat([stack[:1], torch.zeros_like(stack[1:])])


def swap(stack: torch.Tensor) -> torch.Tensor:
    """Send block j of rank i's columns to rank j."""
    return stack.unflatten(2, (n, -1)).permute(2, 0, 1, 3).flatten(1, 2)


def own_rows(stack: torch.Tensor) -> torch.Tensor:
    return torch.stack([rows.unflatten(0, (n, -1))[i] for i, rows in enumerate(stack)])


def flat(stack: torch.Tensor) -> torch.Tensor:
    return stack.flatten(0, 1)


def parts(whole: torch.Tensor) -> torch.Tensor:
    return whole.unflatten(0, (n, -1))


PRIMITIVES = {  # name: (type, in words, the function on the stack)
    "all_gather": ("A[I_X, J] -> A[I, J]", "all get all rows", lambda s: everyone(flat(s))),
    "reduce_scatter": ("A[I, J] {U_X} -> A[I_X, J]", "the sum, split", lambda s: parts(s.sum(0))),
    "all_reduce": ("A[I, J] {U_X} -> A[I, J]", "all get the sum", lambda s: everyone(s.sum(0))),
    "all_to_all": ("A[I_X, J] -> A[I, J_X]", "X moves from I to J", swap),
    "shard": ("A[I, J] -> A[I_X, J]", "each keeps its rows", own_rows),
    "broadcast": ("A[I, J] {U_X} -> A[I, J]", "all get the root's", lambda s: everyone(s[0])),
    "reduce": ("A[I, J] {U_X} -> A[I, J] {U_X}", "the root gets the sum", lambda s: root_only(everyone(s.sum(0)))),
    "scatter": ("A[I, J] {U_X} -> A[I_X, J]", "the root's, split", lambda s: parts(s[0])),
    "gather": ("A[I_X, J] -> A[I, J] {U_X}", "the root gets all rows", lambda s: root_only(everyone(flat(s)))),
    "ppermute": ("A[I_X, J]", "each its neighbour's", lambda s: s.roll(1, 0)),
}  # fmt: skip
NAMED = {"broadcast": "reduce", "reduce": "broadcast", "scatter": "gather", "gather": "scatter", "ppermute": "inverse"}

# %% [markdown]
# On ranks each primitive is one call. Results and cotangents are compared with one device's in float64, where they may
# differ by rounding only. (A comment such as `# scaling: ignore[split]` silences a rule of `python -m scaling.check`
# for its line: here a rank's own part is compared with the whole on purpose.)


# %%
def call(name: str, x: torch.Tensor, mesh) -> torch.Tensor:
    line = PRIMITIVES[name][0]
    return c.ppermute(line, x, mesh, "X", RING) if name == "ppermute" else getattr(c, name)(line, x, mesh)


rng = torch.Generator().manual_seed(page.args.seed)
operands = torch.randn(n, 2 * n, 3 * n, generator=rng, dtype=torch.float64)
wanted = {}  # on one device: the results, random cotangents, and the operands' cotangents
for name, (*_, stacked) in PRIMITIVES.items():
    results, pull = vjp(stacked, operands)
    cotangents = torch.randn(results.shape, generator=rng, dtype=torch.float64)
    wanted[name] = results, cotangents, pull(cotangents)[0]


def check_primitives(mesh) -> dict[str, list[float]]:
    """Return each primitive's largest difference from one device over all ranks: of the result and of the cotangent."""
    found, rank = {}, mesh.rank
    for name, whole in wanted.items():
        should, cotangents, should_back = (x.to(mesh.device) for x in whole)
        result, pull = vjp(lambda own, name=name: call(name, own, mesh), operands[rank].to(mesh.device))
        pairs = ((result, should[rank]), (pull(cotangents[rank])[0], should_back[rank]))
        worst = torch.stack(
            [(got - one).abs().max() / one.abs().max().clamp(min=1) for got, one in pairs]
        )  # scaling: ignore[partial-plus-whole]
        found[name] = c.all_gather("Worst[R_X, W] -> Worst[R, W]", worst[None], mesh).amax(0).tolist()
    return found


differences = page.on_ranks(check_primitives)
page.title(f"The primitives on X={n}, in float64: results and cotangents against one device's")
rows = []
for name, (line, what, _) in PRIMITIVES.items():
    equal = page.check(f"{name} and its cotangent", largest(differences[name]) <= EXACT * n)
    rows.append((name, line, what, NAMED.get(name) or dual_line(line, ("X",)), equal))
page.table(rows, ["collective", "type", "in words", "cotangent", "equal"])

# %% [markdown]
# ## AllGather and ReduceScatter as matrices
# Both are linear functions, so each is a matrix that takes the numbers of all devices, written below each other, to
# those that they have afterwards. Write (x) for the Kronecker product, which puts a copy of its second matrix in place
# of each number of the first, times this number. A broadcast of n numbers to p devices is u (x) I_n, where u is a
# column of p ones, and a reduction is its transpose. AllGather is broadcast (x) I_p, ReduceScatter is reduce (x) I_p.
# Since (A (x) B)^T = A^T (x) B^T, one is the other's transpose. The matrices are printed for n = 1 and p = 2, with a
# semicolon after each row. For n = 2 and p = 3 they are compared with the derivatives of one device's functions.


# %%
def matrices(items: int, p: int) -> tuple[torch.Tensor, ...]:
    """Return broadcast, reduce, AllGather and ReduceScatter of p devices, each as a matrix."""
    u = torch.ones(p, 1, dtype=torch.float64)
    broadcast = torch.kron(u, torch.eye(items, dtype=torch.float64))
    reduce = torch.kron(u.T, torch.eye(items, dtype=torch.float64))
    eye = torch.eye(p, dtype=torch.float64)
    return broadcast, reduce, torch.kron(broadcast, eye), torch.kron(reduce, eye)


def written(matrix: torch.Tensor) -> str:
    return "; ".join(" ".join(f"{x:g}" for x in row) for row in matrix.tolist())


page.title("Kronecker products")
for name, matrix in zip(("broadcast", "reduce", "AllGather", "ReduceScatter"), matrices(1, 2), strict=True):
    page.say(f"{name:<14} n = 1, p = 2: [{written(matrix)}]")
_, _, gather, scatter = matrices(2, 3)
x = torch.zeros(6, dtype=torch.float64)  # p shards of n numbers, concatenated
by_derivative = jacrev(lambda shards: shards.expand(3, 6).flatten())(x)
summed = jacrev(lambda copies: copies.view(3, 6).sum(0))(torch.zeros(18, dtype=torch.float64))
page.check("AllGather as a matrix, n = 2, p = 3", torch.equal(gather, by_derivative))
page.check("ReduceScatter as a matrix", torch.equal(scatter, summed))
transposed = page.check("AllGather^T = ReduceScatter", torch.equal(gather.T, scatter))
page.say(f"AllGather^T = ReduceScatter, n = 2, p = 3: {transposed}")

# %% [markdown]
# ## The rings behind them, hop by hop
# A collective over a ring is a series of hops between neighbours. In the pictures, each row is a device, and the
# AllGather takes n - 1 hops one way and n/2 both ways. With more devices there are more hops, but each carries a
# smaller shard, so the time of a large array does not depend on their number. A ReduceScatter's sum collects its terms
# on the way to the device that keeps it. An AllToAll has fewer chunks to pass on with every hop (those right of the
# bar, or without a colour): 3 + 2 + 1 quarters of a shard, which is half of what an AllGather sends. A frame has the
# data of each device after a hop, in which it sends its neighbours what `scaling.collectives.rings` sends.


# %% tags=["hide-input"]
def gather_frames(n: int, ways: int = 2) -> list[list[set[int]]]:
    """Return frames with frame[d] the shards of device d, which passes on its last shard, one way or both ways."""
    right, left = (n - 1, 0) if ways == 1 else (n // 2, (n - 1) // 2)  # the hops of a shard each way
    return [[{(d + i) % n for i in range(-hop, min(hop, left) + 1)} for d in range(n)] for hop in range(right + 1)]


def scatter_frames(n: int) -> list[list[tuple[int, set[int]]]]:
    """Return frames with frame[d] the block whose sum device d works on, and its terms so far; one way round the ring.

    A sum begins on the neighbour of the device that will own it, and passes all other devices before it arrives there.
    """
    return [[((d - 1 - hop) % n, {(d - i) % n for i in range(hop + 1)}) for d in range(n)] for hop in range(n)]


def exchange_frames(n: int) -> list[list[tuple[list, list]]]:
    """Return frames with frame[d] the chunks (source, target) that device d keeps and will pass on; one way."""

    def chunks(d: int, hop: int) -> tuple[list, list]:
        source = (d - hop) % n  # the device whose chunks have just arrived
        kept = [((d - i) % n, d) for i in range(hop + 1)]
        return kept, [(source, (source + i) % n) for i in range(hop + 1, n)]

    return [[chunks(d, hop) for d in range(n)] for hop in range(n)]


def draw_shards(held: set[int], n: int) -> str:
    """Return the shards as letters: {0, 2} of 4 -> "A.C."."""
    return "".join(chr(ord("A") + i) if i in held else "." for i in range(n))


def partial_sum(state: tuple[int, set[int]]) -> str:
    """Return a partial sum as text: (2, {0, 3}) -> "C: 0+3"."""
    return f"{chr(ord('A') + state[0])}: " + "+".join(map(str, sorted(state[1])))


def draw_chunks(state: tuple[list, list]) -> str:
    """Return the kept chunks, a bar and the travelling ones, each as its source's letter and target's number."""
    kept, passing = (" ".join(f"{chr(ord('a') + i)}{j}" for i, j in part) for part in state)
    return f"{kept} | {passing}" if passing else kept


# %% tags=["hide-input"]
def show_frames(frames: Sequence[Sequence], cell: Callable[[object], str]) -> None:
    """Show a table with a row for each device and a column for each frame; `cell` writes the data of a device.

    In a notebook, show a picture of each frame. A cell has the colour of the device whose letter begins it, up to the
    bar, which chunks that travel follow.
    """
    n, heads = len(frames[0]), ["at first", *(f"hop {hop}" for hop in range(1, len(frames)))]

    def cells(device: int, text: str) -> list[tuple[str, str]]:
        kept, _, passing = (part.split() if " " in part else [*part] for part in text.partition(" | "))
        coloured = [(x.strip("."), svg.colour(ord(x[0].upper()) - 65, n, n) if x[0].isalpha() else "") for x in kept]
        return [(str(device), "#fff"), *coloured, *((x, "") for x in passing)]

    pictures = [(head, [cells(d, cell(state)) for d, state in enumerate(frame)])
                for head, frame in zip(heads, frames, strict=True)]  # fmt: skip
    rows = [(f"device {d}", *(cell(frame[d]) for frame in frames)) for d in range(n)]
    page.show(table(rows, ["", *heads]), lambda: svg.grids(pictures, 180, 22 * n))


# %%
page.title("AllGather both ways on a ring of 8: the shards that a device has")
show_frames(gather_frames(8), lambda held: draw_shards(held, 8))
page.title("AllGather one way on a ring of 4")
show_frames(gather_frames(4, 1), lambda held: draw_shards(held, 4))
page.title("ReduceScatter one way on a ring of 4: a device's block, and the terms of its sum")
show_frames(scatter_frames(4), partial_sum)
page.title("AllToAll one way: what a device keeps, and what it passes on; b3 goes from b = 1 to 3")
show_frames(exchange_frames(4), draw_chunks)

# %% [markdown]
# The rings themselves run on the ranks of this chapter, too, and their results equal the collectives'.


# %%


def check_rings(mesh) -> dict[str, float]:
    """Return the differences between the rings written with ppermute and the collectives, on these ranks."""
    own = torch.Generator().manual_seed(mesh.rank)
    shard, term, chunks = (torch.randn(n, n, 4, dtype=torch.float64, generator=own).to(mesh.device) for _ in range(3))
    gathered = c.all_gather("A[I_X, J, K] -> A[I, J, K]", shard, mesh)
    scattered = c.reduce_scatter("A[I, J, K] {U_X} -> A[I_X, J, K]", term, mesh)
    exchanged = c.all_to_all("A[J, I_X, K] -> A[J_X, I, K]", chunks, mesh)[0]  # dim 0: the chunk for each device
    found = {}
    for ways, word in ((1, "one way"), (2, "both ways")):
        found[f"ring AllGather, {word}"] = rings.all_gather(shard, mesh, "X", ways) - gathered
        found[f"ring ReduceScatter, {word}"] = (
            rings.reduce_scatter(term, mesh, "X", ways) - scattered
        )  # scaling: ignore[split]
        found[f"ring AllToAll, {word}"] = rings.all_to_all(chunks, mesh, "X", ways).flatten(0, 1) - exchanged
    return {name: largest([float(apart.abs().max())], mesh) for name, apart in found.items()}


page.say()
page.equal([(name, apart, EXACT) for name, apart in page.on_ranks(check_rings).items()])

# %% [markdown]
# ## Question 10: scalars over one link
# The question is how much each link carries when an N x N matrix is gathered or exchanged over D devices. The rings run
# on an abstract mesh, and every scalar is counted on its link. One way, an AllToAll costs half of an AllGather. Both
# ways it costs a quarter, because no chunk goes farther than half of the ring.

# %%
D = 32
loads = {(name, ways): busiest for name, ways, _, busiest in rings.ring_counts(D, 2 * D)}  # a device holds 2 D scalars
area = 2 * D * D  # N^2
share = {key: busiest / area for key, busiest in loads.items()}
page.title(f"Question 10, D = {D}: scalars over the busiest link, of N^2")
page.same([
    ("10.1 AllGather, one way", "N^2 (1 - 1/D)", area * (D - 1) // D, loads["AllGather", 1]),
    ("10.1 ReduceScatter, one way", "N^2 (1 - 1/D)", area * (D - 1) // D, loads["ReduceScatter", 1]),
    ("10.2 AllToAll, one way", "N^2/2 (1 - 1/D)", area * (D - 1) // D // 2, loads["AllToAll", 1]),
], ["question", "the book's", "value", "counted"])  # fmt: skip
page.answers([
    Answer("10.3 AllToAll over AllGather, one way", "0.5", share["AllToAll", 1] / share["AllGather", 1], "times"),
    Answer("10.4 AllGather both ways over one way", "0.5", share["AllGather", 2] / share["AllGather", 1], "times",
           "D/2 hops for D - 1"),
    Answer("10.5 AllToAll both ways over one way", "0.25", share["AllToAll", 2] / share["AllToAll", 1], "times",
           "1/8 over (1 - 1/D)/2"),
    Answer("10.6 AllGather over AllToAll, both ways", "4", share["AllGather", 2] / share["AllToAll", 2], "times"),
    Answer("The footnote's AllToAll over V/(4W), all of the farthest chunk right", "1",
           sum(range(1, D // 2 + 1)) / D**2 / share["AllToAll", 2], "times", erratum=
           "1 + 2/D: more goes right than left; half of that chunk each way, as above, makes it V/(4W)"),
    Answer("Kronecker example: broadcast(7)", "7, 7", ", ".join(
        f"{v:g}" for v in matrices(1, 2)[0] @ torch.tensor([7.0], dtype=torch.float64))),
    Answer("Kronecker example: reduce(8, 9)", "17", float(matrices(1, 2)[1] @ torch.tensor([8.0, 9.0]).double())),
])  # fmt: skip

# %% [markdown]
# ## Question 8: how long they take here
# The times are medians on these ranks against V, the bytes of the whole array. In the book's model a small array takes
# the latency, and beyond that the time grows with V: equally for AllGather and ReduceScatter, twice as steeply for
# AllReduce. Ranks that share one machine's cores show the shape of this curve at best, and not the speed of a network:
# small arrays take a time that varies from call to call, and only the largest ones grow as the model says.


# %%
def time_collectives(mesh, largest: int) -> list[tuple]:
    """Return rows of (V in bytes, seconds of each of the four collectives)."""
    found, nbytes = [], 1 << 12
    while nbytes <= largest:
        J = 4 * n
        I, row = max(n, nbytes // (4 * J) // n * n), []
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            local = I if "A[I, J] {" in PRIMITIVES[name][0] else I // n
            x, seconds = torch.zeros(local, J, device=mesh.device), []
            for _ in range(7):
                c.all_reduce("Ready[] {U_X} -> Ready[]", torch.zeros((), device=mesh.device), mesh)
                start = time.perf_counter()
                call(name, x, mesh)
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            row.append(median(seconds[2:]))
        found.append((4 * I * J, *row))
        nbytes *= 8
    return found


timed = page.on_ranks(time_collectives, 1 << 18 if page.small else page.args.largest, checked=False)
names = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll")
page.chart("question-8", {name: [(row[0], row[i]) for row in timed] for i, name in enumerate(names, 1)},
           "bytes V", "seconds", f"Question 8: collectives on {n} ranks of this machine", height=12)  # fmt: skip
page.table([(row[0], *(f"{1e6 * t:,.0f}" for t in row[1:]), f"{row[0] / row[1] / 1e9:.2f}") for row in timed],
           ["V bytes", *(f"{name} us" for name in names), "AllGather GB/s"])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `"the sum, split", lambda s: parts(s.sum(0))` by `"the mean", lambda s: parts(s.mean(0))`. What does
#    the ReduceScatter compute, and what does the table say of it?
#    Answer: It computes the sum, as its type says, and the row says NO: the mean is the sum over X. A mean is another
#    function, which one asks for by `op="mean"`.
# 2. Question: what share of N^2 goes over the busiest link of an AllToAll both ways on an odd ring of 5? Evaluate
#    `{(a, w): b for a, w, _, b in rings.ring_counts(5, 10)}["AllToAll", 2] / 50`.
#    Answer: 0.12, a little less than the 1/8 of long rings: (1 - 1/25)/8, since the two farthest devices are only two
#    hops away.
# 3. Flag: run with `--mesh X=2`. How many hops has a ring of two, and what does it gain by sending both ways?
#    Answer: One hop, since the only other device is the neighbour on both sides. So there is nothing to gain: it has
#    one shard to receive.
