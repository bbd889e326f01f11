"""What the typed calls refuse, before anything is sent, with the rule and the fix."""

import pytest
import torch
from refused import refused
from test_buffers import GATHER, PRODUCT, REDUCE

from scaling import collectives as c
from scaling.collectives import rings
from scaling.mesh import AbstractMesh, Mesh

ONE, ABSTRACT = Mesh({"X": 1, "Y": 1}), AbstractMesh({"X": 2})
X, MASK = torch.arange(24.0).view(2, 3, 4), torch.tensor([[True, False, True], [False, True, False]])
ROWS, MASKED, SUM = torch.arange(20.0).view(5, 4), "x[B, T, D] {U_Y}", "A[I] {U_X} -> A[I]"
RAGGED, TRANSFER = "Row[G_X, E, R, D] -> Row[G, E_X, R, D]", "A[I_X] -> A[I]"


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


test_operands = refused({
    "a number that is another": (lambda: c.all_gather("A[2, I_X] -> A[2, I]", ones(3, 1), ONE), "dim 2 of this shard"),
    "its part": (lambda: c.all_gather("A[8_X] -> A[8]", meta(8), ABSTRACT), "dim 8 of this shard has size 8, not 4"),
    "in a permutation": (lambda: c.ppermute("A[2, I]", ones(3, 1), ONE, "X", []), "has size 3, not 2"),
    "an axis that a permuted type alone has": (
        lambda: c.ppermute("A[I_Q] -> A[I]", ones(3), ONE, "X", []),
        "unknown mesh axis Q",
    ),
    "an axis that a sent type alone has": (lambda: c.send("A[I_Z]", meta(4), ABSTRACT, "X", 1), "unknown mesh axis Z"),
    "in a product": (
        lambda: c.einsum("A[2, J] * B[J, K] -> C[2, K]", ones(3, 1), ones(1, 1)),
        "dim 2 says its own size",
    ),
    "a number that does not divide": (lambda: c.shard("A[3_X]", meta(3), ABSTRACT), "does not divide"),
    "too many dims, no axes": (lambda: c.shard("A[I, J]", X, ONE), "its type has 2 dims"),
    "shapes alone on a real mesh": (lambda: c.all_gather(GATHER, meta(2, 2), ONE), "the operand is on meta"),
    "a product with shapes alone": (lambda: c.einsum(PRODUCT, ones(2, 2), meta(2, 2)), "meta device"),
    "an array of numpy": (lambda: c.all_reduce(REDUCE, ones(2, 2).numpy(), ONE), "numpy.ndarray"),
    "a product of arrays": (lambda: c.einsum(PRODUCT, ones(2, 2).numpy(), ones(2, 2)), "torch.as_tensor"),
    "a product of nothing": (lambda: c.einsum(PRODUCT, None, None), "do not have the dims of their types"),
    "two dtypes": (
        lambda: c.einsum(PRODUCT, ones(2, 2), ones(2, 2).double()),
        "the operands, torch.float32 on cpu and torch.float64 on cpu, have one dtype",
    ),
    "a dtype that torch does not multiply": (
        lambda: c.einsum(PRODUCT, ones(2, 2).bool(), ones(2, 2).bool()),
        "of torch.bool it has none",
    ),
    "a dtype that torch does not add": (
        lambda: c.einsum("A[I, J] -> C[I]", ones(2, 2).to(torch.float8_e4m3fn)),
        "of torch.float8_e4m3fn it has none",
    ),
    "added to nothing": (lambda: c.einsum(PRODUCT, ones(2, 2), ones(2, 2), add=True), "fix: give out="),
    "a derivative in a buffer": (
        lambda: c.einsum(PRODUCT, ones(2, 2).requires_grad_(), ones(2, 2), out=ones(2, 2)),
        "fix: leave out= away",
    ),
    "sparse": (lambda: c.all_gather(GATHER, ones(2, 2).to_sparse(), ONE), "fix: give it as .to_dense()"),
    "a sparse product of a batch, which torch gets wrong": (
        lambda: c.einsum("A[L, J] * B[J, K] -> C[J, K, L]", ones(2, 5), ones(5, 2).to_sparse()),
        "fix: give them as .to_dense()",
    ),
})  # fmt: skip

