# %% [markdown]
"""Part 7, Appendix D, Speculative Sampling: a small model proposes, one pass of the large one checks.
https://jax-ml.github.io/scaling-book/inference#appendix

    q[B, k, V], proposed[B, k] of the draft, p[B, k + 1, V] of the target -> tokens[B, k + 1], count[B] of them

For each of B sequences, the small model, the *draft*, proposes k tokens from its distributions q over V tokens. One
pass of the large model, the *target*, computes its own distributions p at the same places and after the last. The
chapter runs this greedily and sampled, computes the rule's distribution as a finite sum and compares it with two wrong
rules, and computes how many tokens a step gives, when it pays, and how far to guess ahead.
"""

# %% [markdown]
# ## Why guess tokens?
# A decode step reads all weights to make one token per sequence, and leaves most FLOPs unused. Checking k guesses takes
# nearly the same time, since the weights are read once for all of them. So a small model guesses, and the large model
# keeps the guesses that it could have made itself. The result has exactly the large model's distribution; only the time
# differs.
#
# The price is the work on guesses that are rejected. With a large batch FLOPs are no longer free, and guessing makes a
# step slower. It pays for few sequences at a time, where the guesses are good.

# %%
from itertools import pairwise

import torch
from torch import Tensor

from scaling import serve, tree
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import Config, get
from scaling.cost import serving
from scaling.hardware import chip
from scaling.models import transformer
from scaling.serve.requests import Sampling
from scaling.serve.sampling import draw_token

page = Page(__doc__, seed=True, plot=True)
seed = page.args.seed

# %% [markdown]
# ## Greedy: the same tokens in fewer passes
# Greedily, a proposal is right if it is the target's likeliest token. The draft is the target with noise on its
# weights; the less noise, the more often it is right. A pass of the target checks k = 4 proposals, and gives one token
# more than it accepts: the target's own after the last accepted one. So a perfect draft gives 5 tokens a pass, except
# in the first pass, which reads the prompt and gives one. In the last row, the draft is not a model: it looks up how
# the latest tokens went on earlier in the request's own text.

# %%
config = Config("target", L=2, D=32, F=64, N=4, K=2, H=8, V=32)
params = transformer.init(config, seed, torch.float64)
g = torch.Generator().manual_seed(seed)
prompts = [torch.randint(0, config.V, (length,), generator=g).tolist() for length in (5, 3, 8)]
new, k = (24, 4) if page.small else (64, 4)


def noisy(noise: float) -> tuple[Config, dict]:
    """Return a draft: the target's params, each perturbed by `noise` times its standard deviation."""
    g = torch.Generator().manual_seed(seed + 1)

    def off(x: torch.Tensor) -> torch.Tensor:
        return x + noise * x.std() * torch.randn(x.shape, generator=g, dtype=x.dtype) if x.dim() > 1 else x

    return config, tree.map(off, params)


def passes(draft) -> tuple[list[list[int]], int]:
    """Return (the new tokens of each prompt, passes of the target)."""
    out, steps = [[] for _ in prompts], 0
    for given in serve.stream(params, prompts, config, new, Sampling(), seed=seed, draft=draft, proposals=k):
        steps += 1
        for token in given:
            out[token.row].append(token.id)
    return out, steps


plain, once = passes(None)
rows = [("none", once, f"{new / once:.2f}", "-")]
drafts = {f"noise {noise:g}": noisy(noise) for noise in (0, 0.1, 0.3)} | {"its own text": "ngram"}
for name, draft in drafts.items():
    tokens, steps = passes(draft)
    rows.append((name, steps, f"{new / steps:.2f}", page.check(f"greedy by {name}", tokens == plain)))
