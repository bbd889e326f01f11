"""How a token is drawn, and how a draft's are checked: by the book's rule, whose distribution is an exact sum."""

import itertools
import math
import random

import pytest
import torch
from refused import read_table
from running import functions

from scaling.serve import Sampling
from scaling.serve.draft import by_ngrams
from scaling.serve.requests import Draw, Request
from scaling.serve.sampling import draw_token, probabilities, sample, uniforms
from scaling.serve.states import Work

RULE = functions("07_speculative")
expected_tokens, residual, verify = (RULE[name] for name in ("expected_tokens", "residual", "verify"))
EQUALS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -math.inf]], dtype=torch.float64)
HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
WARM = [math.exp(x / 2) for x in (1, 3, 2, 3)]
# (logits, how, each token's part of the distribution), at the edges; else `misuse.plain` has them
KEPT = read_table(
    """
logits  how                                each token's part
# of equals the lower id
EQUALS  Sampling()                         [0, 1]
EQUALS  Sampling(2.0, top_k=99)            WARM
EQUALS  Sampling(1.0, top_k=2)             [0, 1, 0, 1]
HALVES  Sampling(1.0, top_p=0.75)          [2, 1]
HALVES  Sampling(1.0, top_p=0.76)          [4, 2, 1]
HALVES  Sampling(1.0, min_p=0.5)           [2, 1]
# top_p of what top_k has left: 2/3, 1/3
HALVES  Sampling(1.0, top_k=2, top_p=0.6)  [1]
""",
    globals(),
)


@pytest.mark.parametrize(("logits", "how", "parts"), KEPT)
def test_temperature_and_filters_by_hand(logits, how, parts):
    wanted = [part / sum(parts) for part in parts] + [0] * (logits.shape[1] - len(parts))
    assert probabilities(logits, how)[0].tolist() == pytest.approx(wanted, abs=1e-15)


def test_filters_keep_what_a_sort_of_all_tokens_keeps():
    """Of equals the lower ids: top_k, then the fewest whose sum is top_p of the rest, then min_p of the likeliest."""
    chance, kinds = random.Random(0), (torch.float32, torch.bfloat16, torch.float64)
    for i in range(300):
        logits = torch.tensor([float(chance.randrange(-4, 4)) for _ in range(12)], dtype=kinds[i % 3])
        how = Sampling(
            *(chance.choice(values) for values in ([0.7, 2.0], [None, 1, 3, 8], [None, 0.3, 0.8], [None, 0.1]))
        )
        p = (logits.double() / how.temperature).softmax(-1).tolist()
        kept = sorted(range(12), key=lambda id, p=p: (-p[id], id))[: how.top_k]
        whole = sum(p[id] for id in kept)
        sums = [sum(p[id] for id in kept[:n]) / whole for n in range(len(kept))]
        kept = [id for id, before in zip(kept, sums, strict=True) if before < (how.top_p or 2.0)]
        kept = [id for id in kept if p[id] >= (how.min_p or 0.0) * max(p)]
        wanted = [p[id] / sum(p[id] for id in kept) if id in kept else 0.0 for id in range(12)]
        assert probabilities(logits, how).tolist() == pytest.approx(wanted, abs=1e-12), (logits, how)


def test_rows_that_are_drawn_in_different_ways_are_drawn_as_each_alone():
    hows = [how for _, how, _ in KEPT] + [Sampling(0.7), Sampling(1.0, top_p=1.0), Sampling(1.3, 5, 0.9, 0.05)]
    logits = torch.randn(len(hows), 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 3] = logits[0].max() + 1
    for n in range(30):
        draws = [Draw(how, 100 + i) for i, how in enumerate(hows)]
        together = sample(logits, draws, [n] * len(hows)).read()
        assert together == [sample(logits[i : i + 1], [draw], [n]).read()[0] for i, draw in enumerate(draws)]
        for row, id, draw in zip(logits, together, draws, strict=True):
            assert id == draw_token(
                probabilities(row, draw.how), uniforms([draw.seed], [n])[0] * bool(draw.how.temperature)
            )
    broken = torch.cat([logits[:1] * math.nan, logits[1:]])
    assert sample(broken, draws, [0] * len(hows)).read() == [None, *sample(logits, draws, [0] * len(hows)).read()[1:]]


