"""The zig-zag order: there and back, and what it is refused for."""

import pytest
import torch

from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError
from scaling.strategies import context
from scaling.strategies.context.layout import _from_whole


def orders(mesh):
    x = torch.arange(6).view(1, 6) + 6 * mesh.rank
    z = context.to_zigzag(x, 1, mesh, "C")
    assert torch.equal(context.from_zigzag(z, -1, mesh, "C"), x)
    assert torch.equal(context.positions("zigzag", 6, mesh, "C"), z[0])
    return z[0].tolist()


@pytest.mark.parametrize("C", [1, 2, 3, 4])
def test_zigzag_order(ranks, C):
    chunks = torch.arange(6 * C).view(2 * C, 3).tolist()
    assert ranks(orders, {"C": C}) == [chunks[c] + chunks[2 * C - 1 - c] for c in range(C)]


@pytest.mark.parametrize("C", [1, 2, 3, 4])
def test_zigzag_order_of_what_a_compiled_graph_has_gathered(C):
    x = torch.arange(4 * C)
    chunks = x.view(2 * C, 2).tolist()
    zigzag = [_from_whole(x, 0, C, c, back=False) for c in range(C)]
    assert [each.tolist() for each in zigzag] == [chunks[c] + chunks[2 * C - 1 - c] for c in range(C)]
    assert torch.equal(torch.cat([_from_whole(torch.cat(zigzag), 0, C, c, back=True) for c in range(C)]), x)


def test_zigzag_order_is_of_two_chunks_a_rank():
    with pytest.raises(ShardingError, match="fix:"):
        context.to_zigzag(torch.empty(3, device="meta"), 0, AbstractMesh({"C": 2}))
