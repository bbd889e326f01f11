"""The gated delta rule in chunks beside the rule token by token, and its written-out derivative beside autograd's."""

import itertools

import pytest
import torch

from scaling.models.delta_rule import delta_rule, delta_rule_backward


def by_token(Q, K, V, g, beta, S, starts):
    """The rule as it is defined: decay, read, write the difference."""
    outs = []
    for t in range(Q.shape[1]):
        S = S * (g[:, t].exp() * ~starts[:, t, None])[..., None, None]
        seen = torch.einsum("bnhv,bnh->bnv", S, K[:, t])
        S = S + torch.einsum("bnh,bnv->bnhv", K[:, t], beta[:, t, :, None] * (V[:, t] - seen))
        outs.append(torch.einsum("bnhv,bnh->bnv", S, Q[:, t]))
    return torch.stack(outs, 1), S


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("T", "chunk"), [*itertools.product([1, 5, 8, 13], [1, 4, 8, 64])])
def test_chunks_and_their_derivative_are_those_of_single_tokens(T, chunk, documents):
    make = torch.Generator().manual_seed(T)
    Q, K, V = (torch.randn(2, T, 3, width, generator=make, dtype=torch.float64) for width in (4, 4, 5))
    g, beta = torch.rand(2, 2, T, 3, generator=make, dtype=torch.float64) * torch.tensor([-2, 1]).view(2, 1, 1, 1)
    S = torch.randn(2, 3, 4, 5, generator=make, dtype=torch.float64)
    starts = torch.rand(2, T, generator=make) < (0.3 if documents else 0.0)
    given = [x.requires_grad_() for x in (Q, K / K.norm(dim=-1, keepdim=True), V, g, beta, S)]
    wanted = by_token(*given, starts)
    *found, kept = delta_rule(*given, starts if documents else None, chunk=chunk)
    torch.testing.assert_close(found, [*wanted], rtol=0, atol=1e-13)
    cotangents = [torch.randn(x.shape, generator=make, dtype=torch.float64) for x in wanted]
    gradients = torch.autograd.grad(wanted, given, cotangents)
    with torch.no_grad():
        got = delta_rule_backward(*cotangents, kept, *given[:5], starts if documents else None, chunk=chunk)
    torch.testing.assert_close(got, gradients, rtol=0, atol=1e-12)


def test_a_decay_to_nothing_is_no_overflow():
    """Between a later and an earlier token the decay would be exp(+1000)."""
    x, g = torch.ones(1, 4, 1, 2), torch.full((1, 4, 1), -1000.0)
    O, S, kept = delta_rule(x, x / 2**0.5, x, g, g / -1000, torch.ones(1, 1, 2, 2))
    grads = delta_rule_backward(O, S, kept, x, x / 2**0.5, x, g, g / -1000)
    assert all(torch.isfinite(each).all() for each in (O, S, *grads))
