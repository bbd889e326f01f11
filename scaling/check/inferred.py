"""The types of an op's results, remembered: layers and steps call the same ops on the same types again."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import optree
from torch import Tensor

from scaling.algebra.law import Sizes
from scaling.algebra.ops import op_kind
from scaling.check.additive import NotTried, adds_up
from scaling.check.held import KEPT, HeldType, of_nothing
from scaling.check.law import NotInferred, RuleBroken
from scaling.check.ops import ArrayMeta, infer, own_part
from scaling.spec import ShardingError


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


@lru_cache(KEPT)
def called(func: Any, name: str, structure: Any, leaves: tuple) -> tuple[tuple, Any, "Exception | None"]:
    """Return (results, their structure, what is wrong) of an op that makes new arrays.

    `leaves` are its arguments: an ArrayMeta for each array, (class, value) for all else.
    """
    given: Any = optree.tree_unflatten(structure, [x.tensor() if isinstance(x, ArrayMeta) else x[1] for x in leaves])
    made, within = optree.tree_flatten(func(*given[0], **given[1]), none_is_leaf=True)
    tensors = [x for x in made if isinstance(x, Tensor)]
    found, error = inferred(func, name, structure, leaves, tensors)
    helds = iter(found)
    seen = [ArrayMeta(tuple(x.shape), x.stride(), x.dtype, next(helds)) if isinstance(x, Tensor) else x for x in made]
    return tuple(seen), within, error


def inferred(
    func: Any, name: str, structure: Any, leaves: tuple, results: Sequence[Tensor]
) -> tuple[list[HeldType], "Exception | None"]:
    """Return (the types of an op's results, what is wrong or not judged). Where something is, the types fit all."""
    shapes = tuple(tuple(x.shape) for x in results)
    return _inferred(func, name, structure, leaves, shapes, results[0].dtype if results else None)


@lru_cache(KEPT)
def _inferred(
    func: Any, name: str, structure: Any, leaves: tuple, shapes: tuple[Sizes, ...], dtype: Any
) -> tuple[list[HeldType], "Exception | None"]:
    given: Any = optree.tree_unflatten(structure, [x if isinstance(x, ArrayMeta) else x[1] for x in leaves])
    args, kwargs = given
    arrays = [x for x in leaves if isinstance(x, ArrayMeta) and x is not kwargs.get("out")]
    operands = [x.held for x in arrays]
    unknown = [of_nothing(shape, True) for shape in shapes]
    try:
        found = infer(name, args, kwargs, operands, [x.dtype for x in arrays], [*shapes], dtype)
    except RuleBroken as error:
        return unknown, error
    except ShardingError as error:
        return unknown, NotInferred(f"{name}: {str(error).splitlines()[0]}")
    except NotInferred as error:
        if any(x.unreduced for x in operands):
            unknown, error = _tried(func, name, structure, leaves, arrays, unknown, error)
        return unknown, NotInferred(f"{name}: {error}") if isinstance(error, NotInferred) else error
    if own := own_part(name, args, kwargs, operands):
        return found, NotInferred(own)
    shares = frozenset().union(*(x.shares for x in operands))
    if op_kind(name) == "divides" and isinstance(args[1], (int, float)):
        shares |= {int(args[1])}
    return [held._replace(shares=shares | held.shares) for held in found], None


def _tried(
    func: Any, name: str, structure: Any, leaves: tuple, arrays: list, unknown: list[HeldType], error: Exception
) -> tuple[list[HeldType], Exception]:
    """Return what `inferred` does for an op that no table has and that takes partial sums, by running it on numbers.

    Where it adds up, its results are partial sums, of dims that are not known; where it does not, a rule is broken.
    """

    def call(values: list[Tensor]) -> list[Tensor]:
        numbers = iter(values)
        given: Any = optree.tree_unflatten(
            structure, [next(numbers) if isinstance(x, ArrayMeta) else x[1] for x in leaves]
        )
        return tensors_in(func(*given[0], **given[1]))

    partial = [bool(x.held.unreduced) for x in arrays]
    first = partial.index(True)
    try:
        linear = adds_up(call, [x.tensor() for x in arrays], partial)
    except NotTried:
        return unknown, error
    if not linear or len({x.held.unreduced for x in arrays if x.held.unreduced}) > 1:
        return unknown, RuleBroken("nonlinear", f"{name} of {arrays[first].held}", first)
    return [held._replace(unreduced=arrays[first].held.unreduced, parts="sum") for held in unknown], error
