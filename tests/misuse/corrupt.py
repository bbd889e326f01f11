"""Arguments of each kind spoiled at random: what a user may give in their place, and whether that is wrong.

A corruption is (how, value, wrong). What is not wrong must give the same result: other memory, a leaf of autograd,
int32 for int64.
"""

import math

import torch
from misuse.draw import Draw

from scaling import tree


def gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def floats(draw: Draw, x: torch.Tensor):
    wrong = [("none", None), ("a list", x.tolist()), ("one dim more", x[None]), ("ints", x.long()), ("bools", x > 0)]
    wrong += [("complex", x.to(torch.complex128)), ("elsewhere", x.to("meta")), ("sparse", x.to_sparse())]
    if x.dim() and x.shape[-1] > 1:
        wrong += [("broadcast", x[..., :1]), ("cut", x[..., :-1])]
    right = [("gaps", gaps(x)), ("a leaf", leaf(x)), ("a copy", x.clone())]
    return picked(draw, wrong, right)


def weights(draw: Draw, x: torch.Tensor):
    """Of each target; None, ints and bools may be weights, too."""
    wrong = [("a list", x.tolist()), ("one dim more", x[None]), ("complex", x.to(torch.complex128))]
    wrong += [("elsewhere", x.to("meta")), ("sparse", x.to_sparse()), ("broadcast", x[:, :1]), ("cut", x[:, :-1])]
    return picked(draw, wrong, [("gaps", gaps(x)), ("a leaf", leaf(x))])


def dense(draw: Draw, x: torch.Tensor):
    """A leaf of any sizes."""
    wrong = [("a list", x.tolist()), ("one dim more", x[None]), ("ints", x.long()), ("bools", x > 0)]
    wrong += [("complex", x.to(torch.complex128)), ("elsewhere", x.to("meta")), ("sparse", x.to_sparse())]
    return picked(draw, wrong, [("gaps", gaps(x)), ("a leaf", leaf(x))])


def masked(draw: Draw, x: torch.Tensor):
    """Of any size along its last dim."""
    wrong = [("none", None), ("a list", x.tolist()), ("one dim more", x[None]), ("bools", x > 0), ("fewer", x[:1])]
    return picked(draw, [*wrong, ("sparse", x.to_sparse()), ("elsewhere", x.to("meta"))], [("a leaf", leaf(x))])


def ids(draw: Draw, x: torch.Tensor):
    wrong = [("none", None), ("a list", x.tolist()), ("one dim more", x[None]), ("floats", x.double())]
    wrong += [("bools", x > 0), ("bytes", x.to(torch.uint8)), ("below 0", x - 1000), ("beyond", x + 1000)]
    return picked(draw, wrong, [("gaps", gaps(x)), ("int32", x.int())])


def array(draw: Draw, x: torch.Tensor):
    """What a whole array is given as."""
    wrong = [("a text", "x"), ("one dim more", x[None]), ("does not divide", x[:-1]), ("sparse", x.to_sparse())]
    return picked(draw, wrong, [("gaps", gaps(x)), ("a leaf", leaf(x)), ("turned", x.T.contiguous().T)])


def whole(draw: Draw, n: int):
    return picked(draw, [(repr(bad), bad) for bad in (-1, True, n + 0.5, str(n), math.nan)], [])


def flag(draw: Draw, value: bool):
    return picked(draw, [(repr(bad), bad) for bad in ("no", None, 1)], [])


def positive(draw: Draw, value: float):
    return picked(draw, [(repr(bad), bad) for bad in (-1.0, math.nan, math.inf, "1", True)], [])


def text(draw: Draw, line: str):
    """A type or a line over the axis X."""
    return picked(draw, [("no such axis", line.replace("_X", "_Q")), ("one dim more", line.replace("[", "[Z, "))], [])


def params(draw: Draw, given: dict, kind=floats):
    """A tree of tensors of floats: one leaf spoiled, or gone, or all under other names."""
    named, at = tree.leaves(given), draw.randrange(len(tree.leaves(given)))
    if draw.maybe(0.2):
        return "another name", {("z" + name): part for name, part in given.items()}, True
    if draw.maybe(0.1):
        return "no tree", draw.choice([None, 3, []]), True
    how, value, wrong = kind(draw, named[at])
    spoiled = [value if i == at else x for i, x in enumerate(named)]
    leaves = iter(spoiled)
    return f"leaf {at} {how}", tree.map(lambda _: next(leaves), given), wrong


def picked(draw: Draw, wrong, right):
    if right and draw.maybe(0.3):
        return *draw.choice(right), False
    return *draw.choice(wrong), True
