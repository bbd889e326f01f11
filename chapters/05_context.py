# %% [markdown]
"""Part 5, context parallelism: attention over a sequence that is split, in five forms, and the bytes that each sends.
"Data Parallelism", its aside: https://jax-ml.github.io/scaling-book/training
"Appendix A: How does Flash Attention work?": https://jax-ml.github.io/scaling-book/transformers

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

This chapter says why data parallelism over tokens is not enough, writes ring attention line by line, shows why the
zig-zag order keeps all ranks busy, and compares all forms with one device.
"""

# %% [markdown]
# ## Why split a sequence?
# Data parallelism splits a batch by sequences. A batch of long contexts has few of them: 8 million tokens are 64
# sequences of 128k. They can be split 64 ways and no further, and the activations of one such sequence may not fit on a
# chip. So the sequence itself is split, over an axis C.
#
# The price is that attention is no longer local: keys and values must be sent, forward and backward. To hide that, each
# chip needs enough of the sequence. The time of the scores grows with the square of its length and that of the transfer
# with the length alone, so long contexts can afford it and short ones cannot. Under a causal mask the chips also have
# unequal work, unless the order of the tokens is changed. Where there are enough sequences, splitting them costs
# nothing and is better.
#
# The letters: B sequences have T tokens each. N query heads of H numbers share K heads of keys and values, G = N/K to
# each. S counts the tokens again, as keys: the scores A[T, S] have a row for each query and a column for each key.

# %%
import torch
from torch.func import vjp

from scaling.algebra.law import check_product
from scaling.book.answers import Answer
from scaling.book.arrays import largest
from scaling.book.layout import bar, beside
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.collectives import all_to_all, einsum, ppermute, unshard, wait
from scaling.configs import get
from scaling.hardware import chip
from scaling.mesh import AbstractMesh, Mesh
from scaling.show import svg
from scaling.show.frames import frames_of, text
from scaling.spec import ShardingError, parse
from scaling.strategies import context
from scaling.strategies.context import costs
from scaling.trace import trace

page = Page(__doc__, mesh="C=4", device=True, seed=True)
C = page.args.mesh["C"]
B, T, N, K, H, LIMIT = 2, 16 * C, 2 * C, 2, 8, 1e-11  # so G = N / K is C

# %% [markdown]
# ## What does a token need from other tokens?
# Norms, projections and MLPs treat every token alone. If the sequence is split over an axis C, they run as they do
# under data parallelism. In attention every query meets every key, and both are split along the sequence. That is case
# 4 of Part 3:

# %%
page.title("The scores of a sequence that is split")
try:
    check_product("Q[B, T_C, N, H] * K[B, S_C, N, H] -> A[B, N, T_C, S]")
except ShardingError as error:
    page.say(str(error))
    page.check("the scores are case 4", "case 4" in str(error))

# %% [markdown]
# ## Ring attention, line by line
# One solution is to gather the keys and values, as case 4 says. The ring splits that AllGather into hops: C - 1 times
# each rank passes a block on to the next rank, and computes with it meanwhile. So no rank has more than two blocks, and
# the transfer is hidden behind the matmuls. A softmax over all keys does not need them all at once: a running maximum
# M, denominator L and output O combine the results of the blocks (04_flash_attention.py derives this). `S` without an
# axis is the dim of the keys in the block that the rank has at this hop.


# %%
def forward(Q, KV, mesh, order):
    """Q[B, T_C, K, G, H], KV[2, B, S_C, K, H] -> O[B, T_C, K, G, H], logL[B, T_C, K, G], for Q divided by sqrt(H)."""
    O, L, M = torch.zeros_like(Q), 0, torch.full_like(Q[..., 0], -torch.inf)
    for hop in range(C):
        later = None if hop == C - 1 else ppermute("KV[2, B, S_C, K, H]", KV, mesh, "C", AROUND, async_op=True)  # 1.
        A = einsum("Q[B, T_C, K, G, H] * K[B, S, K, H] -> A[B, T_C, K, G, S]", Q, KV[0])  # 2.
        A = A.masked_fill(hidden(mesh, order, hop), -torch.inf)
        below, M = M, torch.maximum(M, A.amax(-1))
        P, w = (A - M[..., None]).exp(), (below - M).exp()  # 3. earlier blocks' shares shrink by w
        L = w * L + P.sum(-1)
        O = w[..., None] * O + einsum("P[B, T_C, K, G, S] * V[B, S, K, H] -> O[B, T_C, K, G, H]", P, KV[1])  # 4.
        KV = wait(later)  # it was in flight during 2. to 4.
    return O / L[..., None], M + L.log()