page.title(f"{len(prompts)} requests of {new} tokens, k = {k}; passes until the slowest is done")
page.table(rows, ["draft", "passes", "tokens a pass", "same tokens"])
page.check("a perfect draft: k + 1 tokens a pass", rows[1][1] == 1 + -(-(new - 1) // (k + 1)))

# %% [markdown]
# ## Sampled: the rule
# How can sampled tokens be checked? A token x, drawn from q, is accepted with probability min(1, p(x)/q(x)). If it is
# rejected, a token is drawn from max(p - q, 0), rescaled. Accepted tokens have the probabilities min(p, q), and the
# redrawn ones make up the rest of p. The book calls the rule inspired by Metropolis and Hastings, but it needs no
# Markov chain. It holds for whatever q the draft has, if q is the distribution that x was really drawn from, after
# temperature and filters (Leviathan et al. 2022, arxiv.org/abs/2211.17192; Chen et al. 2023, arxiv.org/abs/2302.01318).
# `scaling.generate` is stricter: it accepts only the token that it would have drawn itself with its seed, so no draft
# changes its tokens.


# %%
def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of a token that replaces a rejected one: max(p - q, 0) over its sum; p if that is 0."""
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / torch.where(total > 0, total, 1), p)


def verify(p: Tensor, q: Tensor, proposed: Tensor, keep: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens[B, k + 1], count[B]): a step's tokens; only the first `count` (1 to k + 1) are valid.

    Args:
        p: p[B, k + 1, V], the target's distributions at the proposed positions and the one after.
        q: q[B, k, V], the distributions from which the proposals were drawn.
        proposed: proposed[B, k], the proposals.
        keep: keep[B, k], uniform numbers that decide about the proposals.
        again: again[B, k + 1], uniform numbers that draw the replacement of the first rejected one, or the last token.
    """
    k = proposed.shape[1]
    at = proposed[..., None]
    kept = keep * q.gather(-1, at)[..., 0] < p[:, :k].gather(-1, at)[..., 0]
    count = kept.long().cumprod(-1).sum(-1)  # the length of the kept prefix
    last = torch.cat([residual(p[:, :k], q), p[:, k:]], 1)
    drawn = draw_token(last, again)
    places = torch.arange(k + 1, device=p.device)
    tokens = torch.cat([proposed, proposed[:, :1]], 1)
    return torch.where(places < count[:, None], tokens, drawn), count + 1


# %% [markdown]
# The table has the rule's exact distribution, and that of two known wrong rules; `off by` is half the sum of the
# absolute differences from p. All randomness is given to `verify` as uniform numbers, so `outcome` finds the exact
# distribution without drawing: it cuts the range of each uniform number into pieces in which the rule gives the same
# token, and adds up their lengths.


# %%
def outcome(p: torch.Tensor, q: torch.Tensor, rule) -> torch.Tensor:
    """Return the distribution of a step's first token, k = 1: rule(p, q, x, keep, again) summed over its pieces."""
    found = torch.zeros_like(p)
    for x in range(len(p)):
        edges = {0.0, 1.0, min(1.0, float(p[x] / q[x]))}
        more = {0.0, 1.0, *p.cumsum(0).tolist(), *residual(p, q).cumsum(0).tolist()}
        for low, high in pieces(edges):
            for first, last in pieces(more):
                token = rule(p, q, x, (low + high) / 2, (first + last) / 2)
                found[token] += q[x] * (high - low) * (last - first)
    return found


def pieces(edges: set[float]) -> list[tuple[float, float]]:
    ends = sorted(min(edge, 1.0) for edge in edges)
    return [(a, b) for a, b in pairwise(ends) if b - a > 1e-13]


def exact(p, q, x, keep, again) -> int:
    two = [torch.tensor([[u, u]], dtype=torch.float64) for u in (keep, again)]
    ps, qs = p.expand(1, 2, -1), q.expand(1, 1, -1)
    return int(verify(ps, qs, torch.tensor([[x]]), two[0][:, :1], two[1])[0][0, 0])


def from_p(p, q, x, keep, again) -> int:
    """Draw rejected tokens from p itself, which is wrong."""
    return x if keep * q[x] < p[x] else int(draw_token(p[None], torch.tensor([again], dtype=torch.float64)))


def if_equal(p, q, x, keep, again) -> int:
    """Accept x if it is the target's likeliest, which is wrong."""
    return x if x == int(p.argmax()) else int(draw_token(p[None], torch.tensor([again], dtype=torch.float64)))


p, q = torch.randn(2, 6, generator=g, dtype=torch.float64).softmax(-1)
page.title("The distribution of a token, V = 6")
shown = {"target p": p, "draft q": q, "the rule": outcome(p, q, exact), "redrawn from p": outcome(p, q, from_p),
         "kept if equal": outcome(p, q, if_equal)}  # fmt: skip
variation = {name: float((found - p).abs().sum() / 2) for name, found in shown.items()}
page.table([(name, *(f"{x:.4f}" for x in found.tolist()), f"{variation[name]:.1e}") for name, found in shown.items()],
           ["", *map(str, range(6)), "off by"])  # fmt: skip
page.check("the rule gives p, to 1e-12", variation["the rule"] < 1e-12)
page.check("the wrong rules do not", min(variation["redrawn from p"], variation["kept if equal"]) > 0.01)
page.check(
    "kept: the sum of min(p, q)", abs(float(torch.minimum(p, q).sum()) - (1 - float((p - q).abs().sum() / 2))) < 1e-12
)

# %% [markdown]
# ## Tokens per step
# If each of k proposals is accepted with probability a, independently, a step gives 1 + a + ... + a^k = (1 - a^(k+1)) /
# (1 - a) tokens: the first is sure, and each further one needs all guesses before it to be right. This is compared with
# 20,000 steps of the rule, for distributions whose overlap, the sum of min(p, q), is a.


# %%
def expected_tokens(rate: float, k: int) -> float:
    """Return the tokens per step if each proposal is kept with this rate, independently: (1 - a^(k+1)) / (1 - a)."""
    return k + 1.0 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)


n, rows = 20_000, []
for a in (0.5, 0.8, 0.9):
    ps = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(n, 5, 2)  # always token 0
    qs = torch.tensor([a, 1 - a], dtype=torch.float64).expand(n, 4, 2)
    u = torch.rand(3, n, 5, generator=g, dtype=torch.float64)
    _, count = verify(ps, qs, draw_token(qs, u[0, :, :4]), u[1, :, :4], u[2])
    mean, wanted = float(count.double().mean()), expected_tokens(a, 4)
    rows.append((a, wanted, mean, page.check(f"tokens a step at a = {a}", abs(mean / wanted - 1) < 0.02)))
page.title("Tokens a step, k = 4")
page.table(rows, ["a", "by formula", "counted", "within 2%"])

# %% [markdown]
# ## When it pays
# A pass over k + 1 tokens reads weights and caches once, like a pass over one token. While HBM binds a step, checking
# is free, and only the draft costs time. From a batch of 120 on, FLOPs bind, and guessing no longer pays. The table has
# the best k and its gain for LLaMA-3 70B with 8B as its draft, int8, on a v5e 4x4, a = 0.7, by batch and context. (A
# dash means that so many caches do not fit.) Where reading caches takes most of a step, there is a gain at larger
# batches, too: this is the book's throughput win for long contexts. It is smaller than for one request, because the
# draft here also reads its caches, two fifths of the target's.

# %%
V5E, target, small = (
    chip("v5e"),
    serving.load(get("llama3-70b"), "int8", "int8"),
    serving.load(get("llama3-8b"), "int8", "int8"),
)


def seconds(load: serving.Load, batch: int, context: int, tokens: int = 1) -> float:
    """Return the seconds of a pass over so many tokens of each sequence: FLOPs of all, weights and caches read once."""
    step = serving.step(load, batch, context, V5E, 16)
    return max(step.kv, tokens * load.kv_flops * batch * load.kv(context) / (16 * V5E.flops())) + max(
        step.weights, tokens * step.math
    )


def gain(a: float, k: int, batch: int, context: int) -> float:
    """Return tokens/s with k proposals over those without."""
    spent = seconds(target, batch, context, k + 1) + k * seconds(small, batch, context)
    return expected_tokens(a, k) * seconds(target, batch, context) / spent


def best(a: float, batch: int, context: int) -> int:
    return max(range(13), key=lambda k: gain(a, k, batch, context))


batches = [b for b in (1, 8, 32, 64, 120, 240) if b <= serving.largest_batch(target, 2048, V5E, 16)]
page.title("Best k and its gain, a = 0.7")
page.table(
    [(b, *(f"{best(0.7, b, S)}: {gain(0.7, best(0.7, b, S), b, S):.2f}x" if b * target.kv(S) + target.weights < 256e9
           else "-" for S in (2048, 8192, 32768))) for b in batches],
    ["batch", "2k", "8k", "32k"],
)  # fmt: skip
page.chart(
    "speculation", {f"a = {a}": [(k, gain(a, k, 1, 2048)) for k in range(13)] for a in (0.5, 0.7, 0.8, 0.9)},
    "proposals k", "tokens/s over those without", "70B with 8B as its draft, batch 1", height=12, log=False,
)  # fmt: skip

# %% [markdown]
# The book's figure is of a model of 70B with a draft of 4B. It shows 3 to 4 proposals as best for XSum, a set of news
# articles to be summarized, and more for code (HumanEval). Here both models are bound by reading their weights, and the
# rows say from which acceptance on so many proposals are best.


# %%
def chinchilla(a: float) -> int:
    """Return the best k for a 70B model with a 4B draft, both bound by reading their weights."""
    return max(range(30), key=lambda k: expected_tokens(a, k) / (1 + k * 4 / 70))


def least(k: int) -> float:
    """Return the acceptance from which k or more proposals are best, to 1e-3."""
    return next(a / 1000 for a in range(1000) if chinchilla(a / 1000) >= k)


page.answers([
    Answer("XSum, 70B with a 4B draft: 3 are best from a =", "", least(3), "", "tokens over 1 + 4k/70"),
    Answer("... and more than 4 from a =", "", least(5), "", "so XSum's 3 to 4 mean about half are kept"),
    Answer("... at a = 0.8, as code may have, k =", "", chinchilla(0.8), "", "more aggressive, as the book says"),
    Answer("8B for 70B, batch 1, 2k, a = 0.7: best k", "", best(0.7, 1, 2048), "", "above"),
    Answer("... its gain", "", gain(0.7, best(0.7, 1, 2048), 1, 2048), "times", "2.77 tokens over a step and 4 of 8B"),
    Answer("240 sequences of 2k, a = 0.7: best k", "", best(0.7, 240, 2048), "", "compute-bound: a guess is FLOPs"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `return x if keep * q[x] < p[x] else` by `return x if keep * p[x] < q[x] else`: the ratio upside
#    down. How far off is a rule that was wrong already?
#    Answer: By 0.45, where it was off by 0.22: the tokens that the draft proposes too often are now the ones that are
#    kept.
# 2. Question: how many tokens does a step give with a = 0.8 and k = 6? Evaluate `expected_tokens(0.8, 6)`.
#    Answer: 3.95: the sum of a^i for i from 0 to 6.
# 3. Flag: run with `--plot gain.svg`. From which acceptance on are eight proposals better than four?
#    Answer: From a = 0.81 on. Of the four curves only that of 0.9 gains from it: 3.27 with eight proposals, and 2.85
#    with four. At 0.8 it is 2.31 and 2.34.
