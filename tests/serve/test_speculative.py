"""The rule by exact enumeration, and in numbers small enough for the suite: `speculative_sweep.py` has the larger."""

import pytest
import speculative_sweep
import torch
from enumerate_speculative import contexts, output_joint, target_joint, wrong_rules

from scaling.book.speculative import expected_tokens, residual, verify
from scaling.serve.engine import ngram
from scaling.serve.requests import Sampling
from scaling.serve.sampling import probabilities


@pytest.mark.slow
@pytest.mark.parametrize("how", [Sampling(0.7), Sampling(1.3, top_k=3)], ids=["temperature", "top-k"])
def test_the_output_is_the_targets_distribution(how):
    """transformers#47932, DeepSpec#31: with filters, what q is drawn from must be the q of the ratio."""
    p, q = contexts(5, 2, 1, how), contexts(5, 2, 2, how)
    joint = output_joint(p, q, 5, 2)
    assert (joint - target_joint(p)).abs().max() < 1e-12
    for name, wrong in wrong_rules().items():
        assert (output_joint(p, q, 5, 2, wrong) - target_joint(p)).abs().max() > 1e-3, name


def test_chi_square_tells_the_rule_from_wrong_ones():
    assert speculative_sweep.first_tokens(verify, n=4000) > 1e-3
    for name, wrong in wrong_rules().items():
        assert speculative_sweep.first_tokens(wrong, n=4000) < 1e-6, name


def test_tokens_a_step():
    assert abs(speculative_sweep.rate_error(0.8, 4, n=4000)) < 0.02
    assert [expected_tokens(1.0, 3), expected_tokens(0.0, 3), expected_tokens(0.5, 1)] == [4, 1, 1.5]


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
