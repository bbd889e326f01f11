# %% [markdown]
"""Part 7, Sharding the KV cache: a decode step line by line, and prefill split along the sequence.
https://jax-ml.github.io/scaling-book/inference

A cache can be split over its KV heads, but often there are more ranks than heads, and a copy of each head on several
ranks wastes memory and reads. Here the cache is split over Y by heads and over Z by the batch, and the query heads are
split over Y and Z. First the book's twelve lines run, with two versions of steps 9 and 10; then prefill, whose tokens
can be split as well. `scaling.serve` decodes in this form and three others, which 07_sharded_decode.py compares.
"""

# %%
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.arrays import operands
from scaling.book.listing import EXACT, difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, unshard
from scaling.configs import get
from scaling.hardware import chip
from scaling.show import svg
from scaling.show.frames import frames_of, text
from scaling.trace import trace

page = Page(__doc__, mesh="Y=2,Z=2", device=True, seed=True)
Y, Z = (page.args.mesh[axis] for axis in "YZ")
B, S, H = 2 * Z, 8 * Z, 4
D, SEED = 8 * Y * Z, page.args.seed

# %% [markdown]
# ## One token, twelve lines
# X has one token of each of B sequences, with D numbers. K and V are the cache, with S tokens of each sequence. There
# are N query heads of H numbers and K KV heads, and M query heads share each KV head, so N = KM. From step 5 to the
# results O, K and M are separate dims; before and after, heads are one dim, N. The two AllToAlls move activations from
# heads to rows of the batch and back. The activations are one token a sequence, so this is cheap; the cache is long and
# does not move.


# %%
def attention(X, W_Q, W_O, K, V, mesh, M: int, ending):
    """X[B, D], W_Q[D, N_YZ, H], W_O[N_YZ, H, D], K[B_Z, S, K_Y, H], V[B_Z, S, K_Y, H] -> X[B, D]."""
    Q = einsum("X[B, D] * W_Q[D, N_YZ, H] -> Q[B, N_YZ, H]", X, W_Q)  # 3; 1 and 2 are inputs
    Q = all_to_all("Q[B, N_YZ, H] -> Q[B_Z, N_Y, H]", Q, mesh)  # 4
    Q = Q.unflatten(1, (-1, M))  # 5: Q[B_Z, K_Y, M, H]
    A = einsum("Q[B_Z, K_Y, M, H] * K[B_Z, S, K_Y, H] -> A[B_Z, S, K_Y, M]", Q, K)  # 6
    A = torch.softmax(A / H**0.5, 1)  # 7: whole along S, so nothing is sent
    O = einsum("A[B_Z, S, K_Y, M] * V[B_Z, S, K_Y, H] -> O[B_Z, K_Y, M, H]", A, V)  # 8
    O = ending(O, mesh)
    X = einsum("O[B, N_YZ, H] * W_O[N_YZ, H, D] -> X[B, D] {U_YZ}", O, W_O)  # 11
    return all_reduce("X[B, D] {U_YZ} -> X[B, D]", X, mesh)  # 12


def by_the_book(O, mesh):
    """Exchange over M, then flatten: each rank has a part of every KV head that it had before."""
    O = all_to_all("O[B_Z, K_Y, M, H] -> O[B, K_Y, M_Z, H]", O, mesh)  # 9
    return O.flatten(1, 2)  # 10: O[B, N_YZ, H], if these are the right heads


def by_heads(O, mesh):
    """Flatten, then exchange over N: each rank has the heads of its block of W_O."""
    O = O.flatten(1, 2)  # O[B_Z, N_Y, H]
    return all_to_all("O[B_Z, N_Y, H] -> O[B, N_YZ, H]", O, mesh)


# %% [markdown]
# Both versions run on ranks and are compared with one device. With one KV head on each rank of Y they are the same.
# With two, the book's step 10 joins a part of M from each of the two KV heads. These are not the heads that this rank's
# block of W_O multiplies, so the result is wrong. In the table of lines, V is the bytes of the array that is gathered,
# exchanged or reduced, as in Part 3, and `sent` is the bytes that each rank sends.


