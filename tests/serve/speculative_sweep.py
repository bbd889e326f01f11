"""Speculative sampling in numbers too large for the suite: `python tests/serve/speculative_sweep.py`, half a minute.

The exact enumeration over many tables; chi-square on V=16 with n=20,000, of the rule and of wrong ones; tokens a step.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from enumerate_speculative import contexts, output_joint, target_joint, wrong_rules

from scaling.book import speculative
from scaling.book.largest import largest
from scaling.common.console import Parser
from scaling.serve.requests import Sampling
from scaling.serve.sampling import draw_token, uniforms

HOWS = [Sampling(1.0), Sampling(0.7), Sampling(1.3, top_k=3), Sampling(1.0, top_p=0.8), Sampling(1.0, min_p=0.2)]


def step(p, q, n: int, k: int, verify, seed: int):
    """n steps at once: (tokens[n, k + 1], count[n]) with p[k + 1, V] and q[k, V] that do not look at the context."""
    count = 3 * k + 1
    u = uniforms([seed] * n * count, range(n * count)).view(n, count)
    proposed = draw_token(q.expand(n, -1, -1), u[:, :k])
    return verify(p.expand(n, -1, -1), q.expand(n, -1, -1), proposed, u[:, k : 2 * k], u[:, 2 * k :])


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the chi-square statistic, over what is expected at all; 0 where something impossible was drawn."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    some = expected > 0
    statistic = ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
    half = torch.tensor((int(some.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def first_tokens(verify, n: int = 20_000, V: int = 16, k: int = 3, seed: int = 5) -> float:
    """The p-value of the first token of n steps against the target's distribution."""
    generator = torch.Generator().manual_seed(11)
    p, q = (torch.randn(k + 1, V, generator=generator, dtype=torch.float64).softmax(-1) for _ in "pq")
    tokens, _ = step(p, q[:k], n, k, verify, seed)
    return p_value(torch.bincount(tokens[:, 0], minlength=V).double(), n * p[0])


def rate_error(rate: float, k: int, n: int = 40_000) -> float:
    """Tokens a step over the formula, minus 1, where a proposal is kept with this rate, whatever came before."""
    V = 4
    p = torch.full((k + 1, V), 1 / V, dtype=torch.float64)
    q = torch.zeros(k, V, dtype=torch.float64)
    q[:, 0] = 1.0  # always token 0, which the target gives p = rate
    p[:, 0], p[:, 1:] = rate, (1 - rate) / (V - 1)
    _, count = step(p, q, n, k, speculative.verify, seed=3)
    return float(count.double().mean()) / speculative.expected_tokens(rate, k) - 1


def main() -> int:
    worst = 0.0
    for seed in range(4):
        for how in HOWS:
            p, q = contexts(5, 2, seed, how), contexts(5, 2, seed + 100, how)
            worst = largest((worst, float((output_joint(p, q, 5, 2) - target_joint(p)).abs().max())))
    print(f"exact enumeration, V=5, k=2, {4 * len(HOWS)} tables: greatest error {worst:.1e}")
    right = first_tokens(speculative.verify)
    print(f"chi-square, V=16, n=20,000: the rule p = {right:.3f}")
    wrong = {name: first_tokens(rule) for name, rule in wrong_rules().items()}
    for name, found in wrong.items():
        print(f"  wrong: {name}: p = {found:.1e}")
    errors = {(a, k): rate_error(a, k) for a in (0.3, 0.6, 0.8, 0.95) for k in (1, 2, 4, 8)}
    off = largest(map(abs, errors.values()))
    print(f"tokens a step against (1 - a^(k+1)) / (1 - a): {off:.2%} off at most")
    good = worst < 1e-12 and right > 1e-3 and largest(wrong.values()) < 1e-6 and off < 0.02
    return 0 if good else 1


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
