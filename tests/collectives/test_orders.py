"""Blocks in an order that is not its own inverse, over two and three axes: which rank gets which block."""

import itertools

import pytest
import torch
from torch.func import vjp

from scaling import collectives as c

I, J = 16, 8
CASES = [({"X": 2, "Y": 4}, "YX"), ({"P": 2, "X": 2, "Y": 2}, "YPX"), ({"P": 2, "X": 2, "Y": 2}, "XYP")]
ROOTS = (0, 1, 6)


def part(rank: int) -> torch.Tensor:
    """[I, J]: what a rank contributes, unlike any other's."""
    return torch.arange(float(I * J)).view(I, J) * (rank + 1) + rank


def run(mesh, axes):
    """What the rank gets of each collective, and the cotangent of its operand; by name."""
    x, n = part(mesh.rank), mesh.size()
    rows, U = x[: I // n], "".join(sorted(axes))
    pairs = [(block, 3 * block % n) for block in range(1, n)]
    calls = {
        "all_gather": (rows, lambda x: c.all_gather(f"A[I_{axes}, J] -> A[I, J]", x, mesh)),
        "reduce_scatter": (x, lambda x: c.reduce_scatter(f"A[I, J] {{U_{U}}} -> A[I_{axes}, J]", x, mesh)),
        "max": (x, lambda x: c.reduce_scatter(f"A[I, J] {{U_{U}}} -> A[I_{axes}, J]", x, mesh, op="max")),
        "all_to_all": (rows, lambda x: c.all_to_all(f"A[I_{axes}, J] -> A[I, J_{axes}]", x, mesh)),
        "shard": (x, lambda x: c.shard(f"A[I, J] -> A[I_{axes}, J]", x, mesh)),
        "ppermute": (rows, lambda x: c.ppermute(f"A[I_{axes}, J]", x, mesh, axes, pairs)),
    }
    for root in ROOTS:
        calls[f"scatter {root}"] = (
            x,
            lambda x, root=root: c.scatter(f"A[I, J] {{U_{U}}} -> A[I_{axes}, J]", x, mesh, root=root),
        )
        calls[f"gather {root}"] = (
            rows,
            lambda x, root=root: c.gather(f"A[I_{axes}, J] -> A[I, J] {{U_{U}}}", x, mesh, root=root),
        )
    results = {}
    for name, (operand, call) in calls.items():
        y, pull = vjp(call, operand)
        assert torch.equal(y, call(operand)), name
        results[name] = y, pull(torch.ones_like(y) * (mesh.group(tuple(axes)).index + 1))[0]
    return results


def expected(parts: list[torch.Tensor], name: str, block: int) -> torch.Tensor:
    """What the rank that holds this block gets, of the parts in the order of the blocks."""
    n, root = len(parts), int(name.split()[1]) if " " in name else -1
    rows = [x[: I // n] for x in parts]
    if name == "ppermute":
        source = [s for s in range(1, n) if 3 * s % n == block]
        return rows[source[0]] if source else torch.zeros_like(rows[0])
    return {
        "all_gather": lambda: torch.cat(rows),
        "reduce_scatter": lambda: sum(parts).chunk(n)[block],
        "max": lambda: torch.stack(parts).amax(0).chunk(n)[block],
        "all_to_all": lambda: torch.cat([x.chunk(n, 1)[block] for x in rows]),
        "shard": lambda: parts[block].chunk(n)[block],
        "scatter": lambda: parts[root].chunk(n)[block],
        "gather": lambda: torch.cat(rows) if block == root else torch.zeros(I, J),
    }[name.split()[0]]()


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "axes"), CASES, ids=str)
def test_blocks_and_their_cotangents(ranks, sizes, axes):
    got = ranks(run, sizes, axes)
    coords = list(itertools.product(*(range(n) for n in sizes.values())))  # of each rank
    members = itertools.product(*(range(sizes[axis]) for axis in axes))  # of each block
    rank_of = [coords.index(tuple(dict(zip(axes, at, strict=True))[axis] for axis in sizes)) for at in members]
    assert rank_of != list(range(8))
    assert [rank_of.index(rank_of.index(rank)) for rank in range(8)] != list(range(8)), "its own inverse"
    for name in got[0]:
        parts = [part(rank) for rank in rank_of]
        ys = [expected([x.requires_grad_() for x in parts], name, block) for block in range(8)]
        terms = [(y * (block + 1)).sum() for block, y in enumerate(ys) if y.requires_grad]
        grads = torch.autograd.grad(sum(terms), parts, allow_unused=True, materialize_grads=True)
        for block, rank in enumerate(rank_of):
            y, dx = got[rank][name]
            assert torch.equal(y, ys[block]), f"{name}, block {block}"
            torch.testing.assert_close(dx, grads[block][: len(dx)], msg=lambda m, n=name: f"{n}: {m}")
