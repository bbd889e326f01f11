"""Autograd's tape: the numbers of torch.func.vjp."""

import torch

from scaling.models.pointwise import vjp


def test_as_torch_func_vjp():
    rng = torch.Generator().manual_seed(0)
    A, B, dy = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 4), (4, 5), (3, 5)))

    def f(A, B):
        return (A @ B).tanh() * B.sum(0)

    (ours, pull), (theirs, wanted, *_) = vjp(f, A, B), torch.func.vjp(f, A, B)
    assert torch.equal(ours, theirs)
    assert not ours.requires_grad
    assert not A.requires_grad
    assert all(map(torch.equal, pull(dy), wanted(dy)))


def test_trees_and_what_is_not_used():
    W, ids = {"used": torch.tensor([2.0, 3.0]), "unused": torch.ones(3)}, torch.tensor([1, 0])

    def f(W, ids):
        return {"y": W["used"][ids] ** 2}

    out, pull = vjp(f, W, ids)
    dW, dids = pull({"y": torch.tensor([10.0, 1.0])})
    assert out["y"].tolist() == [9.0, 4.0]
    assert dW["used"].tolist() == [4.0, 60.0]
    assert dW["unused"].tolist() == [0.0] * 3
    assert dids.tolist() == [0, 0]