# %%
def decoded(mesh, heads: int):
    """Return (difference from one device, lines, frames of what moves) of both endings, by the KV heads of a rank."""
    K, M = heads * Y, 2 * Z
    types = ["X[B, D]", "W_Q[D, N_YZ, H]", "W_O[N_YZ, H, D]", "K[B_Z, S, K_Y, H]", "V[B_Z, S, K_Y, H]"]
    whole, own = operands(types, {"B": B, "S": S, "D": D, "H": H, "K": K, "N": K * M}, mesh, SEED)
    X, W_Q, W_O, *cache = whole
    O = sdpa((X @ W_Q.flatten(1)).view(B, K * M, 1, H), *(x.transpose(1, 2) for x in cache), enable_gqa=True)
    wanted, found = O.flatten(1) @ W_O.flatten(0, 1), []
    for ending in (by_the_book, by_heads):
        with trace() as log:
            got = attention(*own, mesh, M, ending)
        found.append((difference(got, wanted, mesh), lines(log), frames_of(log.collectives())))
    return found


apart = {}
for heads in (1, 2):
    (apart["the book's", heads], *_), (apart["over N", heads], ran, moved) = page.on_ranks(decoded, heads)
show_lines(page, f"A decode step's attention on Y={Y}, Z={Z}, float64", ran)
page.say()
page.equal([(f"{heads} KV heads a rank: steps 9 and 10 {'over N' if heads == 2 else 'by the book'}", off, EXACT)
            for heads, off in ((1, apart["the book's", 1]), (2, apart["over N", 2]))])  # fmt: skip
page.answers([
    Answer("Steps 9 and 10 give O[B, N_YZ, H], one KV head a rank of Y", "yes",
           "yes" if apart["the book's", 1] <= EXACT else "no"),
    Answer("... and with two KV heads a rank", "yes", "yes" if apart["the book's", 2] <= EXACT or Z == 1 else "no", "",
           erratum="the AllToAll has to go back over N, not over M" if Z > 1 else ""),
])  # fmt: skip

# %% [markdown]
# The picture shows who holds what before and after each collective. A block has the number (or, in a notebook, the
# colour) of the first device that has it before; rows are the batch and columns the heads. Before the first AllToAll a
# device has all rows of few heads, and after it half of the rows of twice as many heads: the rows whose cache it has.
# The second AllToAll goes back. In the AllReduce each device has all of X, before it as a term of the sum.

# %%
page.title(f"What moves in a decode step, on Y={Y}, Z={Z}")
page.show(text(moved, page.args.mesh), lambda: svg.player(moved, page.args.mesh))

# %% [markdown]
# ## Prefill, split along the sequence
# A long prompt is one sequence, so there is no batch to split. Tensor parallelism over Y ends where its collectives
# take longer than the FLOPs; beyond that, its T tokens can be split over Z. Then only keys and values are gathered, [T,
# K_Y, H], which together are smaller than the activations by a factor of D / 2KH. Each rank knows the positions of its
# queries (`place`), for the mask. The keys that a rank computed are its part of the cache.


# %%
def prefill(x, W_Q, W_K, W_V, W_O, mesh):
    """x[T_Z, D], W_Q[D, N_Y, H], W_K and W_V[D, K_Y, H], W_O[N_Y, H, D] -> A[T_Z, D], K[T_Z, K_Y, H]."""
    Q = einsum("x[T_Z, D] * W_Q[D, N_Y, H] -> Q[T_Z, N_Y, H]", x, W_Q)
    K = einsum("x[T_Z, D] * W_K[D, K_Y, H] -> K[T_Z, K_Y, H]", x, W_K)
    V = einsum("x[T_Z, D] * W_V[D, K_Y, H] -> V[T_Z, K_Y, H]", x, W_V)
    all_K = all_gather("K[T_Z, K_Y, H] -> K[T, K_Y, H]", K, mesh)
    all_V = all_gather("V[T_Z, K_Y, H] -> V[T, K_Y, H]", V, mesh)
    place = torch.arange(len(x), device=x.device) + mesh.coord["Z"] * len(x)
    seen = place[:, None] >= torch.arange(len(all_K), device=x.device)
    O = sdpa(*(h.transpose(0, 1)[None] for h in (Q, all_K, all_V)), seen, enable_gqa=True)[0].transpose(0, 1)
    A = einsum("O[T_Z, N_Y, H] * W_O[N_Y, H, D] -> A[T_Z, D] {U_Y}", O, W_O)
    return all_reduce("A[T_Z, D] {U_Y} -> A[T_Z, D]", A, mesh), K


