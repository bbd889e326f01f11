# %% [markdown]
"""Part 7, beyond the book: decoding with a cache of latents, as DeepSeek-V2 and V3 do.
https://jax-ml.github.io/scaling-book/inference

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches one latent a token for all heads. A step
need not make keys and values of it: a head's W_UK can go to its query instead, its W_UV to what comes back. Then all
heads ask the latents themselves, as the query heads of one KV head would: that is the absorbed form.
"""

# %%
import torch

from scaling import serve, tree
from scaling.book.answers import Answer
from scaling.book.arrays import operands
from scaling.book.decoding import decoded
from scaling.book.listing import difference, lines, show_lines
from scaling.book.page import Page
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, unshard
from scaling.configs import Config, Latent, get
from scaling.cost import decoding, serving
from scaling.hardware import chip
from scaling.models import transformer
from scaling.serve.forms.latent import absorbs
from scaling.trace import trace

page = Page(__doc__, mesh="Y=2,Z=2", device=True, seed=True)
Y, Z = page.args.mesh.get("Y", 1), page.args.mesh.get("Z", 1)
B, S, latent = 2 * Z, 8 * Z, Latent(q_rank=12, kv_rank=60, nope=4, rope=4, value=8)
config = Config("tiny", L=2, D=32, F=24 * Y * Z, N=2 * Y * Z, K=2 * Y * Z, H=8, V=16 * Y * Z, latent=latent)
sizes, V3 = config.sizes, get("deepseek-v3")
LIMIT = 1e-11

# %% [markdown]
# ## The same scores in two ways
# Of a head, K_N = C_KV W_UK are the keys of all cached places, and the scores Q_N K_N. The sum over P may as well be
# taken first: Q_C = Q_N W_UK is a query for latents. What the scores then add up are latents, and W_UV comes after.
# (The rotary dims are left out here: of them a place has one key for all heads, and nothing is absorbed.)


# %%
def plain(Q_N, C_KV, W_UK, W_UV):
    """One token's queries Q_N[B, N, P] over C_KV[B, S, C] -> O[B, N, H]: keys and values of every place are made."""
    K_N = einsum("C_KV[B, S, C] * W_UK[C, N, P] -> K_N[B, S, N, P]", C_KV, W_UK)
    V = einsum("C_KV[B, S, C] * W_UV[C, N, H] -> V[B, S, N, H]", C_KV, W_UV)
    A = einsum("Q_N[B, N, P] * K_N[B, S, N, P] -> A[B, N, S]", Q_N, K_N)
    return einsum("A[B, N, S] * V[B, S, N, H] -> O[B, N, H]", A.softmax(-1), V)


def absorbed(Q_N, C_KV, W_UK, W_UV):
    """The same; of a place nothing is made."""
    Q_C = einsum("Q_N[B, N, P] * W_UK[C, N, P] -> Q_C[B, N, C]", Q_N, W_UK)
    A = einsum("Q_C[B, N, C] * C_KV[B, S, C] -> A[B, N, S]", Q_C, C_KV)
    O_C = einsum("A[B, N, S] * C_KV[B, S, C] -> O_C[B, N, C]", A.softmax(-1), C_KV)
    return einsum("O_C[B, N, C] * W_UV[C, N, H] -> O[B, N, H]", O_C, W_UV)


# %% [markdown]
# Both on one device, and on a mesh with the heads over Y and the cache's sequence over Z. Along Y a rank has the whole
# cache, since every head asks it; along Z it has its places, and softmaxes are combined as in Part 4's Appendix A: the
# maximum of all ranks, then sums. Look at what goes over Z: queries C wide, not H.


# %%
def over_places(Q_N, C_KV, W_UK, W_UV, mesh):
    """Q_N[B, N_YZ, P], C_KV[B, S_Z, C] -> O[B, N_YZ, H]."""
    Q_C = einsum("Q_N[B, N_YZ, P] * W_UK[C, N_YZ, P] -> Q_C[B, N_YZ, C]", Q_N, W_UK)
    Q_C = all_gather("Q_C[B, N_YZ, C] -> Q_C[B, N_Y, C]", Q_C, mesh)  # on the critical path
    A = einsum("Q_C[B, N_Y, C] * C_KV[B, S_Z, C] -> A[B, N_Y, S_Z]", Q_C, C_KV)
    m = all_reduce("m[B, N_Y] {U_Z} -> m[B, N_Y]", A.amax(-1), mesh, op="max")  # on the critical path
    A = (A - m[..., None]).exp()
    O_C = einsum("A[B, N_Y, S_Z] * C_KV[B, S_Z, C] -> O_C[B, N_Y, C] {U_Z}", A, C_KV)
    L = reduce_scatter("L[B, N_Y] {U_Z} -> L[B, N_YZ]", A.sum(-1), mesh)
    O_C = reduce_scatter("O_C[B, N_Y, C] {U_Z} -> O_C[B, N_YZ, C]", O_C, mesh)  # on the critical path
    return einsum("O_C[B, N_YZ, C] * W_UV[C, N_YZ, H] -> O[B, N_YZ, H]", O_C / L[..., None], W_UV)


