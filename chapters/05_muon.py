# %% [markdown]
"""Part 5, Muon: an optimizer of whole matrices when they are sharded, three listings and their cost, beyond the book.
https://jax-ml.github.io/scaling-book/training

Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982) makes the momentum of each matrix orthogonal before it is added to
the weights, by five steps of Newton-Schulz, each with a few products of the whole matrix. Under FSDP and TP no rank has
a whole matrix. There are three solutions: every rank gathers all matrices; each rank owns some matrices; or the
iteration runs on shards and reduces partial sums.
"""

# %% [markdown]
# ## Why another optimizer?
# Adam scales each number of a gradient alone. Muon treats a weight as a matrix and makes the update orthogonal, so that
# no direction dominates. In published runs it needs about half of the FLOPs for the same loss (arXiv:2502.16982). It
# also has one moment where Adam has two.
#
# In a distributed run Muon is harder than Adam. Adam works on any shard, but to orthogonalize a matrix one needs
# products of the whole matrix, which no rank has. This chapter compares three solutions. With few ranks, or small
# matrices, gathering is fine; on many ranks it is what limits Muon. Vectors, embeddings and the head stay with Adam,
# and one would use Adam for everything if a step were so short that these products took a large part of it.

# %%
import torch

from scaling import optim
from scaling.book.answers import Answer
from scaling.book.listing import EXACT, difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_reduce, all_to_all, shard, unshard
from scaling.configs import get
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models.leaves import matrices_of
from scaling.optim.orthogonal import COEFFICIENTS, MatrixStack, form_costs, matrix_flops, newton_schulz
from scaling.spec import parse
from scaling.trace import trace

page = Page(__doc__, mesh="X=4", device=True, seed=True, plot=True)
X = page.args.mesh["X"]
L, D, F = 2 * X, 8 * X, 16 * X
TYPE = "M[L, D_X, F]"

# %% [markdown]
# ## What Newton-Schulz does
# A matrix M = U S V^T is orthogonal once its singular values S are all 1. Newton-Schulz divides M by its norm, so that
# no singular value is above 1, and then replaces M five times by 3.4445 M - 4.775 M M^T M + 2.0315 (M M^T)^2 M. That
# does the same with each singular value x, which becomes 3.4445 x - 4.775 x^3 + 2.0315 x^5, and leaves U and V as they
# are. There is no decomposition and no inverse, only products, for which bfloat16 is precise enough. The values need
# not be exactly 1: look at how far the small ones rise.

# %%
rng = torch.Generator().manual_seed(page.args.seed)
M = torch.randn(L, D, F, generator=rng, dtype=torch.float64)
U, _, V = torch.linalg.svd(torch.randn(16, 16, generator=rng, dtype=torch.float64))
values = torch.logspace(-3, 0, 16, dtype=torch.float64)
values = values / values.norm()
after = (U.mT @ newton_schulz(U @ values.diag() @ V, torch.float64) @ V.mT).diagonal()
page.title("Singular values of a matrix of norm 1, before and after")
page.table([(f"{before:.4f}", f"{now:.3f}") for before, now in zip(values.tolist(), after.tolist(), strict=True)][::3],
           ["before", "after"])  # fmt: skip
page.check("all but the smallest come near 1", bool(((after > 0.5) & (after < 1.5))[3:].all()))

# %% [markdown]
# ## Three listings
# The momentum has the type of the weights, here M[L, D_X, F]: L matrices whose rows are split over X. The first listing
# gathers every matrix on every rank. The second sends each matrix to one rank, its owner, and back, and sends nothing
# while it computes. The third gathers no matrix and splits F instead. The product M M^T sums over F, so each rank has a
# partial sum of it, and an AllReduce of D x D numbers adds these up in each of the five steps.


# %%
def each(M):
    return torch.stack([newton_schulz(m, torch.float64) for m in M])


def by_gathering(M, mesh):
    """Compute all matrices on all ranks, and keep this rank's rows of each."""
    M = all_gather("M[L, D_X, F] -> M[L, D, F]", M, mesh)
    return shard("O[L, D, F] -> O[L, D_X, F]", each(M), mesh)


def by_owners(M, mesh):
    """Send each matrix whole to the rank that owns its layer, and its result back."""
    M = all_to_all("M[L, D_X, F] -> M[L_X, D, F]", M, mesh)
    return all_to_all("O[L_X, D, F] -> O[L, D_X, F]", each(M), mesh)


def on_shards(M, mesh):
    """Split the longer dim, so that the Gram matrix has the shorter, [D, D], and reduce it in each step."""
    a, b, c = COEFFICIENTS
    M = all_to_all("M[L, D_X, F] -> M[L, D, F_X]", M, mesh)
    squares = all_reduce("n[L] {U_X} -> n[L]", M.square().sum((1, 2)), mesh)
    O = M / squares.sqrt()[:, None, None]
    for _ in range(5):
        A = all_reduce("A[L, D, C] {U_X} -> A[L, D, C]", O @ O.mT, mesh)  # over this rank's part of F
        O = a * O + (b * A + c * A @ A) @ O
    return all_to_all("O[L, D, F_X] -> O[L, D_X, F]", O, mesh)


LISTINGS = {"gathered": by_gathering, "owned": by_owners, "on_shards": on_shards}


