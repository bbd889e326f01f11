"""Infer the types of an op's results, and cache them: layers and steps call equal ops on equal types again.

An op that no table has is tried with numbers, to find out whether it is additive: f(a) + f(b) = f(a + b).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.algebra.law import Illegal, Sizes
from scaling.algebra.ops import op_kind
from scaling.check.held import KEPT, HeldType, untyped
from scaling.check.results import ArrayMeta, NotInferred, own_part, result_types

LARGEST = 1 << 20  # elements in all operands of an op that is tried
TRIES = 3


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


@lru_cache(KEPT)
def called(func: Any, name: str, structure: Any, leaves: tuple) -> tuple[tuple, Any, "Exception | None"]:
    """Return (results, their structure, the error or None) of an op that makes new arrays.

    `leaves` are its arguments: an ArrayMeta for each array, (class, value) for every other one.
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
    """Return (the types of an op's results, the error or None); if there is an error, the types match everything."""
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
    unknown = [untyped(shape, True) for shape in shapes]

    def run(tensors: Sequence[Tensor]) -> Any:
        given, rest = iter(tensors), [*leaves]
        for i, x in enumerate(rest):
            rest[i] = next(given) if isinstance(x, ArrayMeta) else x[1]
        filled: Any = optree.tree_unflatten(structure, rest)
        return func(*filled[0], **filled[1])

    def probe(shape: Sizes, strides: Sizes) -> Any:
        first = torch.empty_strided(shape, strides, dtype=arrays[0].dtype, device="meta")
        return run([first, *(x.tensor() for x in arrays[1:])])

    try:
        found = result_types(name, args, kwargs, arrays, [*shapes], dtype, probe)
    except Illegal as error:
        types = " and ".join(map(str, operands))
        error.what = error.what if error.what.startswith(f"{name} of") else f"{name} of {types}: {error.what}"
        return unknown, error
    except NotInferred as error:
        if any(x.unreduced for x in operands):
            unknown, error = _tried(run, name, arrays, unknown, error)
        return unknown, NotInferred(f"{name}: {error}") if isinstance(error, NotInferred) else error
    if own := own_part(name, args, kwargs, operands):
        return found, NotInferred(own)
    shares = frozenset().union(*(x.shares for x in operands))
    if op_kind(name) == "divides" and isinstance(args[1], (int, float)) and args[1] > 1:
        shares |= {int(args[1])}
    return [held._replace(shares=shares | held.shares) for held in found], None


def _tried(
    run: Callable, name: str, arrays: list, unknown: list[HeldType], error: Exception
) -> tuple[list[HeldType], Exception]:
    """Infer an op that no table has and that takes partial sums, by running it on numbers; return as `inferred` does.

    If it is additive, its results are partial sums, of dims that are not known; if it is not, a rule is broken.
    """
    partial = [bool(x.held.unreduced) for x in arrays]
    first = partial.index(True)
    try:
        linear = adds_up(lambda values: tensors_in(run(values)), [x.tensor() for x in arrays], partial)
    except NotTried:
        return unknown, error
    if not linear or len({x.held.unreduced for x in arrays if x.held.unreduced}) > 1:
        what, rule = f"{name} of {arrays[first].held}", f"{name} of a sum is not the sum of {name}"
        return unknown, Illegal(what, rule, "all_reduce or reduce_scatter it first", "nonlinear", first)
    return [held._replace(unreduced=arrays[first].held.unreduced, parts="sum") for held in unknown], error


def adds_up(call: Callable[[list[Tensor]], list[Tensor]], operands: Sequence[Tensor], partial: Sequence[bool]) -> bool:
    """Return whether `call` is linear in the operands that are `partial`, taken together.

    Args:
        call: runs the op on tensors in place of the operands, and returns its results.
        operands: tensors without numbers, which have the shapes and dtypes.
        partial: which operands are partial sums.

    Raises:
        NotTried: the operands are too large, or the op does not take drawn numbers.
    """
    if sum(prod(x.shape) for x in operands) > LARGEST:
        raise NotTried
    generator = torch.Generator().manual_seed(0)
    try:
        for _ in range(TRIES):
            fixed = [_drawn(x, generator) for x in operands]
            a, b = ([_drawn(x, generator) if own else y for x, y, own in zip(operands, fixed, partial, strict=True)]
                    for _ in range(2))  # fmt: skip
            both = [x + y if own else x for x, y, own in zip(a, b, partial, strict=True)]
            for x, y, z in zip(call(a), call(b), call(both), strict=True):
                if x.dtype is torch.bool or not torch.allclose(x + y, z):
                    return False
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        raise NotTried from None
    return True


class NotTried(Exception):
    """The op was not run."""


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers of both signs and of many magnitudes; for integer dtypes small ones, which may be indices."""
    if not x.dtype.is_floating_point:
        return torch.randint(0, 4, x.shape, generator=generator).to(x.dtype)
    normal, scale = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return normal * 10 ** (2 * scale)