def test_a_token_is_drawn_by_its_probability_and_a_uniform_number():
    p = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.29999, 0.3, 0.99999999999999989], dtype=torch.float64)
    assert draw_token(p.expand(4, 5), u).tolist() == [1, 1, 3, 3]
    uneven = torch.full((7,), 1 / 7, dtype=torch.float64)
    assert draw_token(uneven, torch.tensor(1 - 2.0**-53, dtype=torch.float64)).item() == 6
    assert uniforms([3, 4], [5, 5])[1:].equal(uniforms([4], [5]))  # of the seed and the position alone
    u = uniforms([1] * 500 + [2] * 500, [*range(500)] * 2)
    assert (u.sort().values - torch.linspace(0, 1, 1000, dtype=torch.float64)).abs().max() < 0.05


K, V, PARTS = 2, 4, 24


def contexts(chance: random.Random, *eighths: list[int]) -> list[torch.Tensor]:
    """p[V], p[V, V] and p[V, V, V] after 0 to K tokens: each distribution has some of these eighths, in any order."""
    rows = [chance.sample(chance.choice(eighths), V) for _ in range(1 + V + V * V)]
    table = torch.tensor(rows, dtype=torch.float64) / 8
    return [table[0], table[1 : 1 + V], table[1 + V :].view(V, V, V)]


def test_the_books_rule_gives_the_targets_distribution():
    """transformers#47932, DeepSpec#31. `verify` is constant between multiples of 1/24 of its uniform numbers, for there
    lie all ratios of such p and q and all edges of what p has more: the middles of these parts give an exact sum."""
    chance = random.Random(0)
    p, q = contexts(chance, [4, 2, 1, 1], [4, 4, 0, 0]), contexts(chance, [4, 2, 2, 0])
    assert residual(p[0], p[0]).equal(p[0])
    middles = (torch.arange(PARTS, dtype=torch.float64) + 0.5) / PARTS
    drawn = torch.cartesian_prod(*[torch.arange(V).double()] * K, *[middles] * (K + 1))
    proposed, kept, again = drawn[:, :K].long(), drawn[:, K : 2 * K], drawn[:, 2 * K :].expand(-1, K + 1)
    first, second = proposed.T
    ps = torch.stack([p[0].expand(len(first), V), p[1][first], p[2][first, second]], 1)
    qs = torch.stack([q[0].expand(len(first), V), q[1][first]], 1)
    tokens, count = verify(ps, qs, proposed, kept, again)
    joint = q[0][first] * q[1][first, second] / PARTS**3
    for n in range(K + 1):  # of three tokens: what a step leaves open, the target draws
        given, open_ = (tokens[:, n, None] == torch.arange(V)).double(), count <= n
        shape = len(first), *[1] * n
        joint = joint[..., None] * torch.where(open_.view(*shape, 1), p[n], given.view(*shape, V))
    assert (joint.sum(0) - p[0][:, None, None] * p[1][..., None] * p[2]).abs().max() < 1e-12


def test_tokens_that_a_step_gives_on_average():
    for rate, k in itertools.product((0.0, 0.3, 0.95, 1.0), (1, 4, 8)):
        assert expected_tokens(rate, k) == pytest.approx(sum(rate**n for n in range(k + 1)))


def rescanned(tokens: list[int], k: int) -> list[int]:
    """The tokens after the latest earlier place of the last n, found by reading the whole text."""
    for n in range(min(3, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                after = tokens[start + n : start + n + k]
                return after + [after[-1]] * (k - len(after))
    return tokens[-1:] * k


def test_ngrams_propose_what_followed_the_latest_earlier_place():
    """Texts grow by one or several tokens; a request takes the id of another, and may go on after it was preempted."""
    for text, wanted in ([5, 1, 2, 9, 8, 1, 2], [9, 8, 1]), ([1, 2, 1, 3, 1], [3, 1, 1]), ([7], [7, 7, 7]):
        assert rescanned(text, 3) == wanted
    rng, texts = random.Random(0), {}
    for i in range(300):
        text = [rng.randrange(rng.choice([2, 4, 50])) for _ in range(rng.randrange(1, 40))]
        request = Request(i % 3, tuple(text), 99)
        for _ in range(10):
            work = Work(request, len(text) - 1, (text[-1],), (), True, rng.randrange(5), tuple(text[:-1]))
            assert by_ngrams(texts, "both", [work]) == {
                i % 3: rescanned(text, work.proposals) if work.proposals else []
            }
            text += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
