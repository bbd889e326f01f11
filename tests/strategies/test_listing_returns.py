"""A listing's functions return as many parts as SPECS names: an array alone would be taken apart into its rows."""

import pytest
import torch

from scaling.mesh import Mesh
from scaling.strategies.stack import Strategy

SPECS = {"In": "In[B, D]", "W": "W[D, D2]", "Out": "Out[B, D]"}
MESH, L, SIZE = Mesh({"X": 1}), 1, 2  # as many rows as parts


def forward(W, In, mesh, block):
    return In @ W, In


def backward(W, dOut, saved, mesh, block):
    return dOut @ W.T, saved.T @ dOut


def gather(W, mesh):
    return (W,)


def reduce(dW, mesh):
    return (dW,)


def run(**functions):
    listing = {"layer_forward": forward, "layer_backward": backward, "gather": gather, "reduce": reduce} | functions
    strategy, params, rows = Strategy(SPECS, **listing), {"W": torch.eye(SIZE)[None]}, torch.ones(SIZE, SIZE)
    Out, saved = strategy.forward(params, rows, MESH)
    return Out, *strategy.backward(rows, saved, params, MESH)


def test_the_right_one():
    Out, dIn, grads = run()
    assert torch.equal(Out, torch.ones(SIZE, SIZE))
    assert torch.equal(dIn, Out)
    assert grads["W"].shape == (L, SIZE, SIZE)


@pytest.mark.parametrize(("functions", "message"), [
    ({"layer_forward": lambda W, In, mesh, block: In @ W}, "forward returned a Tensor\n  fix: .* of 2: Out"),
    ({"layer_backward": lambda W, dOut, *rest: dOut}, "backward returned a Tensor\n  fix: .* of 2: dIn, dW"),
    ({"layer_backward": lambda W, dOut, *rest: (dOut,)}, "backward returned a tuple of 1\n"),
    ({"layer_backward": lambda W, dOut, *rest: (dOut, dOut[0])}, r"dW of shape \(2,\), not \(2, 2\)\n  fix: "),
    ({"gather": lambda W, mesh: W}, "gather returned a Tensor\n  fix: return a tuple of 1: W"),
    ({"reduce": lambda dW, mesh: dW}, "reduce returned a Tensor\n  fix: return a tuple of 1: W"),
    ({"reduce_slow": lambda dW, mesh: None}, "reduce_slow returned a NoneType\n"),
], ids=lambda case: " ".join(case) if isinstance(case, dict) else None)  # fmt: skip
def test_one_that_is_refused(functions, message):
    with pytest.raises(ValueError, match=message):
        run(**functions)


def test_saved_and_params_in_the_wrong_order():
    strategy, params, rows = Strategy(SPECS, forward, backward), {"W": torch.eye(SIZE)[None]}, torch.ones(SIZE, SIZE)
    _, saved = strategy.forward(params, rows, MESH)
    with pytest.raises(ValueError, match=r"saved is a dict, not what forward returned\n  fix: Out, saved = forward"):
        strategy.backward(rows, params, saved, MESH)