# %% [markdown]
# The backward pass goes round the ring once more, and recomputes each block's P from the logL that the forward saved.
# The gradients of a block's keys and values are partial sums {U_C}, with one term from each rank. They travel with
# their block, and every rank adds its own term. This is the ReduceScatter that is the transpose of the AllGather, split
# into hops as well.


# %%
def backward(dO, O, logL, Q, KV, mesh, order):
    """dO[B, T_C, K, G, H], KV[2, B, S_C, K, H] -> dQ[B, T_C, K, G, H], dKV[2, B, S_C, K, H]."""
    delta, dQ, dKV = (dO * O).sum(-1, keepdim=True), 0, torch.zeros_like(KV)
    for hop in range(C):
        later = None if hop == C - 1 else ppermute("KV[2, B, S_C, K, H]", KV, mesh, "C", AROUND, async_op=True)  # 1.
        A = einsum("Q[B, T_C, K, G, H] * K[B, S, K, H] -> A[B, T_C, K, G, S]", Q, KV[0])  # 2.
        P = (A.masked_fill(hidden(mesh, order, hop), -torch.inf) - logL[..., None]).exp()
        dP = einsum("dO[B, T_C, K, G, H] * V[B, S, K, H] -> dP[B, T_C, K, G, S]", dO, KV[1])  # 3.
        dA = P * (dP - delta)
        dQ = dQ + einsum("dA[B, T_C, K, G, S] * K[B, S, K, H] -> dQ[B, T_C, K, G, H]", dA, KV[0])  # 4. stays here
        dK = einsum("dA[B, T_C, K, G, S] * Q[B, T_C, K, G, H] -> dK[B, S, K, H] {U_C}", dA, Q)  # 5.
        dV = einsum("P[B, T_C, K, G, S] * dO[B, T_C, K, G, H] -> dV[B, S, K, H] {U_C}", P, dO)  # 6.
        dKV = wait(dKV) + torch.stack([dK, dV])
        dKV = ppermute("dKV[2, B, S_C, K, H]", dKV, mesh, "C", AROUND, async_op=True)  # 7. travels with KV
        KV = wait(later)
    return dQ, wait(dKV)


AROUND = [(c, (c + 1) % C) for c in range(C)]


def hidden(mesh, order, hop):
    """Return True where a key comes after the query, for the block that this rank has at a hop.

    That is the block of the rank `hop` positions before it.
    """
    c = mesh.coord["C"]
    rows, columns = (torch.tensor(places(order, at % C), device=mesh.device) for at in (c, c - hop))
    return (columns > rows[:, None])[:, None, None]


def places(order, c) -> list[int]:
    """Return the positions of rank c's tokens: two of 2C chunks.

    They are neighbours in plain order, and chunks c and 2C-1-c in zig-zag order.
    """
    half = T // C // 2
    return [i * half + j for i in ((2 * c, 2 * c + 1) if order == "plain" else (c, 2 * C - 1 - c)) for j in range(half)]


# %% [markdown]
# ## Another way: heads for tokens
# Heads do not need each other, so one can split them instead. Ulysses (DeepSpeed's name) moves the axis C from the
# sequence to the heads and back, by an AllToAll each. In between, every rank has the whole sequence for N/C heads and
# computes ordinary attention; the backward pass is the transpose. There can be no more ranks than query heads. If C
# does not divide the KV heads, they are copied until it does, K -> R.


