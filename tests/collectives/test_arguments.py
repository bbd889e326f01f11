"""Arguments that a call does not take: each is refused, on a real mesh and on an abstract one."""

import pytest
import torch
from call_lines import GATHER, PRODUCT, REDUCE, SCATTER

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

REAL, ABSTRACT = Mesh({"X": 1}), AbstractMesh({"X": 2})
REFUSED = {
    "a number that is another": (
        lambda: c.all_gather("A[2, I_X] -> A[2, I]", torch.ones(3, 1), REAL),
        "dim 2 of this shard",
    ),
    "its part": (
        lambda: c.all_gather("A[8_X] -> A[8]", torch.ones(8, device="meta"), ABSTRACT),
        "dim 8 of this shard has size 8, not 4",
    ),
    "in a permutation": (lambda: c.ppermute("A[2, I]", torch.ones(3, 1), REAL, "X", []), "has size 3, not 2"),
    "an axis that a permuted type alone has": (
        lambda: c.ppermute("A[I_Q] -> A[I]", torch.ones(3), REAL, "X", []),
        "unknown mesh axis Q",
    ),
    "in a message": (lambda: c.send("A[2]", torch.ones(3, device="meta"), ABSTRACT, "X", 1), "has size 3, not 2"),
    "in a shard of a whole": (lambda: c.shard("A[2, I]", torch.ones(3, 1), REAL), "has size 3, not 2"),
    "in a product": (
        lambda: c.einsum("A[2, J] * B[J, K] -> C[2, K]", torch.ones(3, 1), torch.ones(1, 1)),
        "dim 2 says its own size",
    ),
    "in a sum": (lambda: c.einsum("A[I, 4_X] -> C[I] {U_X}", torch.ones(3, 3)), "dim 4 says its own size"),
    "a number that does not divide": (
        lambda: c.shard("A[3_X]", torch.ones(3, device="meta"), ABSTRACT),
        "does not divide",
    ),
    "too many dims, no axes": (lambda: c.shard("A[I, J]", torch.ones(2, 2, 2), REAL), "its type has 2 dims"),
    "shapes alone on a real mesh": (
        lambda: c.all_gather(GATHER, torch.ones(2, 2, device="meta"), REAL),
        "the operand is on meta",
    ),
    "a product with shapes alone": (
        lambda: c.einsum(PRODUCT, torch.ones(2, 2, device="meta"), torch.ones(2, 2)),
        "meta device",
    ),
    "the other way": (lambda: c.einsum(PRODUCT, torch.ones(2, 2), torch.ones(2, 2, device="meta")), "meta device"),
    "an array of numpy": (lambda: c.all_reduce(REDUCE, torch.ones(2, 2).numpy(), REAL), "numpy.ndarray"),
    "a product of arrays": (lambda: c.einsum(PRODUCT, torch.ones(2, 2).numpy(), torch.ones(2, 2)), "torch.as_tensor"),
    "a list": (lambda: c.all_gather(GATHER, [[1.0]], REAL), "builtins.list"),
    "two dtypes": (
        lambda: c.einsum(PRODUCT, torch.ones(2, 2), torch.ones(2, 2).double()),
        "the operands, torch.float32 on cpu and torch.float64 on cpu, have one dtype",
    ),
    "a dtype that torch does not multiply": (
        lambda: c.einsum(PRODUCT, torch.ones(2, 2).bool(), torch.ones(2, 2).bool()),
        "of torch.bool it has none",
    ),
    "a dtype that torch does not add": (
        lambda: c.einsum("A[I, J] -> C[I]", torch.ones(2, 2).to(torch.float8_e4m3fn)),
        "of torch.float8_e4m3fn it has none",
    ),
    "added to nothing": (lambda: c.einsum(PRODUCT, torch.ones(2, 2), torch.ones(2, 2), add=True), "fix: give out="),
    "sparse": (lambda: c.all_gather(GATHER, torch.ones(2, 2).to_sparse(), REAL), "fix: give it as .to_dense()"),
    "a sparse product": (
        lambda: c.einsum("A[I, J] * B[K, J, I] -> C[I, J]", torch.ones(2, 2).to_sparse(), torch.ones(2, 2, 2)),
        "fix: give them as .to_dense()",
    ),
    "a sparse product of a batch, which torch gets wrong": (
        lambda: c.einsum("A[L, J] * B[J, K] -> C[J, K, L]", torch.ones(2, 5), torch.ones(5, 2).to_sparse()),
        "fix: give them as .to_dense()",
    ),
    "no operand": (lambda: c.einsum(PRODUCT, None, None), "the operands do not have the dims of their types"),
    "nor for a reshard": (lambda: c.reshard("A[I_X] -> A[I]", None, REAL), "builtins.NoneType"),
    "a derivative in a buffer": (
        lambda: c.einsum(PRODUCT, torch.ones(2, 2, requires_grad=True), torch.ones(2, 2), out=torch.ones(2, 2)),
        "fix: leave out= away",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, words = REFUSED[what]
    with pytest.raises(ShardingError) as error:
        call()
    assert words in str(error.value), str(error.value)


def test_a_part_of_a_number_divides_it():
    x = torch.ones(3, 2)
    assert torch.equal(c.einsum("A[I, 4_X] -> C[I] {U_X}", x), x.sum(1))
    y = c.all_gather("A[2, 8_X] -> A[2, 8]", torch.ones(2, 4, device="meta"), ABSTRACT)
    assert y.shape == (2, 8)


def test_options_are_given_by_name():
    x = torch.ones(2, 2)
    for call in (
        lambda: c.all_gather(GATHER, x, REAL, True),
        lambda: c.reduce_scatter(SCATTER, x, REAL, x),
        lambda: c.all_to_all("A[I_X, J] -> A[I, J_X]", x, REAL, True),
        lambda: c.broadcast(REDUCE, x, REAL, 0),
        lambda: c.gather("A[I_X, J] -> A[I, J] {U_X}", x, REAL, 0),
        lambda: c.ppermute("A[I]", x[0], REAL, "X", [], True),
        lambda: c.send("A[I]", x[0], REAL, "X", 1, True),
        lambda: c.einsum(PRODUCT, x, x, x),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()
