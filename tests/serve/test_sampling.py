"""How a token is drawn, and how a draft's are checked: by the book's rule, whose distribution is an exact sum."""

import itertools
import math
import random

import pytest
import torch

from scaling.book.speculative import expected_tokens, residual, verify
from scaling.serve import Sampling
from scaling.serve.engine import ngram
from scaling.serve.requests import Draw, request_seeds
from scaling.serve.sampling import draw_token, probabilities, sample, uniforms

logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -math.inf]], dtype=torch.float64)


def test_greedy_takes_the_lower_of_equals():
    assert sample(logits, [Draw()], [0]) == [1]


def test_temperature_and_filters_by_hand():
    p = probabilities(logits, Sampling(2.0))[0]
    e = [math.exp(x / 2) for x in (1, 3, 2, 3)]
    assert p.tolist() == pytest.approx([x / sum(e) for x in e] + [0], abs=1e-15)
    assert probabilities(logits, Sampling(1.0, top_k=1))[0].tolist() == [0, 1, 0, 0, 0]  # of equals the lower id
    assert probabilities(logits, Sampling(1.0, top_k=2))[0].tolist() == pytest.approx([0, 0.5, 0, 0.5, 0])
    assert probabilities(logits, Sampling(1.0, top_k=99)).equal(probabilities(logits, Sampling(1.0)))
    quarter = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    assert probabilities(quarter, Sampling(1.0, top_p=0.75))[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(quarter, Sampling(1.0, top_p=0.76))[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0])
    assert probabilities(quarter, Sampling(1.0, top_p=1e-9))[0].tolist() == [1, 0, 0, 0]
    assert probabilities(quarter, Sampling(1.0, min_p=0.5))[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    both = probabilities(quarter, Sampling(1.0, top_k=2, top_p=0.6))[0]  # top_p of what top_k has left: 2/3, 1/3
    assert both.tolist() == [1, 0, 0, 0]


def test_a_token_never_drawn_has_no_probability():
    p = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.29999, 0.3, 0.99999999999999989], dtype=torch.float64)
    assert draw_token(p.expand(4, 5), u).tolist() == [1, 1, 3, 3]
    uneven = torch.full((7,), 1 / 7, dtype=torch.float64)
    assert draw_token(uneven, torch.tensor(1 - 2.0**-53, dtype=torch.float64)).item() == 6


def test_drawn_as_often_as_likely():
    p = probabilities(torch.tensor([[0.0, 1.0, 2.0, -1.0]]), Sampling(0.8, top_k=3))
    n = 4000
    draws = [Draw(Sampling(0.8, top_k=3), seed) for seed in range(n)]
    tokens = torch.tensor(sample(torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(n, 4), draws, [7] * n))
    found = torch.bincount(tokens, minlength=4).double() / n
    assert (found - p[0]).abs().max() < 4 * math.sqrt(0.25 / n)
    assert found[3] == 0


def test_randomness_is_of_the_seed_and_the_position_alone():
    assert uniforms([3, 4], [5, 5])[1:].equal(uniforms([4], [5]))
    drawn = uniforms([1] * 50 + [2] * 50, [*range(50)] * 2)
    assert len(set(drawn.flatten().tolist())) == 100
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_a_prompt_has_the_same_seed_alone_and_beside_others():
    prompts = [[1, 2], [3], [1, 2]]
    seeds = request_seeds(prompts, 9)
    assert [request_seeds([p], 9)[0] for p in prompts[:2]] == seeds[:2]
    assert len({*seeds, *request_seeds(prompts, 8)}) == 6
    assert request_seeds(prompts, [5, 6, 7]) == [5, 6, 7]


K, V, PARTS = 2, 4, 24


def contexts(chance: random.Random, eighths: list[int]) -> list[torch.Tensor]:
    """p[V], p[V, V] and p[V, V, V] after 0 to K tokens: each distribution has these eighths, in an order of its own."""
    rows = [chance.sample(eighths, V) for _ in range(1 + V + V * V)]
    table = torch.tensor(rows, dtype=torch.float64) / 8
    return [table[0], table[1 : 1 + V], table[1 + V :].view(V, V, V)]


EIGHTHS = [([4, 2, 1, 1], [4, 2, 1, 1]), ([4, 2, 1, 1], [4, 2, 2, 0]), ([4, 4, 0, 0], [4, 2, 2, 0])]


@pytest.mark.parametrize(("target", "draft"), EIGHTHS)
def test_the_books_rule_gives_the_targets_distribution(target, draft):
    """transformers#47932, DeepSpec#31. `verify` is constant between multiples of 1/24 of its uniform numbers, for there
    lie all ratios of such p and q and all edges of what p has more: the middles of these parts give an exact sum."""
    chance = random.Random(0)
    p, q = contexts(chance, target), contexts(chance, draft)
    middles = (torch.arange(PARTS, dtype=torch.float64) + 0.5) / PARTS
    *proposals, first_kept, second_kept, again = torch.cartesian_prod(
        *[torch.arange(V).double()] * K, *[middles] * (K + 1)
    ).T
    first, second = (x.long() for x in proposals)
    proposed = torch.stack([first, second], 1)
    ps = torch.stack([p[0].expand(len(first), V), p[1][first], p[2][first, second]], 1)
    qs = torch.stack([q[0].expand(len(first), V), q[1][first]], 1)
    tokens, count = verify(
        ps, qs, proposed, torch.stack([first_kept, second_kept], 1), again[:, None].expand(-1, K + 1)
    )
    chances = q[0][first] * q[1][first, second] / PARTS**3
    joint = torch.zeros(V, V, V, dtype=torch.float64)  # of three tokens: what a step leaves open, the target draws
    for a, b, c in itertools.product(range(V), repeat=3):
        follows = torch.ones(len(first), dtype=torch.float64)
        for n, (token, then) in enumerate(((a, p[0][a]), (b, p[1][a, b]), (c, p[2][a, b, c]))):
            follows = follows * torch.where(count > n, (tokens[:, n] == token).double(), then)
        joint[a, b, c] = (chances * follows).sum()
    assert (joint - p[0][:, None, None] * p[1][..., None] * p[2]).abs().max() < 1e-12


def test_the_books_rule_where_the_draft_is_greedy_or_right():
    """mlx-swift-lm PR#459, jaymody#3: at temperature 0 the longest prefix that agrees, and the target's next."""
    likely = torch.tensor([[2, 0, 1], [2, 0, 1]])
    p = probabilities(torch.nn.functional.one_hot(likely, 3).double(), Sampling())
    proposed = torch.tensor([[2, 0], [2, 1]])
    q = torch.nn.functional.one_hot(proposed, 3).double()
    tokens, count = verify(p, q, proposed, torch.full((2, 2), 0.9999), torch.full((2, 3), 0.5))
    assert [tokens[0].tolist(), tokens[1, :2].tolist(), count.tolist()] == [[2, 0, 1], [2, 0], [3, 2]]
    assert residual(p, p).equal(p)
    for rate, k in itertools.product((0.0, 0.3, 0.95, 1.0), (1, 4, 8)):
        assert expected_tokens(rate, k) == pytest.approx(sum(rate**n for n in range(k + 1)))


def test_ngram_proposes_what_followed():
    assert ngram([5, 1, 2, 9, 8, 1, 2], 3) == [9, 8, 1]
    assert ngram([1, 2, 1, 3, 1], 2) == [3, 1]  # the latest place
    assert ngram([4, 4, 4], 3) == [4, 4, 4]
    assert ngram([7], 2) == [7, 7]