# %%
def ulysses(Q, KV, mesh, attend):
    """Q[B, T_C, N, H], KV[2, B, S_C, R, H] -> O[B, T_C, N, H], by one device's attention."""
    Q = all_to_all("Q[B, T_C, N, H] -> Q[B, T, N_C, H]", Q, mesh)
    KV = all_to_all("KV[2, B, S_C, R, H] -> KV[2, B, S, R_C, H]", KV, mesh)
    O = attend(Q, *KV)
    return all_to_all("O[B, T, N_C, H] -> O[B, T_C, N, H]", O, mesh)


# %% [markdown]
# Both are compared with one device, which has all scores at once. Queries and values grow along the sequence, so a
# block in a wrong place changes the result.


# %% tags=["hide-input"]
def problem():
    """Return Q, K, V and dO, whole and not uniform along T, and documents of unequal lengths."""
    rng = torch.Generator().manual_seed(page.args.seed)
    Q, key, V, dO = (torch.randn(B, T, n, H, generator=rng, dtype=torch.float64) for n in (N, K, K, N))
    segments = (torch.rand(B, T, generator=rng) < 0.1).cumsum(1)
    return Q * torch.linspace(0.1, 3, T)[:, None, None], key, V + torch.arange(T)[:, None, None] / T, dO, segments


