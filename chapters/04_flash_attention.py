# %% [markdown]
"""Part 4, Appendix A, How does Flash Attention work?: attention over chunks of keys, forward and backward.
https://jax-ml.github.io/scaling-book/transformers

Flash attention never has all scores [T, S] of a head in memory. It reads the keys and values in chunks, and with each
chunk it updates three running numbers per query: M, the largest score; L, the sum of exp(score - M); O, the weighted
sum of values. The listing and its derivative are compared with dense attention, its memory is measured, and its chunks
are spread over several ranks.
"""

# %% [markdown]
# ## Why not keep the scores?
# Attention multiplies every query with every key, so a sequence of T tokens has T^2 scores per head. They are larger
# than all inputs and outputs: at T = 8,192 the scores of a head take 268 MB in float32, its queries 2 MB in bfloat16.
# Writing them to memory and reading them back takes longer than computing them.
#
# Flash attention computes the softmax while keys arrive, and never has more than one chunk of scores. The price is
# FLOPs: the backward pass computes the scores once more. On a chip that computes hundreds of FLOPs in the time it takes
# to read a byte, this is a bargain. For short sequences dense attention is simpler and as fast.

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
# The difficulty is the softmax: each share is exp(score) over the sum of all keys' exp(score), and the sum is known
# only at the end. It also subtracts the largest score, so that exp does not overflow, and that one is not known either.
# But a softmax over all keys can be combined from those over two chunks. Each chunk has its own M, L and O, which are
# rescaled to the larger M and added; at the end O is divided by L. Neither the order nor the number of chunks matters.
# The table shows how the three numbers of one query settle as more keys arrive. (Here every query sees every key.)


# %%
def chunk_sums(Q, K, V):
    """Compute M[T], L[T] and O[T, H] of one chunk alone, where O is not yet divided by L."""
    scores = Q @ K.mT / H**0.5  # [T, chunk]: never more than this
    M = scores.amax(1)
    P = torch.exp(scores - M[:, None])
    return M, P.sum(1), P @ V


def combined(one, two):
    """Combine two chunks: L = exp(M1 - M) L1 + exp(M2 - M) L2 with M = max(M1, M2), and O in the same way."""
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
page.title(f"Query 0 over chunks of {CHUNK} keys, against dense attention to the keys so far")
page.table(rows, ["keys", "M", "L", "O / L", "all queries\noff by"])
O, logsum = forward(Q, K, V)
page.check("the last row is dense attention", difference(O, dense(Q, K, V)) <= EXACT)

# %% [markdown]
# ## The backward
# The backward pass needs no scores from the forward pass: with the saved logsum, M + log L of each query, P =
# exp(scores - logsum) gives a chunk's part of the softmax (which the book calls S, and its gradient dS where we write
# dP). The derivative of a softmax subtracts the sum of P dP over all keys, which no chunk has. But O is the sum of P V
# over the keys, and dP is dO V^T, so the appendix's identity computes that sum without the keys, as one number per
# query: sum_j P_ij dP_ij = sum_d dO_id O_id. So each chunk can be done alone.


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
page.title(f"Chunks of {CHUNK} against dense attention, float64")
page.equal([(name, difference(*pair), EXACT) for name, pair in named.items()], "dense attention and autograd")

# %% [markdown]
# ## Memory
# How much memory does this save? The table counts the most elements that are live at once, besides Q, K and V: two
# arrays [T, S] for dense attention, a few [T, chunk] for the listing. If the length doubles, the first grows by a
# factor of four, the second by a factor of two.


# %%
def most_held(attend, n: int) -> float:
    """Return the elements that are live besides the operands, as n queries attend to n keys."""
    operands = [torch.empty(n, H, device="meta") for _ in range(3)]
    with peak_memory() as memory:
        [x.detach() for x in operands]
        attend(*operands)
    return memory.peak / 4 - 3 * n * H


page.title("Elements live at once besides Q, K and V, H = 8")
held = [(n, most_held(dense, n), most_held(lambda *x: forward(*x)[0], n)) for n in (96, 192, 384)]
page.table([(n, f"{a:,.0f}", f"{b:,.0f}", f"{a / b:.1f}") for n, a, b in held], ["T = S", "dense", "chunks", "times"])
page.check("what dense attention holds grows by four", held[2][1] > 3.5 * held[1][1])
page.check("what chunks hold grows by two", held[2][2] < 2.1 * held[1][2])

# %% [markdown]
# ## Bytes read and written
# Memory traffic decides the speed. By the roofline of a v5e, a kernel that writes its scores to HBM is bound by them at
# every length. A kernel that keeps them in VMEM reads Q, K and V and writes O, and is compute-bound from some hundred
# keys on.

# %%
V5E, WIDTH = chip("v5e"), 128
lengths = [128 * 2**i for i in range(8)]


def intensity(n: int, kept: bool) -> float:
    """Return FLOPs per byte of a head of 128 in bf16, two products.

    Scores are either kept on the chip, or written, read, and their softmax written and read again.
    """
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
# The chunks may also be on different devices. Each rank has its own keys, K[S_C, H], and M, L and O are reduced over C,
# M by a maximum. No array as long as S is sent. Ring attention does the same hop by hop, in 05_context.py.


# %%
def on_ranks(mesh) -> float:
    """Return the difference of O from dense attention, on the rank where it is largest."""
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
#    Answer: Only dV, because P^T dO needs no derivative of the softmax. dQ and dK come from the gradient of the
#    scores, which is wrong without the subtracted sum.
# 2. Question: how many keys must a chunk have for the scores of a chunk to be more than K and V themselves, T = 64?
#    Evaluate `2 * H * S / T`.
#    Answer: 24 keys: T x 24 numbers are then as many as the 2 S H of K and V.
# 3. Flag: run with `--chunk 96`. Which row of the first table is left, and what does the listing then hold?
#    Answer: The last one, 96 keys. One chunk has all keys, so the listing holds all scores at once, like dense
#    attention.