def compared(mesh) -> dict:
    """Return by form the difference from one device, and the lines that ran."""
    found, own = {}, shard("M[L, D, F] -> M[L, D_X, F]", M.to(mesh.device), mesh)
    for name, listing in LISTINGS.items():
        with trace() as log:
            O = listing(own, mesh)
        found[name] = difference(unshard("O[L, D_X, F]", O, mesh), each(M), mesh), lines(log)
    return found


ran = page.on_ranks(compared)
for name, (_, listed) in ran.items():
    show_lines(page, f"{name}, on X={X}, float64", [row for row in listed if row[1]], flops=False)
page.say()
page.equal([(name, off, EXACT) for name, (off, _) in ran.items()])

# %% [markdown]
# ## Which form is the cheapest?
# That depends on the number of matrices. The table has the time that a rank's FLOPs and its collectives take together
# on 64 v5p, X=16 and Y=4, for matrices of the size of LLaMA-3 70B's W_in. Gathering repeats all the work on every rank.
# Owners share the work, but with fewer matrices than ranks some ranks own none and send zeros in their place, so the
# time is the same for 1 and for 64 matrices. On shards, all ranks share the products with M, but each computes all of
# A^2, and there are five AllReduces. A model of 80 layers has 80 such matrices, so owners are the best for it.

# %%
V5P, L70 = chip("v5p"), get("llama3-70b")
mesh, INTENSITY = AbstractMesh({"X": 16, "Y": 4}), chip("v5p").intensity("ici")
stack = MatrixStack(parse("M[S, O_Y, I_X]"), mesh)


def milliseconds(S: int) -> dict[str, float]:
    """Return milliseconds by form for S matrices W_in[D, F] on a rank, in float32, where all forms are possible."""
    work = form_costs((S, L70.F // 4, L70.D // 16), stack, INTENSITY, torch.float32)
    return {form: 1e3 * flops / V5P.flops() for form, flops in work.items()}


counts = (1, 2, 4, 8, 16, 32, 64, 80, 128)
page.title("ms on 64 v5p for so many matrices of 8192 x 28672, float32")
page.table([(S, *(f"{t:,.1f}" for t in milliseconds(S).values())) for S in counts], ["matrices", *milliseconds(1)])
page.chart("muon", {form: [(S, milliseconds(S)[form]) for S in counts] for form in milliseconds(1)}, "matrices", "ms",
           "W_in of LLaMA-3 70B over 64 v5p", height=12)  # fmt: skip
first = next(S for S in range(1, 200) if milliseconds(S)["owned"] < milliseconds(S)["on_shards"])
step = 6 * 2**20 * L70.D * L70.F / 64  # FLOPs of the layer's W_in on a rank, with 1M tokens
page.answers([
    Answer("FLOPs of Newton-Schulz of W_in[8192, 28672]", "", matrix_flops(L70.D, L70.F) / 1e12, "TFLOP",
           "5 (4 D^2 F + 2 D^3)"),
    Answer("... gathered, for one FLOP of the step's products with W_in (1M tokens, 64 chips)", "",
           matrix_flops(L70.D, L70.F) / step, "times", "5 (4 D^2 F + 2 D^3) 64 / (6 B D F)"),
    Answer("On 64 ranks owners are the cheapest from so many matrices on", "", first, "", "fewer leave ranks idle"),
])  # fmt: skip

# %% [markdown]
# ## As an optimizer
# `optim.muon` does this for whole trees. A tree of texts says which leaves are matrices: "D -> N H" means that W_Q is a
# matrix with rows of D and columns of N H. Matrices of one shape travel together, owners are chosen by FLOPs, and AdamW
# updates all other leaves. `python -m scaling.train --optimizer muon` runs it.

# %%
page.table([(name, what or "by AdamW") for name, what in matrices_of(L70)["layers"].items()], ["leaf", "its matrix"])


def updated(mesh) -> float:
    """Return the difference of a step of optim.muon from the listing above, in float64."""
    own = shard("M[L, D, F] -> M[L, D_X, F]", M.to(mesh.device), mesh)
    # F -> D, because Muon multiplies the update of a matrix with more outputs than inputs by sqrt(out / in)
    muon = optim.muon(1.0, {"W": "F -> D"}, weight_decay=0.0, nesterov=False, momentum=0.0, dtype=torch.float64)
    params = {"W": torch.zeros_like(own)}
    new, _ = muon.update({"W": own}, muon.init(params), params, specs={"W": TYPE}, mesh=mesh)
    return difference(unshard(TYPE, -new["W"], mesh), each(M), mesh)


page.say()
page.equal([("a step of optim.muon", page.on_ranks(updated), EXACT)], "the listings")
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `(b * A + c * A @ A)` by `(b * A)`. Which form is no longer equal, and why by so much?
#    Answer: Only `on_shards`, because the edit is in its listing and not in the other two. A step is then 3.4445 x -
#    4.775 x^3, which drives singular values near 1 beyond 1, where the third power takes over: after five steps the
#    result is millions of times too large.
# 2. Question: how many FLOPs has Newton-Schulz of LLaMA-3 8B's W_in? Evaluate `matrix_flops(4096, 14336)`.
#    Answer: 5.5 TFLOP, an eighth of LLaMA-3 70B's.
# 3. Flag: run with `--mesh X=2`. How many bytes does an owner send now?
#    Answer: 4,096 in each AllToAll, a quarter of V: a rank has half of the array, and half of that is for the other
#    rank. (The matrices of this chapter grow with X, so V is smaller, too.)