def compared(mesh):
    """How far the two forms, and the mesh, are from each other; the lines of the mesh."""
    types = ["Q_N[B, N_YZ, P]", "C_KV[B, S_Z, C]", "W_UK[C, N_YZ, P]", "W_UV[C, N_YZ, H]"]
    sizes = {"B": B, "S": S, "C": latent.kv_rank, "N": config.N, "P": latent.nope, "H": latent.value}
    whole, own = operands(types, sizes, mesh, page.args.seed, 1 / 4)
    wanted = plain(*whole)
    with trace() as log:
        O = over_places(*own, mesh)
    O = unshard("O[B, N_YZ, H]", O, mesh)
    rows = [("absorbed", difference(absorbed(*whole), wanted, mesh), LIMIT)]
    return [*rows, ("S over Z", difference(O, wanted, mesh), LIMIT)], lines(log)


rows, ran = page.on_ranks(compared)
over_z = [row for row in ran if row[1] and "Z(" in row[0]]
show_lines(page, f"What goes over Z on Y={Y}, Z={Z}, float64", over_z, flops=False)
page.say()
page.equal(rows)

# %% [markdown]
# ## A model
# `scaling.serve` runs the whole layer so (`scaling/serve/forms/latent.py`), rotary dims, int8 and pages with it. A
# prompt of 8 tokens, given at once, is computed the plain way, single tokens absorbed. All logits equal those of the
# model without a cache, in each form of Part 7 that a latent has. "Rank holds" is its part of the cache.


# %%
def served(mesh):
    """By form: (form, the cache's type, its bytes on a rank, how far from the model without a cache)."""
    g = torch.Generator().manual_seed(page.args.seed)
    params = transformer.init(config, page.args.seed, torch.float64, mesh.device)
    tokens = torch.randint(0, config.V, (B, S), generator=g).to(mesh.device)
    prompts = torch.full((B,), 8, device=mesh.device)
    wanted, found = transformer.forward(params, tokens, config=config)[:, 7:], []
    for form in ("heads", "heads_batch", "sequence"):
        mine = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
        logits, _ = decoded(mine, tokens, prompts, S - 8, config, mesh, form)
        held = serve.init_cache(config, B, S, mesh=mesh, form=form)["KV"].nbytes
        type = serve.cache_specs(config, mesh, form=form)["KV"]
        found.append((form, type, held, difference(logits, wanted, mesh)))
    return found


forms = page.on_ranks(served)
page.title("Logits beside the model without a cache")
page.table(forms, ["form", "the cache's type", "rank holds", "difference"])
page.check("each form's logits are those of the model without a cache", all(row[-1] <= LIMIT for row in forms))

# %% [markdown]
# ## Which form, and what binds it
# For each place and head, a query costs 2 (2 C + rope) FLOPs absorbed and 2 (A + H) plain; the plain form makes keys
# and values first, 2 C W, which the queries of a row share. So a single token is absorbed, and a prompt is not. Look at
# the last rows: 128 heads that read one latent do so many FLOPs a byte that attention, memory-bound everywhere else in
# Part 7, comes near a chip's ridge.

# %%
C, N, rope, P, H = V3.latent.kv_rank, V3.N, V3.latent.rope, V3.latent.nope, V3.latent.value
few = next(queries for queries in range(1, 10_000) if not absorbs(V3.latent, queries))
h800, heads = chip("h800"), V3.with_(latent=None)
intensity = serving.load(V3, "bf16", "bf16").kv_flops
ridge = h800.intensity("hbm")
sent = {one.what: one.nbytes for one in decoding.collectives("sequence", V3, 64, {"Y": 8, "Z": 4})}
page.answers([
    Answer("DeepSeek-V3: FLOPs of a query, place and head, absorbed", "", 2 * (2 * C + rope), "", "2 (2 C + rope)"),
    Answer("... plain, without making keys and values", "", 2 * (P + rope + H), "", "2 (A + H)"),
    Answer("Queries of a row from which the plain form has fewer", "", few, "", "above C W / (2 C - W)"),
    Answer("FLOPs for a byte of the cache, bf16", "", intensity, "", "N (2 C + rope) / M"),
    Answer("... with keys and values for each head", "", serving.load(heads, "bf16", "bf16").kv_flops, "", "G"),
    Answer("An H800's ridge, FLOPs for a byte", "", ridge, "", "FLOPs/s / bytes/s of HBM"),
    Answer("Copies of the cache on Y=8", "", decoding.copies(V3, {"Y": 8}), "", "Y: a latent is of all heads"),
    Answer("64 requests, S over Z=4, heads over Y=8: Q's AllGather", "", sent["Q"] / 1e6, "MB", "2 B N M / Y"),
    Answer("... for that of queries which ask keys", "", sent["Q"] / (2 * 64 * N * (P + rope) / 8), "times", "M / A"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `O_C / L[..., None]` by `O_C`. By what factor is each head off?
# 2. Question: with how many heads would reading the cache be at an H800's ridge? Evaluate `ridge * N / intensity`.
# 3. Flag: run with `--mesh Y=4,Z=1`. Which lines send nothing, and how often is the cache stored?
