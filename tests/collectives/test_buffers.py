"""Preallocated outputs and donated operands: what does not fit is refused, and nothing else is written."""

import random
from collections import Counter

import pytest
import torch

from scaling import collectives as c
from scaling.collectives.buffers import overlap, overlaps_itself
from scaling.mesh import Mesh
from scaling.spec import ShardingError

GATHER, SCATTER, REDUCE = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I, J] {U_X} -> A[I, J]"
PRODUCT = "A[I, J] * B[J, K] -> C[I, K]"


def memory(dtype=torch.float32):
    """A stack [3, 4, 4] of which a test gives one layer away: the others must not change."""
    return torch.arange(48.0).view(3, 4, 4).to(dtype)


# name -> (the buffer within a stack, words of the error); the result is [4, 4]
MISFITS = {
    "rows": (lambda g: g[1, :3], "the result has shape (4, 4), out (3, 4)"),
    "float64": (lambda g: g[1].double(), "the result is torch.float32 on cpu, out torch.float64 on cpu"),
    "a row, expanded": (lambda g: g[1, :1].expand(4, 4), "elements share their memory"),
    "negated": (lambda g: torch.zeros(4, 4, dtype=torch.complex64).conj().imag, "conjugates or negates"),
    "shapes alone": (lambda g: g[1].to("meta"), "out torch.float32 on meta"),
    "an array": (lambda g: g[1].numpy(), "out is a ndarray"),
    "a function of a param": (lambda g: g[1].clone().requires_grad_() * 1, "out requires a gradient"),
}
WRITERS = {
    "all_gather, later": lambda m, out: c.all_gather(
        "A[I, J_X] -> A[I, J]", torch.ones(4, 4 // m.sizes["X"]), m, out=out, async_op=True
    ),
    "reduce_scatter": lambda m, out: c.reduce_scatter(SCATTER, torch.ones(4 * m.sizes["X"], 4), m, out=out),
    "einsum": lambda m, out: c.einsum(PRODUCT, torch.ones(4, 8), torch.ones(8, 4), out=out),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_buffer_that_does_not_fit_is_refused_and_nothing_is_written(writer, name):
    (fits, words), g = MISFITS[name], memory()
    with pytest.raises(ShardingError) as error:
        c.wait(WRITERS[writer](Mesh({"X": 1}), fits(g)))
    assert words in str(error.value)
    assert "\n  rule: " in str(error.value)
    assert torch.equal(g, memory())


def overlapping(mesh):
    x, n = torch.arange(64.0).view(8, 8), mesh.sizes["X"]
    kept = x.clone()
    for name, call in {
        "gather over part of it": lambda: c.all_gather(GATHER, x[1 : 1 + 4 // n], mesh, out=x[:4]),
        "scatter over its operand": lambda: c.reduce_scatter(SCATTER, x, mesh, out=x[: 8 // n]),
        "product into a": lambda: c.einsum(PRODUCT, x, x.clone(), out=x),
        "product into b turned": lambda: c.einsum(PRODUCT, x.clone(), x, out=x.t()),
        "sum into its operand": lambda: c.einsum("A[I, J] -> C[J]", x, out=x[3]),
    }.items():
        with pytest.raises(ShardingError) as error:
            call()
        assert "out shares memory with an operand" in str(error.value), name
        assert torch.equal(x, kept), name


@pytest.mark.parametrize("sizes", [{"X": 1}, {"X": 2}], ids=str)
def test_a_buffer_that_shares_memory_with_an_operand_is_refused(ranks, sizes):
    ranks(overlapping, sizes)


def in_place(mesh, order):
    """The operand of an AllGather may be its own block of the buffer: nothing is copied."""
    n, line = mesh.size(), f"A[I_{order}, J] -> A[I, J]"
    whole = torch.arange(4.0 * n).view(2 * n, 2)
    for layout in (lambda t: t, lambda t: t.t().contiguous().t()):
        buffer = layout(torch.full_like(whole, -1))
        mine = c.shard(f"A[I_{order}, J]", buffer, mesh)
        place = buffer.narrow(0, 2 * mesh.group(tuple(order)).index, 2)
        assert torch.equal(mine, place)
        place.copy_(c.shard(f"A[I_{order}, J]", whole, mesh))
        assert c.all_gather(line, place, mesh, out=buffer) is buffer
        assert torch.equal(buffer, whole)


@pytest.mark.parametrize(("sizes", "order"), [({"X": 1}, "X"), ({"X": 2}, "X"), ({"X": 2, "Y": 2}, "YX")])
def test_gathering_in_place(ranks, sizes, order):
    ranks(in_place, sizes, order)


def donated(mesh):
    n, x = mesh.size(), torch.arange(6.0).view(2, 3)
    for given in (x.t().contiguous().t(), torch.stack([x, x])[1], torch.complex(x, -x), torch.complex(x, -x).real):
        before = given.clone()
        assert c.all_reduce(REDUCE, given, mesh, donate=True) is given
        assert torch.equal(given, n * before)
    for name, given in {
        "expanded": x[:1].expand(2, 3),
        "conjugated": torch.complex(x, x).conj(),
        "negated": torch.complex(x, x).conj().imag,
        "a param": x.clone().requires_grad_(),
    }.items():
        before = given.clone()
        with pytest.raises(ShardingError, match="the donated operand"):
            c.all_reduce(REDUCE, given, mesh, donate=True)
        assert torch.equal(given, before), name
        assert torch.equal(c.all_reduce(REDUCE, given, mesh), n * before), name


@pytest.mark.parametrize("sizes", [{"X": 1}, {"X": 2}], ids=str)
def test_donating(ranks, sizes):
    ranks(donated, sizes)


def view(dice: random.Random, x: torch.Tensor) -> torch.Tensor:
    """What slices, transposes and expands make of a tensor."""
    for _ in range(dice.randrange(5)):
        if not x.dim():
            break
        how, dim = dice.choice(["part", "step", "row", "turn", "expand"]), dice.randrange(x.dim())
        start = dice.randrange(x.shape[dim] + 1)
        if how == "part":
            x = x.narrow(dim, start, dice.randrange(x.shape[dim] - start + 1))
        elif how == "step":
            x = x.movedim(dim, 0)[start :: dice.choice([2, 3])].movedim(0, dim)
        elif how == "row" and start < x.shape[dim]:
            x = x.select(dim, start)
        elif how == "turn":
            x = x.transpose(0, dim)
        elif how == "expand":
            x = x[None].expand(2, *x.shape) if x.dim() < 4 else x
    return x


def test_overlap_is_exact():
    """Against the places of all elements, one by one."""
    x, places, found = torch.zeros(6, 6), torch.arange(36.0).view(6, 6), Counter()
    for seed in range(400):
        (a, of_a), (b, of_b) = ([view(random.Random(2 * seed + i), t) for t in (x, places)] for i in (0, 1))
        assert overlap(a, b) == overlap(b, a) == bool({*of_a.flatten().tolist()} & {*of_b.flatten().tolist()})
        assert overlaps_itself(a) == (of_a.unique().numel() < of_a.numel())
        found[overlap(a, b), overlaps_itself(a)] += 1
    assert min(found.values()) > 20, found
    assert len(found) == 4


def test_overlap_of_what_has_other_memory_or_none_and_of_windows():
    x = torch.zeros(6, 6)
    assert not any(overlap(a, b) for a, b in [(x, x.clone()), (x.to("meta"), x.to("meta"))])
    assert overlaps_itself(x.view(-1).unfold(0, 3, 2))
    assert overlaps_itself(x.view(-1).as_strided((2, 2), (1, 1)))
