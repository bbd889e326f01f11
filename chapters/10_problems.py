# %% [markdown]
"""Part 10, the worked problems: shards averaged and rolled, experts four ways, collective matmuls end to end.
https://jax-ml.github.io/scaling-book/jax-stuff

Question 1 is solved in auto and in manual mode, and Question 2 with its listing, bytes, FLOPs and gradients. The forms
of Questions 3 and 4 are in 10_collective_matmul.py; here their block runs as a whole.
"""

# %%
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F_
from torch.func import vjp
from torch.utils.flop_counter import FlopCounterMode

from scaling import auto, explicit, tree
from scaling.book.answers import Answer
from scaling.book.arrays import drawn, largest, operands
from scaling.book.listing import difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_to_all, einsum, ragged_all_to_all, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.models.moe import by_expert, expert_rows
from scaling.profile import profile
from scaling.shard_map import shard_map
from scaling.strategies.collective_matmul import mlp
from scaling.trace import trace

page = Page(__doc__, mesh="Y=4", device=True, seed=True)
EXACT, n = 1e-12, page.args.mesh["Y"]
rng = torch.Generator().manual_seed(page.args.seed)


def ms(f) -> float:
    """Return the median of a few runs on this machine, in ms."""
    f()
    took = []
    for _ in range(1 if page.small else 9):
        began = perf_counter()
        f()
        took.append(1e3 * (perf_counter() - began))
    return median(took)


# %% [markdown]
# ## Question 1: within each shard
# The question has x[S_X, D_Y] on a mesh X=4, Y=2, with the book's data: 0, 1, 2 ... in 512 rows of 8. The mean of each
# shard in auto mode takes the reshape that the book shows, which cuts each dim in two: one counts the shards (I and K
# in the listing), the other is within them (J and L). The planner inserts no collective. In manual mode it is simply a
# mean. (Both run in one process here, and on ranks below.)

# %%
MESH = AbstractMesh({"X": 4, "Y": 2})
x = torch.arange(8 * 64 * 8, dtype=torch.float64).reshape(8 * 64, 8)


def averages(x):
    S, D = x.shape
    return x.reshape(4, S // 4, 2, D // 2).mean((1, 3))


in_auto = auto.jit(averages, MESH, ("x[S_X, D_Y]",), "m[4_X, 2_Y]").lower(x.to("meta"))


@partial(shard_map, mesh=MESH, in_specs="P('X', 'Y')", out_specs="P('X', 'Y')", in_process=True)
def in_manual(x):
    return x.mean((0, 1), keepdim=True)


@partial(shard_map, mesh=MESH, in_specs="x[S_X, D_Y]", out_specs="x[S_X, D_Y]", in_process=True)
def rolled(x):
    return torch.roll(x, 5, dims=0) - x


page.title("Question 1.1: the mean of each shard, as planned")
page.say(in_auto.listing)
page.check("1.1: auto mode has no collective", not any(name in in_auto.listing for name in ("All", "Reduce")))
parts = x.view(4, 128, 8)
one_by_one = torch.stack([torch.stack([block.mean() for block in rows.chunk(2, 1)]) for rows in x.chunk(4)])
page.say()
page.equal([
    ("1.1: shard_map, against a loop over the shards", difference(in_manual(x), one_by_one), EXACT),
    ("1.1: the reshapes", difference(averages(x), in_manual(x)), EXACT),
    ("1.2: roll(x, 5) - x within each shard of X", difference(rolled(x), (parts.roll(5, 1) - parts).view_as(x)), EXACT),
])  # fmt: skip
page.answers([
    Answer("1.2: the book's code, roll(x, 5), is what its question asks", "yes",
           "yes" if torch.equal(parts.roll(5, 1).view_as(x), rolled(x)) else "no", erratum="it leaves out the - x"),
    Answer("1.2: element [1, 0], shift 5", "", float(rolled(x)[1, 0]), "", "992 from 5 rows before, less 8"),
    Answer("1.2: the last element", "", float(rolled(x)[-1, -1]), "", "5 rows of 8 before: -40"),
])  # fmt: skip

# %% [markdown]
# ## Question 2: experts, one device
# There are S tokens A[S, D] and E experts W[E, D, F], and B[s] is the expert that token s has chosen. Question 2 wants
# Out[s] = A[s] W[B[s]], and later the mean over k experts a token. The obvious W[B] would be an array [S, D, F], far
# too large. A loop over the experts that masks tokens (`masked_loop`) multiplies every token with every expert, E/k
# times the FLOPs that are needed. If tokens are sorted into groups by expert (`grouped`), each is multiplied k times.
#
#     masked_loop     for each e:  Out       += [e is chosen by s] A W[e] / k
#     grouped         for each e:  Out[rows] += A[rows] W[e] / k,  with rows those of the tokens that chose e
#
# The book's hint is a buffer [E, S, D], in which each expert has a row for each token. Its second dim has size S
# because all tokens may choose one expert, which is one of the cases below. In part 2, the planner gathers all of A for
# the buffer's program, as the book says that a compiler does: see its first line.

# %%
S, D, F, E, k = 16 * n, 12, 16, 2 * n, 2
A, W, dOut = drawn(["A[S, D]", "W[E, D, F]", "dOut[S, F]"], {"S": S, "D": D, "E": E, "F": F}, page.args.seed)
CASES = {
    "top 1": torch.randint(E, (S, 1), generator=rng),
    "top 2": torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(S)]),
    "half of them empty": 2 * torch.randint(E // 2, (S, k), generator=rng),
    "all to one": torch.full((S, k), E - 1),
}
LINE = "A[R, D] * W[D, F] -> Out[R, F]"  # one expert's rows


