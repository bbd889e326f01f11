"""The output distribution of speculative sampling as a finite sum: no sampling, no statistics.

With the uniform numbers given, `verify` is a piecewise constant function of them. Its pieces are cut where the rule, as
it is written here once more, says; the function is called at three points of each, and the pieces' sizes are added up.
"""

import itertools

import torch

from scaling.book import speculative
from scaling.serve.requests import Sampling
from scaling.serve.sampling import probabilities


def contexts(V: int, k: int, seed: int, how: Sampling, device="cpu") -> list[torch.Tensor]:
    """p[prefix] for all prefixes of 0..k tokens: [V], [V, V], ... as tables, after temperature and filters."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for n in range(k + 1):
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


def output_joint(p, q, V: int, k: int, verify=speculative.verify) -> torch.Tensor:
    """The joint distribution of the first k + 1 tokens: those of one step, and after fewer the target's own."""
    rows = []
    for proposed in itertools.product(range(V), repeat=k):
        ps = torch.stack([p[n][proposed[:n]] for n in range(k + 1)])
        qs = torch.stack([q[n][proposed[:n]] for n in range(k)])
        weight = float(torch.stack([qs[n][proposed[n]] for n in range(k)]).prod())
        if weight == 0:
            continue
        rate = [min(1.0, float(ps[n][proposed[n]] / qs[n][proposed[n]])) for n in range(k)]
        for keeps in itertools.product(*(cells([r]) for r in rate)):
            n = next((n for n in range(k) if keeps[n][0] >= rate[n]), k)  # where the rule says that it ends
            more = (ps[n] - qs[n]).clamp(min=0) if n < k else ps[n]
            edges = (more / more.sum() if more.sum() > 0 else ps[n]).cumsum(0).tolist()
            for again, size in cells(edges):
                share = weight * size
                for _, part in keeps:
                    share *= part
                rows.append((ps, qs, proposed, [u for u, _ in keeps], again, share))
    ps, qs, proposed, keep, again, share = zip(*rows, strict=True)
    tokens, count = verify(
        torch.stack(ps), torch.stack(qs), torch.tensor(proposed),
        torch.tensor(keep, dtype=torch.float64), torch.tensor(again, dtype=torch.float64)[:, None].expand(-1, k + 1),
    )  # fmt: skip
    joint = torch.zeros([V] * (k + 1), dtype=torch.float64)
    for row, n, part in zip(tokens.tolist(), count.tolist(), share, strict=True):
        rest = torch.tensor(part, dtype=torch.float64)
        for m in range(n, k + 1):  # what a step leaves open, the target draws
            rest = rest[..., None] * p[m][tuple(row[:n])]
        joint[tuple(row[:n])] += rest
    return joint


def wrong_rules() -> dict:
    """Rules that were published by mistake: each gives another distribution than the target's."""
    draw, residual = speculative.draw_token, speculative.residual

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
