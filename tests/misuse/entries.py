"""A call of which one argument is spoiled, held against its reference.

What is not wrong gives the reference's numbers, and changes no argument; what is wrong raises a ValueError that names
the fix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from misuse.draw import Draw
from misuse.hold import Wrong

from scaling import tree


class Entry(NamedTuple):
    """`make` draws right arguments, `kinds` says how each may be spoiled."""

    make: Callable[[Draw], dict[str, Any]]
    call: Callable[..., Any]
    wanted: Callable[..., Any]
    kinds: dict[str, Callable]


def called(draw: Draw, name: str, entry: Entry) -> str:
    """One call; its outcome in words. Raises Wrong."""
    given = entry.make(draw)
    wanted = tree.leaves(entry.wanted(**given))
    how, wrong, spoiled = "as it should be", False, ""
    if draw.maybe(0.8):
        spoiled = draw.choice(list(entry.kinds))
        how, given[spoiled], wrong = entry.kinds[spoiled](draw, given[spoiled])
    what = f"{name}: {spoiled} {how}"
    kept = [x.detach().clone() for x in tree.leaves(given) if is_plain(x)]
    try:
        found = tree.leaves(entry.call(**given))
    except ValueError as error:
        if not wrong:
            raise Wrong(f"refused: {what}\n{error}") from error
        if "fix:" not in str(error) and "unknown mesh axis" not in str(error):
            raise Wrong(f"refused without a fix: {what}\n{error}") from error
        found = None
    except Exception as error:
        raise Wrong(f"an error that says nothing: {what}\n{type(error).__name__}: {error}") from error
    if found is not None and wrong:
        raise Wrong(f"accepted: {what}\n{found}")
    for ours, theirs in zip(found or (), wanted, strict=found is not None):
        if ours.shape != theirs.shape or not torch.allclose(
            ours.detach().double(), theirs.double(), rtol=1e-9, atol=1e-9
        ):
            raise Wrong(f"another number: {what}\n{ours}\n{theirs}")
    now = [x for x in tree.leaves(given) if is_plain(x)]
    if not all(map(torch.equal, kept, now)):
        raise Wrong(f"an argument was changed: {what}")
    return f"{name}: {'refused' if wrong else 'right'}"


def is_plain(x) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta
