"""A call of some room held against its reference: of all ranks, with an argument spoiled; or of one, in another way.

What is not wrong gives the reference's numbers, and changes no argument; what is wrong raises a ValueError that names
the fix.
"""

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
    is a function of the arguments. `kinds` says how each may be spoiled for all ranks (`corrupt`), `twists` how one
    alone may make another call: {what: other arguments, or a function (given, draw) of them}; "unheld" among them: what
    this rank then gets is its own. `messages`: whether ranks wait for messages of one rank."""

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


def normal(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64)


def compare(found, wanted, what: str) -> None:
    for ours, theirs in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        close = ours.shape == theirs.shape and torch.allclose(
            ours.detach().double(), theirs.double(), rtol=1e-9, atol=1e-9
        )
        if not close:
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