test_reductions = refused({
    "another word": (lambda: c.all_reduce(SUM, meta(4), ABSTRACT, op="avg"), "one of sum, mean, max, min"),
    "a mean of whole numbers": (
        lambda: c.all_reduce(SUM, meta(4, dtype=torch.int32), ABSTRACT, op="mean"),
        "a mean has fractions",
    ),
    "the greatest complex number": (
        lambda: c.all_reduce(SUM, ones(4, dtype=torch.complex64), ONE, op="max"),
        "the max of torch.complex64",
    ),
    "a sum of short integers": (
        lambda: c.all_reduce(SUM, meta(4, dtype=torch.int16), ABSTRACT),
        "the sum of torch.int16",
    ),
    "a broadcast of float8": (lambda: c.broadcast(SUM, ones(4).to(torch.float8_e4m3fn), ONE), "fix: convert it"),
})  # fmt: skip

test_masks = refused({
    what: lambda args=args: c.masked(*args, ONE)
    for what, args in {
        "none": (MASKED, X, None),
        "of the last dims": (MASKED, X, MASK[0]),
        "elsewhere": (MASKED, X, MASK.to("meta")),
        "of bools": ("m[B, T] {U_Y}", MASK, MASK),
        "of another number": ("x[9, T, D] {U_Y}", X, MASK),
        "sparse": (MASKED, X.to_sparse(), MASK),
        "a type that is no sum": ("x[B, T, D]", X, MASK),
        "a line": ("x[B, T, D] -> x[B, T, D] {U_X}", X, MASK),
        "an axis that is none": ("x[B, T, D] {U_Z}", X, MASK),
    }.items()
} | {
    what: (lambda mask=mask: c.masked(MASKED, X, mask, ONE), "a mask is bool, and has the operand's first dims")
    for what, mask in {"floats": MASK.float(), "of fewer rows": MASK[:1]}.items()
})  # fmt: skip

test_ragged_rows = refused({
    what: (lambda args=args: c.ragged_all_to_all(*args), words)
    for what, (words, *args) in {
        "it keeps other rows": ("", RAGGED, ROWS, [5], [3], ONE),
        "below 0": ("", RAGGED, ROWS, [5], [-5], ONE),
        "floats": ("", RAGGED, ROWS, [5.0], [5], ONE),
        "no counts": ("", RAGGED, ROWS, None, None, ONE),
        "rows of one dim": ("dims up to R are one", RAGGED, ROWS[:, 0], [5], [5], ONE),
        "too few counts": ("4 rows cannot be sent", RAGGED, meta(4, 3), (4,), (2, 2), ABSTRACT),
        "other rows": ("4 rows cannot be sent", RAGGED, meta(4, 3), (2, 1), (2, 2), ABSTRACT),
        "no AllToAll": ("rule: AllToAll takes", RAGGED.replace("E_X", "E"), meta(4, 3), (2, 2), (2, 2), ABSTRACT),
        "an axis that is none": ("unknown mesh axis Z", RAGGED.replace("X", "Z"), meta(4, 3), (2, 2), (2, 2), ABSTRACT),
    }.items()
})  # fmt: skip

SIZES = {"into": (-1,)}, {"into": 6}, {"into": (3, 2)}, {"below": (2.5,)}
test_whole_numbers = refused(
    {f"transfer {given}": lambda given=given: c.transfer(TRANSFER, X[0, 0], ONE, ONE, **given) for given in SIZES}
    | {
        f"ppermute by {perm}": lambda perm=perm: c.ppermute("A[I_X]", torch.arange(6.0), ONE, "X", perm)
        for perm in [[(0.9, 0)], [(0,)], 3]
    }
)

test_rings = refused({
    "three ways": (lambda: rings.all_gather(meta(4), ABSTRACT, "X", ways=3), "ways must be 1 or 2"),
    "a rest": (lambda: rings.reduce_scatter(meta(5), ABSTRACT, "X"), "does not divide into 2"),
    "too many chunks": (lambda: rings.all_to_all(meta(3, 2), ABSTRACT, "X"), "a chunk for each device"),
})  # fmt: skip

test_options_are_given_by_name = refused(  # those of others: test_drawn.py
    {
        call.__name__: lambda call=call, args=args: call(*args)
        for call, *args in (
            (c.ppermute, "A[I]", ROWS[0], ONE, "X", [], True),
            (c.send, "A[I]", ROWS[0], ONE, "X", 1, True),
        )
    },
    TypeError,
    "positional",
)


@pytest.mark.parametrize("size", [2, 4])
def test_a_number_may_be_split(size):
    x = ones(3, size)  # a part of 4 divides it
    assert torch.equal(c.einsum("A[I, 4_X] -> C[I] {U_X}", x), x.sum(1))
    assert c.all_gather("A[2, 8_X] -> A[2, 8]", meta(2, 4), ABSTRACT).shape == (2, 8)