def masked_loop(A, W, experts):
    """Multiply every token by every expert, and mask the products that were not chosen."""
    Out = A.new_zeros(len(A), W.shape[2])
    for e in range(len(W)):
        chosen = (experts == e).sum(1, keepdim=True).to(A.dtype)
        Out = Out + chosen * (A @ W[e])
    return Out / experts.shape[1]


def mean_of(rows, Out, experts):
    """Return Out[S, F], each token's mean over its k choices, from the rows Out[R, F] in the order of the experts."""
    return rows.collect(Out, torch.full_like(experts, 1, dtype=Out.dtype) / experts.shape[1])


def grouped(A, W, experts):
    """Sort the choices by expert, one row each, and multiply each expert's rows, perhaps none, by its matrix."""
    rows = expert_rows(experts, len(W))
    return mean_of(rows, by_expert(LINE, rows.spread(A), W, rows.counts.tolist()), experts)


# %% [markdown]
# Each way is compared with `by_token`, which multiplies every token by copies of its own experts, for four choices of
# experts.


# %%
def by_token(experts):
    """Return (Out, dA, dW) with each token's own product, which all ways are compared with."""
    out, pull = vjp(lambda A, W: torch.einsum("sd,skdf->skf", A, W[experts]).mean(1), A, W)
    return out, *pull(dOut)


rows, flops = [], {}
for way in (masked_loop, grouped):
    worst = 0.0
    for experts in CASES.values():
        out, pull = vjp(lambda A, W, way=way, experts=experts: way(A, W, experts), A, W)
        worst = largest((worst, difference([out, *pull(dOut)], by_token(experts))))
    with FlopCounterMode(display=False) as counter:
        way(A, W, CASES["top 2"])
    flops[way.__name__] = counter.get_total_flops()
    rows.append((f"2.1: {way.__name__}, result and gradients", worst, EXACT))
page.title(f"Question 2.1 and 2.4: S={S}, D={D}, F={F}, E={E}, k=1 and {k}")
page.equal(rows)
ratio = flops["masked_loop"] / flops["grouped"]
page.answers([Answer("2.1: FLOPs, masked over grouped, k = 2", "", ratio, "times", "E/k")])


