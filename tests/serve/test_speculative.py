"""The book's rule of speculative sampling, its output's distribution as a finite sum: no sampling, no statistics.

With the uniform numbers given, `verify` is a piecewise constant function of them. Its pieces are cut where the rule, as
it is written here once more, says; the function is called at three points of each, and the pieces' sizes are added up.
"""

import itertools

import pytest
import torch

from scaling.book import speculative
from scaling.book.speculative import expected_tokens, residual, verify
from scaling.serve.engine import ngram
from scaling.serve.requests import Sampling
from scaling.serve.sampling import probabilities

K, V = 2, 5


def contexts(seed: int, how: Sampling) -> list[torch.Tensor]:
    """p[prefix] for all prefixes of 0..K tokens: [V], [V, V], ... as tables, after temperature and filters."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for n in range(K + 1):
        logits = 2 * torch.randn(*[V] * n, V, generator=generator, dtype=torch.float64)
        tables.append(probabilities(logits, how))
    return tables


def target_joint(p: list[torch.Tensor]) -> torch.Tensor:
    """P(x1, ..., x_{k+1}) of the target."""
    joint = p[0]
    for table in p[1:]:
        joint = joint[..., None] * table
    return joint


def cells(edges: list[float]) -> list[tuple[float, float]]:
    """(point, size) of the pieces of [0, 1) between the edges: both ends and the middle of each, a third of it each.

    A rule whose own edges lie elsewhere gives different tokens inside one piece, and so another sum.
    """
    cuts = [0.0, *sorted(e for e in edges if 0 < e < 1), 1.0]
    return [
        (a + part * (b - a), (b - a) / 3)
        for a, b in itertools.pairwise(cuts)
        if b - a > 1e-12
        for part in (1e-3, 0.5, 1 - 1e-3)
    ]


def output_joint(p, q, verify=verify) -> torch.Tensor:
    """The joint distribution of the first K + 1 tokens: those of one step, and after fewer the target's own."""
    rows = []
    for proposed in itertools.product(range(V), repeat=K):
        ps = torch.stack([p[n][proposed[:n]] for n in range(K + 1)])
        qs = torch.stack([q[n][proposed[:n]] for n in range(K)])
        weight = float(torch.stack([qs[n][proposed[n]] for n in range(K)]).prod())
        if weight == 0:
            continue
        rate = [min(1.0, float(ps[n][proposed[n]] / qs[n][proposed[n]])) for n in range(K)]
        for keeps in itertools.product(*(cells([r]) for r in rate)):
            n = next((n for n in range(K) if keeps[n][0] >= rate[n]), K)  # where the rule says that it ends
            more = (ps[n] - qs[n]).clamp(min=0) if n < K else ps[n]
            edges = (more / more.sum() if more.sum() > 0 else ps[n]).cumsum(0).tolist()
            for again, size in cells(edges):
                share = weight * size
                for _, part in keeps:
                    share *= part
                rows.append((ps, qs, proposed, [u for u, _ in keeps], again, share))
    ps, qs, proposed, keep, again, share = zip(*rows, strict=True)
    tokens, count = verify(
        torch.stack(ps), torch.stack(qs), torch.tensor(proposed),
        torch.tensor(keep, dtype=torch.float64), torch.tensor(again, dtype=torch.float64)[:, None].expand(-1, K + 1),
    )  # fmt: skip
    joint = torch.zeros([V] * (K + 1), dtype=torch.float64)
    for row, n, part in zip(tokens.tolist(), count.tolist(), share, strict=True):
        rest = torch.tensor(part, dtype=torch.float64)
        for m in range(n, K + 1):  # what a step leaves open, the target draws
            rest = rest[..., None] * p[m][tuple(row[:n])]
        joint[tuple(row[:n])] += rest
    return joint


def wrong_rules() -> dict:
    """Rules that were published by mistake: each gives another distribution than the target's."""
    draw = speculative.draw_token

    def rule(accept, last):
        def verify(p, q, proposed, keep, again):
            k = proposed.shape[1]
            at = proposed[..., None]
            kept = accept(p[:, :k], q, at, keep)
            count = kept.long().cumprod(-1).sum(-1)
            drawn = draw(torch.cat([last(p[:, :k], q), p[:, k:]], 1), again)
            tokens = torch.cat([proposed, proposed[:, :1]], 1)
            return torch.where(torch.arange(k + 1) < count[:, None], tokens, drawn), count + 1

        return verify

    def ratio(p, q, at, keep):
        return keep * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0]

    def flattened(p, q, at, keep):  # the ratio's q is not the one that the proposal was drawn from
        flat = q.sqrt() / q.sqrt().sum(-1, keepdim=True)
        return ratio(p, flat, at, keep)

    return {
        "a rejected token is drawn from p itself": rule(ratio, lambda p, q: p),
        "kept if it is the target's likeliest": rule(lambda p, q, at, keep: p.argmax(-1) == at[..., 0], residual),
        "the ratio is taken with another q": rule(flattened, residual),
        "kept with probability p": rule(lambda p, q, at, keep: keep < p.gather(-1, at)[..., 0], residual),
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", [Sampling(0.7), Sampling(1.3, top_k=3)], ids=["temperature", "top-k"])
def test_the_output_is_the_targets_distribution(how):
    """transformers#47932, DeepSpec#31: with filters, what q is drawn from must be the q of the ratio."""
    p, q = contexts(1, how), contexts(2, how)
    joint = output_joint(p, q)
    assert (joint - target_joint(p)).abs().max() < 1e-12
    for name, wrong in wrong_rules().items():
        assert (output_joint(p, q, wrong) - target_joint(p)).abs().max() > 1e-3, name


def test_tokens_a_step():
    """One more for each proposal that is kept, as are all before it."""
    for rate in (0.0, 0.3, 0.95, 1.0):
        for k in (1, 4, 8):
            assert expected_tokens(rate, k) == pytest.approx(sum(rate**n for n in range(k + 1)))


def test_greedy_keeps_what_the_target_would_have_said():
    """mlx-swift-lm PR#459, jaymody#3: at temperature 0 the longest prefix that agrees, and the target's next."""
    likely = torch.tensor([[2, 0, 1], [2, 0, 1]])
    p = probabilities(torch.nn.functional.one_hot(likely, 3).double(), Sampling())
    proposed = torch.tensor([[2, 0], [2, 1]])
    q = torch.nn.functional.one_hot(proposed, 3).double()
    tokens, count = verify(p, q, proposed, torch.full((2, 2), 0.9999), torch.full((2, 3), 0.5))
    assert tokens[0].tolist() == [2, 0, 1]
    assert tokens[1, :2].tolist() == [2, 0]
    assert count.tolist() == [3, 2]


def test_the_residual_where_nothing_is_left():
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert residual(p, p).equal(p)
    assert residual(p, torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist() == [0, 1]


def test_ngram_proposes_what_followed():
    assert ngram([5, 1, 2, 9, 8, 1, 2], 3) == [9, 8, 1]
    assert ngram([1, 2, 1, 3, 1], 2) == [3, 1]  # the latest place
    assert ngram([4, 4, 4], 3) == [4, 4, 4]
    assert ngram([7], 2) == [7, 7]
