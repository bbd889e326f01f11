"""Autograd's tape: the numbers of torch.func.vjp."""

import torch

from scaling.strategies.tape import taped


def test_as_torch_func_vjp():
    rng = torch.Generator().manual_seed(0)
    A, B, dy = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 4), (4, 5), (3, 5)))

    def f(A, B):
        return (A @ B).tanh() * B.sum(0)

    (ours, pull), (theirs, wanted, *_) = taped(f, A, B), torch.func.vjp(f, A, B)
    assert torch.equal(ours, theirs)
    assert not ours.requires_grad
    assert not A.requires_grad
    assert all(map(torch.equal, pull(dy), wanted(dy)))
