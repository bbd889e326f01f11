"""A call of `fuzz_ranks.py`, and what it is made of."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from misuse.draw import Draw
from misuse.hold import Wrong

from scaling import tree

PLAIN = ("shape", "dtype", "dim", "differentiated", "empty", "int")


class Act(NamedTuple):
    """`call(draw, mesh, twist, folder)` makes the call, by "" as most ranks do; Wrong for wrong numbers."""

    call: Callable
    twists: tuple[str, ...]
    axes: str = "X"
    messages: bool = False  # whether ranks wait for messages of one rank


def hold(found, wanted, what: str = "") -> None:
    for a, b in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9):
            raise Wrong(f"{what}: {a.flatten()[:4]}... where one device has {b.flatten()[:4]}...")


def normal(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64)


def spoilt(x: torch.Tensor, twist: str) -> torch.Tensor:
    return {
        "shape": lambda: torch.cat([x, x]),
        "dtype": lambda: x.float(),
        "dim": lambda: x[None],
        "differentiated": lambda: x.clone().requires_grad_(),
        "empty": lambda: x[:0],
        "int": lambda: x.long(),
    }.get(twist, lambda: x)()
