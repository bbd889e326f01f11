"""A call of some room held against its reference: of all ranks, with an argument spoiled; or of one, in another way.

What is not wrong gives the reference's numbers, and changes no argument; what is wrong raises a ValueError that names
the fix.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from misuse.draw import Draw
from misuse.hold import Wrong

from scaling import tree


class Entry(NamedTuple):
    """`make` draws right arguments, those of this rank on `draw.mesh`, and with them what is "wanted", unless `wanted`
    is a function of the arguments. `kinds` says how each may be spoiled for all ranks, `twists` how one alone may
    make another call: {what: other arguments, or a function (given, draw) of them}; "unheld" among them: what this rank
    then gets is its own. `messages`: whether ranks wait for messages of one rank."""

    make: Callable[[Draw], dict[str, Any]]
    call: Callable[..., Any]
    wanted: Callable[..., Any] | None = None
    kinds: Mapping[str, Callable] = MappingProxyType({})
    twists: Mapping[str, Any] = MappingProxyType({})
    messages: bool = False

    def drawn(self, draw: Draw) -> tuple[dict[str, Any], Any]:
        """(the arguments, what the call is to give)."""
        given = self.make(draw)
        return given, given.pop("wanted") if self.wanted is None else self.wanted(**given)


# Arguments spoiled for all ranks: (how, value, wrong). What is not wrong must give the same result: other memory, a
# leaf of autograd, int32 for int64


def picked(draw: Draw, wrong, right=()):
    if right and draw.maybe(0.3):
        return *draw.choice(right), False
    return *draw.choice(wrong), True


def gaps(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return "gaps", torch.stack([x, x], -1)[..., 0]


def leaf(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return "a leaf", x.clone().requires_grad_()


def no_dense(x: torch.Tensor) -> list:
    """What is given in place of any array."""
    wrong = [("a list", x.tolist()), ("one dim more", x[None]), ("complex", x.to(torch.complex128))]
    return [*wrong, ("elsewhere", x.to("meta")), ("sparse", x.to_sparse())]


def floats(draw: Draw, x: torch.Tensor):
    wrong = [*no_dense(x), ("none", None), ("ints", x.long()), ("bools", x > 0)]
    if x.dim() and x.shape[-1] > 1:
        wrong += [("broadcast", x[..., :1]), ("cut", x[..., :-1])]
    return picked(draw, wrong, [gaps(x), leaf(x), ("a copy", x.clone())])


def weights(draw: Draw, x: torch.Tensor):
    """Of each target; None, ints and bools may be weights, too."""
    return picked(draw, [*no_dense(x), ("broadcast", x[:, :1]), ("cut", x[:, :-1])], [gaps(x), leaf(x)])


def dense(draw: Draw, x: torch.Tensor):
    """A leaf of any sizes."""
    return picked(draw, [*no_dense(x), ("ints", x.long()), ("bools", x > 0)], [gaps(x), leaf(x)])


def masked(draw: Draw, x: torch.Tensor):
    """Of any size along its last dim, real or complex."""
    wrong = [(how, bad) for how, bad in no_dense(x) if how != "complex"]
    return picked(draw, [*wrong, ("none", None), ("bools", x > 0), ("fewer", x[:1])], [leaf(x)])


def ids(draw: Draw, x: torch.Tensor):
    wrong = [("none", None), ("a list", x.tolist()), ("one dim more", x[None]), ("floats", x.double())]
    wrong += [("bools", x > 0), ("bytes", x.to(torch.uint8)), ("below 0", x - 1000), ("beyond", x + 1000)]
    return picked(draw, wrong, [gaps(x), ("int32", x.int())])


def array(draw: Draw, x: torch.Tensor):
    """What a whole array is given as."""
    wrong = [("a text", "x"), ("one dim more", x[None]), ("does not divide", x[:-1]), ("sparse", x.to_sparse())]
    return picked(draw, wrong, [gaps(x), leaf(x), ("turned", x.T.contiguous().T)])


def one_of(values: Callable) -> Callable:
    """A kind whose values are all wrong."""
    return lambda draw, x: picked(draw, [(repr(bad), bad) for bad in values(x)])


whole = one_of(lambda n: (-1, True, n + 0.5, str(n), math.nan))
flag = one_of(lambda _: ("no", None, 1))
positive = one_of(lambda _: (-1.0, math.nan, math.inf, "1", True))
line = one_of(lambda line: (line.replace("_X", "_Q"), line.replace("[", "[Z, ")))  # with no such axis; with a dim more


def params(draw: Draw, given: dict, kind=floats):
    """A tree of tensors of floats: one leaf spoiled, or gone, or all under other names."""
    leaves = tree.leaves(given)
    at = draw.randrange(len(leaves))
    if draw.maybe(0.2):
        return "another name", {("z" + name): part for name, part in given.items()}, True
    if draw.maybe(0.1):
        return "no tree", draw.choice([None, 3, []]), True
    how, value, wrong = kind(draw, leaves[at])
    spoiled = iter([value if i == at else x for i, x in enumerate(leaves)])
    return f"leaf {at} {how}", tree.map(lambda _: next(spoiled), given), wrong


# One rank's other way


SPOILS = {
    "shape": lambda x: torch.cat([x, x]),
    "dtype": torch.Tensor.float,
    "dim": lambda x: x[None],
    "differentiated": lambda x: x.clone().requires_grad_(),
    "empty": lambda x: x[:0],
    "int": torch.Tensor.long,
}


def spoils(*names: str, only=tuple(SPOILS), **more) -> dict[str, Callable]:
    """Twists that make other tensors of these arguments."""

    def of(how: str):
        return lambda given, draw: {name: tree.map(SPOILS[how], given[name]) for name in names} | more

    return {how: of(how) for how in only}


def compare(found, wanted, what: str) -> None:
    for ours, theirs in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        a, b = ours.detach().double(), theirs.double()
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9):
            raise Wrong(f"another number: {what}\n{ours}\n{theirs}")


def twisted(draw: Draw, name: str, entry: Entry, twist: str) -> None:
    """The call of a rank that makes it in another way; as it should be, if `twist` is ""."""
    given, wanted = entry.drawn(draw)
    change = entry.twists[twist] if twist else {}
    given |= change(given, draw) if callable(change) else change
    unheld, found = given.pop("unheld", False), entry.call(**given)
    if found is not None and not unheld:
        compare(found, wanted, f"{name}: {twist}")


def called(draw: Draw, name: str, entry: Entry) -> str:
    """The call with one argument spoiled, or none; its outcome in words. Raises Wrong."""
    given, wanted = entry.drawn(draw)
    how, wrong, spoiled = "as it should be", False, ""
    if draw.maybe(0.8):
        spoiled = draw.choice(list(entry.kinds))
        how, given[spoiled], wrong = entry.kinds[spoiled](draw, given[spoiled])
    what = f"{name}: {spoiled} {how}"
    kept = [x.detach().clone() for x in tree.leaves(given) if is_plain(x)]
    try:
        found = entry.call(**given)
    except ValueError as error:
        if not wrong:
            raise Wrong(f"refused: {what}\n{error}") from error
        if "fix:" not in str(error) and "unknown mesh axis" not in str(error):
            raise Wrong(f"refused without a fix: {what}\n{error}") from error
    except Exception as error:
        raise Wrong(f"an error that says nothing: {what}\n{type(error).__name__}: {error}") from error
    else:
        if wrong:
            raise Wrong(f"accepted: {what}\n{found}")
        compare(found, wanted, what)
    if not all(map(torch.equal, kept, [x for x in tree.leaves(given) if is_plain(x)])):
        raise Wrong(f"an argument was changed: {what}")
    return f"{name}: {'refused' if wrong else 'right'}"


def is_plain(x) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta


def tried(case: Callable[[int], str], cases: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of `cases` calls of `case(number)`."""
    outcomes, failures = Counter(), []
    for number in range(cases):
        try:
            outcomes[case(number)] += 1
        except Wrong as error:
            failures.append(f"case {number}: {error}")
    return outcomes, failures
