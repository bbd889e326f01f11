"""The forms of the calls that a compiler follows, run without one: their numbers and refusals are the eager ones."""

import itertools

import pytest
import torch

from scaling import collectives as c
from scaling.mesh import Mesh
from scaling.spec import ShardingError

LINES = {  # the shapes of the operands, and of the result
    "A[I, J] * B[J, K] -> C[I, K]": ((2, 3), (3, 4), (2, 4)),
    "A[I, J] * B[I, J] -> C[I, J]": ((2, 3), (2, 3), (2, 3)),
    "A[I, J] -> C[J]": ((2, 3), None, (3,)),
    "A[I, J] -> C[J, I]": ((2, 3), None, (3, 2)),
    "A[I, 3] -> C[I, 3]": ((2, 3), None, (2, 3)),
}
SHAPES = [(2, 3), (3, 4), (3, 2), (2, 4), (3,), ()]
OUTS = [(shape, dtype) for shape in SHAPES for dtype in (torch.float64, torch.float32)]


def outcome(call, *args, out=None, **options):
    """What a call gives, with what it leaves in `out`, or that it is refused."""
    out = None if out is None else torch.full(out[0], 5.0, dtype=out[1])
    try:
        result = call(*args, **options | ({} if out is None else {"out": out}))
    except ShardingError:
        return "refused"
    return result.tolist(), str(result.dtype), out is result


def both(monkeypatch, *args, **options):
    eager = outcome(*args, **options)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        return eager, outcome(*args, **options)


@pytest.mark.parametrize("line", LINES)
def test_products(line, monkeypatch):
    right_a, right_b, _ = LINES[line]
    refused = 0
    for a, b in itertools.product(SHAPES, [right_b] if right_b is None else SHAPES):
        operands = [torch.arange(1.0, torch.Size(x).numel() + 1).double().view(x) for x in (a, b) if x is not None]
        eager, in_graph = both(monkeypatch, c.einsum, line, *operands)
        assert in_graph == eager, (line, a, b)
        refused += eager == "refused"
        if (a, b) == (right_a, right_b):
            assert eager != "refused"
            for out, add in itertools.product(OUTS, (False, True)):
                eager, in_graph = both(monkeypatch, c.einsum, line, *operands, out=out, add=add)
                assert in_graph == eager, (line, out, add)
            assert both(monkeypatch, c.einsum, line, *operands, add=True) == ("refused", "refused")
    assert refused


@pytest.mark.parametrize("call", [c.all_gather, c.reduce_scatter, c.all_reduce, c.all_to_all])
def test_collectives(call, monkeypatch):
    line = {
        c.all_gather: "A[I_X, J] -> A[I, J]",
        c.reduce_scatter: "A[I, J] {U_X} -> A[I_X, J]",
        c.all_reduce: "A[I, J] {U_X} -> A[I, J]",
        c.all_to_all: "A[I_X, J] -> A[I, J_X]",
    }[call]
    mesh, seen = Mesh({"X": 1}), set()
    for shape, out in itertools.product(SHAPES, [None, *(OUTS if call in (c.all_gather, c.reduce_scatter) else ())]):
        x = torch.arange(1.0, torch.Size(shape).numel() + 1).double().view(shape)
        eager, in_graph = both(monkeypatch, call, line, x, mesh, out=out)
        assert in_graph == eager, (shape, out)
        seen.add(eager == "refused")
    assert seen == {True, False}
