import math

import pytest
import torch

from scaling.serve import Sampling
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"), ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"), ({"min_p": 1.01}, "min_p"), ({"min_p": -0.1}, "min_p"),
    ],
)  # fmt: skip
def test_options_that_leave_no_token_are_refused(options, named):
    with pytest.raises(ValueError, match=f"(?s){named}.*fix: "):
        Sampling(**options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_without_a_maximum_are_refused(bad):
    with pytest.raises(ValueError, match="no token can be drawn"):
        probabilities(torch.full((1, 3), bad), Sampling())


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
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        request_seeds(prompts, [1, 2])
