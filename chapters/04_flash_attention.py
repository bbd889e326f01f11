# %% [markdown]
"""Part 4, Appendix A, How does Flash Attention work? Attention over chunks of keys, forward and backward.
https://jax-ml.github.io/scaling-book/transformers

The scores [T, S] of a head never stand whole. A chunk of keys and values comes, and three running numbers a query are
mended: M, the largest score; L, the sum of exp(score - M); O, the weighted sum of values. Below, the listing beside
dense attention, its derivative by the appendix's identity, what it holds, and the same over chunks on several ranks.
"""

# %% [markdown]
# ## Why not keep the scores?
# Attention multiplies every query with every key, so a sequence of T tokens has T^2 scores a head. They are larger
# than all that goes in and comes out: at T = 8,192 a head's scores in float32 take 268 MB, its queries in bfloat16 2
# MB. Writing them to memory and reading them back takes longer than computing them.
#
# Flash attention computes the softmax while keys arrive, and never has more than one chunk of scores. What it gives up
# is FLOPs: the backward pass has to make the scores anew. On a chip that computes hundreds of FLOPs in the time of
# reading a byte, this is a bargain. For short sequences the plain way is simpler and as fast.

# %%
import torch
from torch.func import vjp

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.listing import EXACT, difference
from scaling.book.page import Page
from scaling.collectives import all_reduce, einsum, shard
from scaling.common.console import integer
from scaling.hardware import chip
from scaling.trace.peak import peak_memory

page = Page(__doc__, mesh="C=4", seed=True, plot=True, chunk=(16, "keys of a chunk", integer(1, 96)))
T, S, H = 64, 96, 8  # queries, keys, and the features of a head
CHUNK = page.args.chunk
rng = torch.Generator().manual_seed(page.args.seed)
Q, K, V, dO = (torch.randn(n, H, generator=rng, dtype=torch.float64) for n in (T, S, S, T))


def dense(Q, K, V):
    """Q[T, H], K[S, H], V[S, H] -> O[T, H]: all scores at once."""
    return torch.softmax(Q @ K.mT / H**0.5, 1) @ V


# %% [markdown]
# ## Two chunks make one
# A softmax over all keys is put together from those over two chunks: each has its own M, L and O, which are brought to
# the larger M. Whatever the order, and however many chunks: look at how the three numbers of one query settle.


# %%
def chunk_sums(Q, K, V):
    """One chunk by itself: M[T], L[T], O[T, H], where O is not yet divided by L."""
    scores = Q @ K.mT / H**0.5  # [T, chunk]: all that ever stands
    M = scores.amax(1)
    P = torch.exp(scores - M[:, None])
    return M, P.sum(1), P @ V


def combined(one, two):
    """L = exp(M1 - M) L1 + exp(M2 - M) L2 with M = max(M1, M2), and O in the same way."""
    (M1, L1, O1), (M2, L2, O2) = one, two
    M = torch.maximum(M1, M2)
    s1, s2 = torch.exp(M1 - M), torch.exp(M2 - M)
    return M, s1 * L1 + s2 * L2, s1[:, None] * O1 + s2[:, None] * O2


def forward(Q, K, V):
    """Q[T, H], K[S, H], V[S, H] -> O[T, H], and the log of each query's whole sum, which the backward needs."""
    running = torch.full((len(Q),), -torch.inf).to(Q), torch.zeros(len(Q)).to(Q), torch.zeros_like(Q)
    for k, v in zip(K.split(CHUNK), V.split(CHUNK), strict=True):
        running = combined(running, chunk_sums(Q, k, v))
    M, L, O = running
    return O / L[:, None], M + L.log()


rows, running = [], None
for i, (k, v) in enumerate(zip(K.split(CHUNK), V.split(CHUNK), strict=True)):
    running = chunk_sums(Q, k, v) if running is None else combined(running, chunk_sums(Q, k, v))
    M, L, O = running
    apart = difference(O / L[:, None], dense(Q, K[: (i + 1) * CHUNK], V[: (i + 1) * CHUNK]))
    rows.append((min((i + 1) * CHUNK, S), *(f"{x.item():.4f}" for x in (M[0], L[0], O[0, 0] / L[0])), f"{apart:.1e}"))
page.title(f"Query 0 over chunks of {CHUNK} keys, beside dense attention to the keys so far")
page.table(rows, ["keys", "M", "L", "O / L", "all queries\noff by"])
O, logsum = forward(Q, K, V)
page.check("the last row is dense attention", difference(O, dense(Q, K, V)) <= EXACT)

# %% [markdown]
# ## The backward
# With P = exp(scores - logsum), a chunk's softmax is there again without another pass. The derivative of a softmax
# subtracts the sum of P dP over all keys, which no chunk has. The appendix's identity gives it without them:
# sum_j P_ij dP_ij = sum_d dO_id O_id, a number a query. So each chunk is done by itself.


# %%
def backward(Q, K, V, O, logsum, dO):
    """dO[T, H] -> dQ[T, H], dK[S, H], dV[S, H]."""
    dQ, dK, dV, weighted = torch.zeros_like(Q), [], [], (dO * O).sum(1)  # the identity
    for k, v in zip(K.split(CHUNK), V.split(CHUNK), strict=True):
        P = torch.exp(Q @ k.mT / H**0.5 - logsum[:, None])
        dP = dO @ v.mT
        dS = P * (dP - weighted[:, None]) / H**0.5
        dV.append(P.mT @ dO)
        dK.append(dS.mT @ Q)
        dQ = dQ + dS @ k
    return dQ, torch.cat(dK), torch.cat(dV)