def dense(Q, key, V, window=T, segments=None):
    """Compute attention on one device, with all scores at once."""
    key, V = (x.repeat_interleave(Q.shape[2] // x.shape[2], 2) for x in (key, V))
    ahead = torch.arange(T, device=Q.device) - torch.arange(T, device=Q.device)[:, None]
    unseen = (ahead > 0) | (ahead <= -window)
    unseen = unseen if segments is None else unseen | (segments[:, None, :, None] != segments[:, None, None])
    A = torch.einsum("btnh,bsnh->bnts", Q, key) / H**0.5
    return torch.einsum("bnts,bsnh->btnh", A.masked_fill(unseen, -torch.inf).softmax(-1), V)


def differences(made, spec, mesh, home=slice(None), **mask) -> list[float]:
    """Return the differences of O, dQ, dK and dV from one device's; `home` restores the plain order of T."""
    O, pull = vjp(lambda *x: dense(*x, **mask), *problem()[:3])
    found = [unshard(spec, x, mesh)[:, home] for x in made]  # scaling: ignore[dims] of queries, and of keys
    return [difference(x, w, mesh) for x, w in zip(found, (O, *pull(problem()[3])), strict=True)]


def show(found) -> None:
    page.title("Differences from one device, in float64, relative to the largest element")
    rows = [(what, *(f"{x:.0e}" for x in off), page.check(what, largest(off) <= LIMIT)) for what, off in found.items()]
    page.table(rows, ["", "O", "dQ", "dK", "dV", "equal"])


# %% [markdown]
# A hop of the ring has two products in the forward and five in the backward. The second table compares each listing
# with one device.


# %% tags=["hide-input"]
def by_hand(mesh):
    """Return (the differences of each listing, the lines of the ring's two passes, the frames of its hops)."""
    results, c = {}, mesh.coord["C"]
    for order in ("zig-zag", "plain"):
        Q, key, V, dO, _ = (x[:, places(order, c)].to(mesh.device) for x in problem())
        q, do, KV = Q.unflatten(2, (K, -1)) / H**0.5, dO.unflatten(2, (K, -1)), torch.stack([key, V])
        with trace() as there:
            O, logL = forward(q, KV, mesh, order)
        with trace() as back:
            dQ, dKV = backward(do, O, logL, q, KV, mesh, order)
        home = torch.tensor([places(order, rank) for rank in range(C)]).flatten().argsort()
        made = O.flatten(2, 3), dQ.flatten(2, 3) / H**0.5, *dKV
        results[f"the ring above, {order}"] = differences(made, "x[B, T_C, N, H]", mesh, home)
    O, pull = vjp(lambda Q, KV: ulysses(Q, KV.repeat_interleave(C, 3), mesh, dense), Q, KV)  # R = CK
    dQ, dKV = pull(dO)
    results["Ulysses above"] = differences((O, dQ, *dKV), "x[B, T_C, N, H]", mesh)
    hops = frames_of(there.collectives(), map(parse, ("Q[B, T_C, K, G, H]", "KV[2, B, S_C, K, H]")))
    return results, [[(str(e), e.wire_bytes or "", e.flops or "") for e in log.events] for log in (there, back)], hops


results, (there, back), hops = page.on_ranks(by_hand)
first = [lines[: -(-len(lines) // C)] for lines in (there, back)]  # of C hops; the last sends no KV on
page.title(f"The first hop of both passes on rank 0: B={B} T={T} N={N} K={K}, float64")
page.table([line for lines in first for line in lines], ["line", "sent", "FLOPs"])
flops = [[sum(line[2] or 0 for line in lines) for lines in passes] for passes in (first, (there, back))]
page.check("a hop has 1/C of the FLOPs of each pass", [C * one for one in flops[0]] == flops[1])
show(results)

# %% [markdown]
# ## Who waits for whom?
# First look at the ring alone. Each rank keeps its queries, and at every hop it gets the next block of keys and values
# from the rank before it. A digit (in a notebook, a colour) is the rank that had the block at first.

# %%
page.title("The ring, hop by hop")
page.show(text(hops, {"C": C}), lambda: svg.player(hops, {"C": C}))

# %% [markdown]
# Under a causal mask, late queries see more keys than early ones. The next picture shows which scores each rank
# computes at each hop: the sequence is cut into 2C chunks, queries go downwards and keys to the right, a digit is the
# rank that computes this block (on the diagonal half of it). A dot, or a grey cell, is a block that nobody computes at
# this hop.
#
# In plain order rank c has the chunks 2c and 2c+1. At hop 1, rank 0 receives the last keys of the sequence, which none
# of its queries may see, and it waits; at each further hop one more rank waits. The last rank computes C - 1/2 blocks
# of T/C x T/C scores, where the mean is C/2, so at best 1/(2 - 1/C) of the time is used. In zig-zag order rank c has
# the chunks c and 2C-1-c, an early one and a late one, and at every hop all ranks have equal work. On 8 H800,
# zhuzilin/ring-flash-attention (README) measures 52.1% of the ideal forward and 53.9% with the backward in plain order,
# and 85.2% and 90.2% in zig-zag order.


# %% tags=["hide-input"]
def computed(order, hop) -> list[str]:
    """Return 2C lines of blocks of scores: the rank that computes each at this hop, or a dot."""
    half = T // C // 2
    chunks = [[first // half for first in places(order, c)[::half]] for c in range(C)]
    who = {(q, k): str(c) for c in range(C) for q in chunks[c] for k in chunks[c - hop] if k <= q}
    return [" ".join(who.get((q, k), ".") for k in range(2 * C)) for q in range(2 * C)]


drawn, colours = {}, {str(c): svg.colour(c, C, C) for c in range(C)}
for order in ("plain", "zig-zag"):
    page.title(f"Blocks of scores in {order} order, by hop")
    drawn[order] = [computed(order, hop) for hop in range(C)]
    grids = ["\n".join([f"hop {hop}", *lines]) for hop, lines in enumerate(drawn[order])]
    cells = [[[(c.strip("."), colours.get(c, "")) for c in line.split()] for line in hop] for hop in drawn[order]]
    named = [(f"hop {hop}", rows) for hop, rows in enumerate(cells)]
    page.show(beside(grids), lambda named=named: svg.grids(named, 136, 136))
page.title("The scores of each rank in both orders, over all hops")
plain, zigzag = (list(map(int, context.work(form, 64 * C, C))) for form in ("ring", "zigzag"))
mean = sum(plain) / C
rows = [(c, p, bar(p, mean), z, bar(z, mean)) for c, p, z in zip(range(C), plain, zigzag, strict=True)]
page.table(rows, ["rank", f"scores of T={64 * C}", "", "zig-zag", ""])
blocks = {order: [[" ".join(hop).split().count(str(c)) for c in range(C)] for hop in drawn[order]] for order in drawn}
found = [[1024 * sum(at_hop) - 32 * 31 for at_hop in zip(*blocks[order], strict=True)] for order in drawn]
even = all(len({*at_hop}) == 1 for at_hop in blocks["zig-zag"])
page.check("the scores are the blocks drawn, and even in zig-zag", found == [plain, zigzag] and {*zigzag} == {mean})
page.check("in zig-zag order they are even at every hop", even)
page.title("The busiest rank's scores over the mean, and the time used at best")
rows = []
for ranks in (2, 4, 8):
    busy = {form: context.work(form, 256, ranks) for form in ("ring", "zigzag")}
    over = {form: max(scores) * ranks / sum(scores) for form, scores in busy.items()}
    held = page.check(f"C={ranks}: the busiest rank", over == {"ring": (513 - 256 / ranks) / 257, "zigzag": 1})
    rows.append((ranks, f"{over['ring']:.3f}", f"{1 / over['ring']:.1%}", f"{over['zigzag']:.3f}", held))
page.table(rows, ["C", "plain, T=256", "used", "zig-zag", "(2T + 1 - T/C) / (T + 1), 1"])

# %% [markdown]
# ## All forms equal one device
# Here `scaling.strategies.context.attention` runs in five forms: the ring in plain and in zig-zag order; gather, which
# gathers all keys and values at once; Ulysses; and usp, which is Ulysses over Y inside a ring over C. Each runs under
# the causal mask alone, and then with a window of T/3 tokens and several documents in a sequence, which do not see each
# other. A model changes to zig-zag order once, around all layers; here it is done around one layer.

# %%
WAYS = {"ring": "C", "zigzag": "C", "gather": "C", "ulysses": "C", "usp": ("C", "Y")}


def one_form(mesh, form, axis, **mask):
    mine = [x.chunk(C, 1)[mesh.group(tuple(axis)).index].to(mesh.device) for x in problem()]
    if form == "zigzag":
        mine = [context.to_zigzag(x, 1, mesh, axis) for x in mine]
    *operands, dO, documents = mine
    options = mask | ({"segments": documents} if mask else {})
    O, pull = vjp(lambda *x: context.attention(*x, mesh, axis=axis, form=form, **options), *operands)
    made = [context.from_zigzag(x, 1, mesh, axis) if form == "zigzag" else x for x in (O, *pull(dO))]
    return differences(made, f"x[B, T_{''.join(axis)}, N, H]", mesh, **mask)


def all_forms(mesh):
    both = Mesh({"C": C // 2, "Y": 2} if C % 2 == 0 else {"C": C, "Y": 1}, mesh.device, mesh.checked)
    masks = {"": {}, ", window and documents": {"window": T // 3, "segments": problem()[4]}}
    return {
        form + what: one_form(both if form == "usp" else mesh, form, axis, **mask)
        for what, mask in masks.items()
        for form, axis in WAYS.items()
    }


show(page.on_ranks(all_forms))

# %% [markdown]
# ## The cost of each form, from the types
# The example is one layer of LLaMA-3 405B with 131,072 tokens in bf16 on 16 ranks, on an abstract mesh of 4,096 chips.
# Gradients of keys that are summed over ranks are sent in float32, and so are those of copied heads. The form gather
# has all keys on every rank, and nothing hides its AllGather. The ring's transfers are hidden, but there are C - 1 of
# them, one after the other. Ulysses also sends Q and O, but of each array a rank sends at most its own shard, however
# large C is. In the ring a rank sends C - 1 blocks of keys and values, so the more ranks there are, the more Ulysses
# gains.
#
# In the table, rounds are transfers of the forward that follow each other, the next column is the busiest rank's work
# over the mean, then come the keys and values that a rank has at once, and last what must divide what: `C | T` means
# that C divides T. In the formulas Q, KV and dKV are the bytes of a rank's shards.

# %%
model = get("llama3-405b")
sizes = {"B": 1, "T": 2**17, "N": model.N, "K": model.K, "H": model.H}
rows, counts, ring = [], [], "(C-1)(2 KV + dKV)"
formulas = {"ring": ring + " + dKV", "zigzag": ring + " + dKV", "gather": ring, "ulysses": "(C-1)/C (4 Q + 2 KV)"}
for form, axis in WAYS.items():
    big = AbstractMesh({"X": 256, "C": 8, "Y": 2} if form == "usp" else {"X": 128, "C": 16, "Y": 2})
    cost = costs(form, sizes, big, axis=axis)
    sent = [" ".join(f"{a} {passes[i] / 1e6:,.0f}" for a, passes in cost.sent.items()) for i in (0, 1)]
    rows.append((form, *sent, cost.rounds, f"{cost.balance:.3f}", f"{cost.held / 1e6:,.0f}", cost.limits))
    Q, KV = (torch.empty(1, 2**13, n, model.H, dtype=torch.bfloat16, device="meta") for n in (model.N, model.K))
    with trace() as log:
        O, pull = vjp(lambda *x, big=big, a=axis, f=form: context.attention(*x, big, axis=a, form=f), Q, KV, KV)
        pull(O)
    counts.append((form, formulas.get(form, "both, over Y and C"), sum(map(sum, cost.sent.values())), log.wire_bytes))
page.title(f"{model.name}, a layer, {sizes['T']:,} tokens on 16 ranks, bf16: MB that a rank sends, by axis")
page.table(rows, ["form", "forward", "backward", "rounds", "busiest\n/ mean", "MB of\nKV held", "must divide"])
page.title("The same: bytes that a rank sends in both passes")
page.same(counts, ["form", "of a rank's shards", "bytes", "counted"])

# %% [markdown]
# ## When is the ring hidden?
# A chip has t = T/C tokens. At a hop in zig-zag order, half of its t x t scores are visible. Scores and values each
# take 2 FLOPs for every visible score, head and H, together 2 NH t^2 FLOPs, while the keys and values of a block are 4
# t KH bytes, sent one way. Let alpha be a chip's FLOPs/s over its link's bytes/s. The transfer is the shorter one if 4
# t KH alpha < 2 NH t^2, that is from t = 2 alpha/G tokens on, since G = N/K. The batch and H do not matter.


# %%
def hidden_from(alpha: float, G: int) -> float:
    return 2 * alpha / G  # tokens on a chip from which a forward hop takes longer to compute than to send


v5p, h100 = chip("v5p"), chip("h100")
page.answers([
    Answer("v5p, one way along one axis, G = 16: from T/C =", "", hidden_from(v5p.intensity("line"), model.G), "tokens",
           "2 (4.59e14 / 9e10) / 16; a backward hop has 5/2 of the FLOPs and, with dKV in float32, 3 times the bytes"),
    Answer("H100 within a node, G = 16: from T/C =", "", hidden_from(h100.intensity("node"), model.G), "tokens",
           "2 (9.9e14 / 4.5e11) / 16"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `dKV = wait(dKV) + torch.stack([dK, dV])` by `dKV = 0 * wait(dKV) + torch.stack([dK, dV])`. Which
#    gradients are wrong now, and would the loss of a training run tell?
#    Answer: dK and dV: a block leaves behind what the ranks before added, and keeps the last one's term alone.
#    The forward pass and dQ stay right, so the loss would hardly tell; only a comparison of gradients does.
# 2. Question: with G = 1, as many KV heads as query heads, from how many tokens a chip on does a v5p hide the ring?
#    Evaluate `hidden_from(v5p.intensity("line"), 1)`.
#    Answer: 10,200 tokens, 16 times as many: each key and value is sent for one query head and not for 16.
# 3. Flag: run with `--mesh C=2`. How much of the time can plain order use now?
#    Answer: 2/3 of it at best, 1/(2 - 1/C) with C = 2. With fewer ranks the order matters less.