def prefilled(mesh):
    """Return the differences of A and of the cache from one device's causal attention, and the lines that ran."""
    types = ["x[T_Z, D]", "W_Q[D, N_Y, H]", "W_K[D, K_Y, H]", "W_V[D, K_Y, H]", "W_O[N_Y, H, D]"]
    sizes = {"T": 8 * Z, "D": D, "H": H, "N": 2 * Y, "K": Y}
    (x, *W, W_O), own = operands(types, sizes, mesh, SEED)
    Q, keys, values = ((x @ each.flatten(1)).view(1, len(x), -1, H).transpose(1, 2) for each in W)
    O = sdpa(Q, keys, values, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    wanted = O.flatten(1) @ W_O.flatten(0, 1)
    with trace() as log:
        A, K = prefill(*own, mesh)
    cache = unshard("K[T_Z, K_Y, H]", K, mesh)
    return (difference(unshard("A[T_Z, D]", A, mesh), wanted, mesh),
            difference(cache, keys[0].transpose(0, 1), mesh), lines(log))  # fmt: skip


out, cached, ran = page.on_ranks(prefilled)
show_lines(page, f"Prefill of one sequence on Y={Y}, Z={Z}, float64", ran)
page.say()
page.equal([("A, causal", out, EXACT), ("the cache", cached, EXACT)])

# %% [markdown]
# How many ranks can the sequence use? A layer of P params takes 2 P T / (Y Z C) seconds for its products, with C
# FLOPs/s a chip, and 4 T K H / (Y W) seconds for the gathers in bf16, with W bytes/s of ICI. The tokens T cancel, so
# the products take longer, and can hide the gathers, up to Z = P W / (2 K H C) ranks, for prompts of any length. The
# example is LLaMA-3 70B on v5e, with a ring for Z.

# %%
V5E, L70 = chip("v5e"), get("llama3-70b")
per_layer = 2 * L70.D * (L70.N + L70.K) * L70.H + L70.matrices * L70.D * L70.F
most = 2 * per_layer * V5E.bandwidth("ici") / (4 * L70.K * L70.H * V5E.flops())
tensor = cost.tensor_limit(L70.F * L70.matrices / 2, V5E.flops(), V5E.bandwidth("ici"))
page.answers([
    Answer("LLaMA-3 70B, prefill on v5e: TP is compute-bound up to Y =", "", tensor, "ways", "3/2 F W / C, one ring"),
    Answer("... and then split along the sequence up to Z =", "", most, "ways", "P W / (2 K H C), whatever T"),
    Answer("Keys and values over activations, bytes", "", 2 * L70.K * L70.H / L70.D, "", "2 K H / D"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `+ mesh.coord["Z"] * len(x)` by `+ 0 * len(x)`. Which rows of A are still right, and why is the
#    cache?
#    Answer: The rows on ranks with Z=0, whose queries begin at place 0. On the others the mask hides the keys of the
#    ranks before, and A differs by more than its largest element. The cache is right, because keys and values do not
#    depend on the mask.
# 2. Question: how many ways may the sequence of LLaMA-3 8B be split on v5e? Evaluate
#    `2 * (2 * 4096 * 40 * 128 + 3 * 4096 * 14336) * 9e10 / (4 * 8 * 128 * 1.97e14)`.
#    Answer: 48: fewer than for 70B, because the layer is smaller and has as many KV heads.
# 3. Flag: run with `--mesh Y=4,Z=1`. Which lines send nothing any more?
#    Answer: The two AllToAlls of the decode step and the gathers of K and V in prefill, all over Z. The AllReduces
#    stay, over Y alone.
