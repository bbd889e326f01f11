# %% [markdown]
"""Part 7, a cache of latents: decoding as DeepSeek-V2 and V3 do, beyond the book.
https://jax-ml.github.io/scaling-book/inference

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches one latent of C numbers a token for all
heads, from which W_UK makes each head's keys and W_UV its values. That makes the cache small, but computing the keys
and values of all tokens in every step would cost far more than attention itself. It is not necessary. In the *absorbed*
form a head multiplies its query by W_UK instead, and the result of attention by W_UV. All heads then attend to the
latents themselves, like query heads that share one KV head.
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
# B sequences have S cached tokens each, whose latents are C_KV[B, S, C], and there are N heads. Q_N and K_N are the
# parts of queries and keys without rotary embedding, P numbers a head. (The rotary dims are left out here. All heads
# share one rotary key per token, and nothing is absorbed there.)
#
# In the plain form a head computes the keys of all cached tokens, K_N = C_KV W_UK, and then the scores Q_N K_N, a sum
# over the P numbers of a key. A product of three can be taken in either order: Q_C = Q_N W_UK is a query of C numbers,
# which is multiplied with the latents themselves. The weighted sum over tokens is then a sum of latents, and W_UV turns
# it into a head's H numbers afterwards.


# %%
def plain(Q_N, C_KV, W_UK, W_UV):
    """Attend to the keys and values of every token: Q_N[B, N, P] of one token, C_KV[B, S, C] -> O[B, N, H]."""
    K_N = einsum("C_KV[B, S, C] * W_UK[C, N, P] -> K_N[B, S, N, P]", C_KV, W_UK)
    V = einsum("C_KV[B, S, C] * W_UV[C, N, H] -> V[B, S, N, H]", C_KV, W_UV)
    A = einsum("Q_N[B, N, P] * K_N[B, S, N, P] -> A[B, N, S]", Q_N, K_N)
    return einsum("A[B, N, S] * V[B, S, N, H] -> O[B, N, H]", A.softmax(-1), V)


def absorbed(Q_N, C_KV, W_UK, W_UV):
    """Attend to the latents themselves: Q_N[B, N, P] of one token, C_KV[B, S, C] -> O[B, N, H]."""
    Q_C = einsum("Q_N[B, N, P] * W_UK[C, N, P] -> Q_C[B, N, C]", Q_N, W_UK)
    A = einsum("Q_C[B, N, C] * C_KV[B, S, C] -> A[B, N, S]", Q_C, C_KV)
    O_C = einsum("A[B, N, S] * C_KV[B, S, C] -> O_C[B, N, C]", A.softmax(-1), C_KV)
    return einsum("O_C[B, N, C] * W_UV[C, N, H] -> O[B, N, H]", O_C, W_UV)


# %% [markdown]
# Both run on one device, and the absorbed form also on a mesh with the heads over Y and the cache's sequence over Z.
# Along Y each rank has the whole cache, since every head reads it. Along Z each rank has a part of the sequence, and
# the softmaxes are combined as in Part 4's Appendix A: first the maximum m of all ranks, then the sums L. The queries
# that move over Z are C wide, not H. The table has the lines that send something: V is the bytes of the gathered or
# unreduced array, and `sent` what a rank sends.


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
    """Return the differences of the absorbed form and of the mesh from the plain form, and the lines of the mesh."""
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
show_lines(page, f"Sent over Z on Y={Y}, Z={Z}, float64", over_z, flops=False)
page.say()
page.equal(rows)

# %% [markdown]
# ## A model
# `scaling.serve` runs the whole layer in this way (`scaling/serve/forms/latent.py`), with rotary dims, int8 and pages.
# A prompt of 8 tokens is computed in the plain form, and each single token in the absorbed form. All logits equal those
# of the model without a cache, in each form of Part 7 (07_sharded_decode.py) that suits a latent. For latents, `heads`
# and `heads_batch` store the cache alike, split by the batch over Z and copied along Y. "Rank holds" is the bytes of a
# rank's part. In the cache's type I and J are 1, since a latent is both key and value, and all heads share it; M is
# what is kept of a token, its latent and its rotary key.


# %%
def served(mesh):
    """Return rows of (form, the cache's type, its bytes on a rank, the difference from the model without a cache)."""
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
page.title("Logits against the model without a cache")
page.table(forms, ["form", "the cache's type", "rank holds", "difference"])
page.check("each form's logits are those of the model without a cache", all(row[-1] <= LIMIT for row in forms))

# %% [markdown]
# ## Which form is cheaper, and what binds it?
# A rotary key has `rope` numbers, so a whole key has A = P + rope numbers. What a head computes from a latent, a key's
# other part and a value, has W = P + H numbers, and a cached token has M = C + rope. For each cached token and head, a
# query costs 2 (M + C) = 2 (2 C + rope) FLOPs in the absorbed form and 2 (A + H) in the plain form. But the plain form
# computes keys and values first, in 2 C W FLOPs, which all queries of a sequence share. So single tokens are absorbed,
# and prompts of 171 tokens or more are not.
#
# The next rows of the table show a consequence: 128 heads that read one latent do so many FLOPs per byte that
# attention, memory-bound everywhere else in Part 7, comes near a chip's critical intensity (its *ridge*). The last rows
# are the price on a mesh: each rank along Y has a copy of every latent, and the queries that are sent are three times
# as wide.

# %%
C, N, rope, P, H = V3.latent.kv_rank, V3.N, V3.latent.rope, V3.latent.nope, V3.latent.value
few = next(queries for queries in range(1, 10_000) if not absorbs(V3.latent, queries))
h800, heads = chip("h800"), V3.with_(latent=None)
intensity = serving.load(V3, "bf16", "bf16").kv_flops
ridge = h800.intensity("hbm")
sent = {one.what: one.nbytes for one in decoding.collectives("sequence", V3, 64, {"Y": 8, "Z": 4})}
page.answers([
    Answer("DeepSeek-V3: FLOPs of a query, cached token and head, absorbed", "", 2 * (2 * C + rope), "",
           "2 (2 C + rope)"),
    Answer("... plain, without making keys and values", "", 2 * (P + rope + H), "", "2 (A + H)"),
    Answer("Queries of a sequence from which the plain form has fewer", "", few, "", "above C W / (2 C - W)"),
    Answer("FLOPs per byte of the cache, bf16", "", intensity, "", "N (2 C + rope) / M"),
    Answer("... with keys and values for each head", "", serving.load(heads, "bf16", "bf16").kv_flops, "",
           "G, the queries that share a key"),
    Answer("An H800's ridge, FLOPs per byte", "", ridge, "", "FLOPs/s / bytes/s of HBM"),
    Answer("Copies of the cache on Y=8", "", decoding.copies(V3, {"Y": 8}), "", "Y: a latent is of all heads"),
    Answer("64 requests, S over Z=4, heads over Y=8: Q's AllGather", "", sent["Q"] / 1e6, "MB", "2 B N M / Y"),
    Answer("... over that of queries of a key's width", "", sent["Q"] / (2 * 64 * N * (P + rope) / 8), "times",
           "M / A"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `O_C / L[..., None]` by `O_C`. By what factor is each head off?
#    Answer: By the sum of its exponentials, L. The row "S over Z" says NO, and the largest difference is 11 times the
#    largest element.
# 2. Question: with how many heads would reading the cache be at an H800's ridge? Evaluate `ridge * N / intensity`.
#    Answer: 154: the FLOPs per byte grow with the heads, and DeepSeek-V3's 128 heads give 242 of the 291 that an H800
#    has.
# 3. Flag: run with `--mesh Y=4,Z=1`. Which lines send nothing, and how often is the cache stored?
#    Answer: All four, since they are over Z. The cache is stored four times: a latent belongs to all heads, so Y does
#    not split it.