wanted, pull = vjp(dense, Q, K, V)
P = torch.softmax(Q @ K.mT / H**0.5, 1)
named = {"O": (O, wanted), "the identity": ((dO * O).sum(1), (P * (dO @ V.mT)).sum(1))}
named |= dict(zip(("dQ", "dK", "dV"), zip(backward(Q, K, V, O, logsum, dO), pull(dO), strict=True), strict=True))
page.title(f"Chunks of {CHUNK} beside dense attention, float64")
page.equal([(name, difference(*pair), EXACT) for name, pair in named.items()], "dense attention and autograd")

# %% [markdown]
# ## What it holds
# The most that stands at once beside Q, K, V and O: dense attention has [T, S], the listing a few [T, chunk]. Twice the
# length is four times as much for the one, and twice for the other.


# %%
def most_held(attend, n: int) -> float:
    """Elements beside the operands, as n queries attend to n keys."""
    operands = [torch.empty(n, H, device="meta") for _ in range(3)]
    with peak_memory() as memory:
        [x.detach() for x in operands]
        attend(*operands)
    return memory.peak / 4 - 3 * n * H


page.title("Elements held at once beside Q, K and V, H = 8")
held = [(n, most_held(dense, n), most_held(lambda *x: forward(*x)[0], n)) for n in (96, 192, 384)]
page.table([(n, f"{a:,.0f}", f"{b:,.0f}", f"{a / b:.1f}") for n, a, b in held], ["T = S", "dense", "chunks", "times"])
page.check("what dense attention holds grows by four", held[2][1] > 3.5 * held[1][1])
page.check("what chunks hold grows by two", held[2][2] < 2.1 * held[1][2])

# %% [markdown]
# ## What it reads
# By the roofline of a v5e a kernel that writes its scores to HBM is bound by them at every length; one that keeps them
# in VMEM reads Q, K and V and writes O, and is compute-bound from some hundred keys on.

# %%
V5E, WIDTH = chip("v5e"), 128
lengths = [128 * 2**i for i in range(8)]


def intensity(n: int, kept: bool) -> float:
    """FLOPs a byte of a head of 128 in bf16: two products; scores written, read, and their softmax again, or kept."""
    return 4 * n * n * WIDTH / (2 * (4 * n * WIDTH + (0 if kept else 4 * n * n)))


page.chart(
    "intensity", {"scores in HBM": [(n, intensity(n, False)) for n in lengths],
                  "scores kept in VMEM": [(n, intensity(n, True)) for n in lengths]},
    "T = S", "FLOPs a byte", "A head of 128 on a v5e, bf16", height=12,
    marks=[("y", V5E.intensity("hbm"), f"a v5e's {V5E.intensity('hbm'):.0f}")],
)  # fmt: skip
sixteenth = cost.roofline(4 * 8192**2 * WIDTH, 2 * (4 * 8192 * WIDTH + 4 * 8192**2), V5E.flops(), V5E.hbm_bw)
page.answers([
    Answer("Flash attention is compute-bound from T = S =", "", next(n for n in range(1, 10**4) if intensity(n, True) >
           V5E.intensity("hbm")), "keys", "4 n^2 H over 8 n H bytes is n/2: twice the 240 of a v5e"),
    Answer("Scores in HBM: FLOPs a byte at most", "", intensity(10**9, False), "", "H/2, whatever the length"),
    Answer("... so at 8k it waits for HBM so many times as long", "", sixteenth.comms / sixteenth.math, "times",
           "the scores alone are 8 n^2 bytes"),
])  # fmt: skip

# %% [markdown]
# ## On several ranks
# The chunks may lie on different devices: each rank has its own keys, K[S_C, H], and M, L and O are reduced over C, M
# with max. Nothing that is as long as S is sent. Ring attention does the same hop by hop, in 05_context.py.


# %%
def on_ranks(mesh) -> float:
    """How far O is from dense attention, on the rank where it is farthest."""
    own_K, own_V = shard("K[S, H] -> K[S_C, H]", K, mesh), shard("V[S, H] -> V[S_C, H]", V, mesh)
    scores = einsum("Q[T, H] * K[S_C, H] -> A[T, S_C]", Q, own_K) / H**0.5
    M = all_reduce("M[T] {U_C} -> M[T]", scores.amax(1), mesh, op="max")
    P = torch.exp(scores - M[:, None])
    L = all_reduce("L[T] {U_C} -> L[T]", P.sum(1), mesh)
    O = einsum("P[T, S_C] * V[S_C, H] -> O[T, H] {U_C}", P, own_V)
    O = all_reduce("O[T, H] {U_C} -> O[T, H]", O, mesh) / L[:, None]
    return difference(O, dense(Q, K, V), mesh)


page.title(f"Keys over C = {page.args.mesh['C']}")
page.equal([("O, from each rank's own keys", page.on_ranks(on_ranks), EXACT)], "dense attention")
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `dP - weighted[:, None]` by `dP`. Which of the gradients are still right, and why?
# 2. Question: how many keys must a chunk have for the scores of a chunk to be more than K and V themselves, T = 64?
#    Evaluate `2 * H * S / T`.
# 3. Flag: run with `--chunk 96`. Which row of the first table is left, and what does the listing then hold?