def buffered(A, M, W):
    return torch.einsum("esd,edf->sf", torch.einsum("sd,se->esd", A, M), W)


buffer = auto.jit(buffered, AbstractMesh({"X": 4}), ("A[S_X, D]", "M[S_X, E]", "W[E_X, D, F]"), "Out[S_X, F]")
listing = buffer.lower(*(torch.empty(s, device="meta") for s in ((64, 16), (64, 8), (8, 16, 32)))).listing
page.say(f"\nQuestion 2.2: the buffer's program on 4 devices, M the mask, as planned\n{listing}")
page.check("2.2: A is gathered", "A[S, D] = AllGather_X" in listing)

# %% [markdown]
# ## Questions 1.1 and 2.2 on ranks, by jit and by shard_map
# The programs run and are profiled on this mesh's ranks. Look for collectives that nobody asked for. The means have
# none; shard_map sends its result, since it returns it whole to every rank. The buffer's program gathers the smaller of
# A and W.


# %%
def by_modes(mesh) -> dict:
    """Return {program: (the difference, the collectives, ms a step, ms of it in collectives or waiting in them)}."""
    M, types = F_.one_hot(CASES["top 2"], E).double().mean(1), ("A[S_Y, D]", "M[S_Y, E]", "W[E_Y, D, F]")
    given = [explicit.array(t.to(mesh.device), at, mesh) for t, at in zip((A, M, W), types, strict=True)]
    jitted = auto.jit(lambda A: A.reshape(n, S // n, D).mean((1, 2)), mesh, types[:1], "m[I_Y]")
    mapped = shard_map(lambda A: A.mean().view(1), mesh, types[0], "m[I_Y]")
    experts = auto.jit(buffered, mesh, types, "Out[S_Y, F]")
    means, found = A.reshape(n, S // n, D).mean((1, 2)), {}
    for name, run, wanted in (
        ("1.1 the means, jit", lambda: jitted(given[0]), means),
        ("1.1 the means, shard_map", lambda: mapped(A.to(mesh.device)), means),
        ("2.2 the buffer, jit", lambda: experts(*given), by_token(CASES["top 2"])[0]),
    ):
        result = run()
        off = difference(result.whole() if isinstance(result, explicit.Array) else result, wanted, mesh)
        with profile() as p:
            for _ in range(5):
                run()
                p.step()
        part = min(p.parts(mesh.rank), key=lambda each: each.step)
        sent = "; ".join(line.run.line for line in p.lines() if line.run.wire_bytes)
        found[name] = off, sent, 1e3 * part.step, 1e3 * (part.exposed + part.waiting)
    return found


rows = page.on_ranks(by_modes)
page.title("Questions 1.1 and 2.2 on ranks: the fastest of five steps, profiled")
page.table([(name, sent or "nothing", f"{t:.2f}", f"{apart:.2f}") for name, (_, sent, t, apart) in rows.items()],
           ["program", "collectives", "ms", "in collectives"])  # fmt: skip
page.say()
page.equal([(name, off, EXACT) for name, (off, *_) in rows.items()])

# %% [markdown]
# ## Question 2: experts, on a mesh
# There are two ways to bring tokens to experts. With an AllGather every device has all tokens and computes its own
# experts' terms, which are then reduced and scattered. That is simple, and its bytes do not depend on the choices, but
# every token goes everywhere. With ragged AllToAlls a token goes only where one of its experts is. A device takes the
# other devices' tokens in chunks of 8 (`ragged`), so that it holds at most |Y| * 8 * k rows, however uneven the choices
# are, or all of them in one (`at once`). The lists show what each way sends. B has the choices, n[G, E] how many rows
# each of G devices has for an expert, and R is that number. The bytes are those that the first device sends. Compare
# "all to one" with the others: the first device then sends all its tokens to the last one, which alone sends results
# back.


# %%
def gathered(A, W, experts, mesh):
    """A[S_Y, D], W[E_Y, D, F], experts int64[S_Y, k] -> Out[S_Y, F]: gather all tokens on every device."""
    A = all_gather("A[S_Y, D] -> A[S, D]", A, mesh)  # 1.
    everyone = all_gather("B[S_Y, K] -> B[S, K]", experts, mesh)  # 2. whole numbers
    first = mesh.coord["Y"] * len(W)
    kept = (everyone >= first) & (everyone < first + len(W))
    local = torch.where(kept, everyone - first, 0)
    rows = expert_rows(local, len(W), kept)  # 3. only its own experts' rows
    Out = by_expert(LINE, rows.spread(A), W, rows.counts.tolist())
    Out = rows.collect(Out, kept.to(A.dtype) / experts.shape[1])  # Out[S, F] {U_Y}
    return reduce_scatter("Out[S, F] {U_Y} -> Out[S_Y, F]", Out, mesh)  # 4.


def ragged(A, W, experts, mesh, *, chunk):
    """Do the same by sending tokens to the devices of their experts and back, `chunk` of each device's at a time."""
    chunks = zip(A.split(chunk), experts.split(chunk), strict=True)
    return torch.cat([exchanged(tokens, W, chosen, mesh) for tokens, chosen in chunks])


def exchanged(A, W, experts, mesh):
    """Return the results of one chunk, by two ragged AllToAlls of its rows."""
    rows = expert_rows(experts, n * len(W))  # 1. by expert, so by device
    counts = all_to_all("n[G_Y, E] -> n[G, E_Y]", rows.counts[None], mesh)  # 2. how many rows each device sends
    sends, receives = rows.counts.view(n, -1).sum(1).tolist(), counts.sum(1).tolist()
    Row = ragged_all_to_all("Row[G_Y, E, R, D] -> Row[G, E_Y, R, D]", rows.spread(A), sends, receives, mesh)  # 3.
    order = torch.arange(len(W), device=A.device).repeat(n).repeat_interleave(counts.flatten()).argsort(stable=True)
    Out = by_expert(LINE, Row[order], W, counts.sum(0).tolist())  # 4. each expert its own rows
    Out = Out[order.argsort()]
    Out = ragged_all_to_all("Out[G, E_Y, R, F] -> Out[G_Y, E, R, F]", Out, receives, sends, mesh)  # 5.
    return mean_of(rows, Out, experts)  # 6.


# %% [markdown]
# Each way runs on the ranks, for each of the choices above, forward and backward. Autograd derives the backward from
# the same lines.

# %%
WAYS = {"gathered": {}, "ragged": {"chunk": 8}, "ragged, at once": {"chunk": S}}


def on_mesh(mesh) -> tuple[dict, dict]:
    """Return {(way, case): (largest difference of result and gradients, bytes sent, ms)} and their lines."""
    types, found, listed = ["Out[S_Y, F]", "A[S_Y, D]", "W[E_Y, D, F]"], {}, {}
    a, w, d_out = (t.to(mesh.device) for t in tree.shard([A, W, dOut], [*types[1:], types[0]], mesh))
    for name, options in WAYS.items():
        way = partial(gathered if name == "gathered" else ragged, **options)
        for case, experts in CASES.items():
            mine = tree.shard([experts], ["B[S_Y, K]"], mesh)[0].to(mesh.device)
            with trace() as log:
                out, pull = vjp(lambda a, w, mine=mine, way=way: way(a, w, mine, mesh), a, w)
            wanted = tree.shard(list(by_token(experts)), types, mesh)
            worst = difference([out, *pull(d_out)], wanted, mesh)  # scaling: ignore[reduced-twice]
            found[name, case] = worst, log.wire_bytes, ms(lambda mine=mine, way=way: way(a, w, mine, mesh))
            listed[name, case] = [line for line in lines(log) if line[1]]
    return found, listed


found, listed = page.on_ranks(on_mesh)
for way in ("gathered", "ragged, at once"):
    show_lines(page, f"What the first device sends: {way}, top 2", listed[way, "top 2"], flops=False)
page.title(f"Question 2.3 and 2.4 on {n} devices: forward bytes sent by the first, and ms here")
page.table([(name, case, f"{off:.1e}", page.check(f"2.3: {name}, {case}", off <= EXACT), sent, f"{t:.2f}")
            for (name, case), (off, sent, t) in found.items()],
           ["way", "tokens", "difference", "equal", "bytes", "ms"])  # fmt: skip
whole = (n - 1) * (S // n) * (8 * D + 8 * F + 8 * k)
page.say()
page.same([("gathered, top 2", "(n-1) S/n (D + F + k) 8 bytes", whole, found["gathered", "top 2"][1])],
          ["bytes of a device", "formula", "value", "counted"])  # fmt: skip

# %% [markdown]
# ## Questions 3 and 4: collective matmuls
# The forms of Questions 3 and 4 are in 10_collective_matmul.py, with hops, bytes and limits. Here the block of Question
# 4 runs end to end, with its activation. First its two collectives run before and after their products, and then hidden
# behind them, one way and both ways round the ring. On ranks that share cores, a small block is all latency, and the
# simple way wins.


# %%
def block(mesh, In, W_in, W_out):
    """In[B, D_Y], W_in[D, F_Y], W_out[F_Y, D] -> Out[B, D_Y]: the block, its collectives in sequence."""
    In = all_gather("In[B, D_Y] -> In[B, D]", In, mesh)
    Tmp = einsum("In[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", In, W_in)
    Out = einsum("Act[B, F_Y] * W_out[F_Y, D] -> Out[B, D] {U_Y}", F_.gelu(Tmp), W_out)
    return reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)


def blocks(mesh) -> dict[str, tuple[float, float]]:
    """Return {way: (the difference from one device, ms)}."""
    types = ["In[B, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]"]
    (In, W_in, W_out), own = operands(types, {"B": 8, "D": 4 * n, "F": 8 * n}, mesh, page.args.seed)
    wanted = tree.shard(F_.gelu(In @ W_in) @ W_out, types[0], mesh)
    ways = {
        "in sequence": lambda: block(mesh, *own),
        "hidden, one way": lambda: mlp(*own, mesh, ways=1),
        "hidden, both ways": lambda: mlp(*own, mesh, ways=2),
    }
    return {name: (difference(run(), wanted, mesh), ms(run)) for name, run in ways.items()}


found = page.on_ranks(blocks)
page.title(f"The block on {n} devices")
page.table([(name, f"{off:.1e}", page.check(f"the block, {name}", off <= EXACT), f"{t:.2f}")
            for name, (off, t) in found.items()], ["collectives", "difference", "equal", "ms here"])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `torch.roll(x, 5, dims=0) - x` by `torch.roll(x, 128, dims=0) - x`, the rows of a shard. What is the
#    result, and why does no neighbour's row appear?
#    Answer: Zero: a roll by all 128 rows of a shard brings each row back to its own place. Inside of shard_map `roll`
#    sees only the rows of one device, so no neighbour's row can appear, and the check of a roll by 5 says NO.
# 2. Question: how many rows does a device hold at most in `ragged`, by chunks? Evaluate
#    `n * WAYS["ragged"]["chunk"] * k`. When does it hold as many?
#    Answer: 64: a chunk of 8 tokens of each of 4 devices, with two choices each. It holds as many when all of these
#    choices are experts of this device.
# 3. Flag: run with `--mesh Y=2`. Which bytes of Question 2.3 change, and which way is now the cheaper for "top 2"?
#    Answer: All of them: for "top 2" the gathered way sends 3,840 bytes in place of 11,520, ragged 3,904 in place of
#    5,408, and at once 3,888. Gathering is now the cheapest, since there is only one other device and most rows go to
#    it anyway.
