"""What the rules of `elements` and `rows` share: how dims meet, what is left of them, and what breaks a rule."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scaling.check.held import Dim, DimPart, HeldType, any_dim, axes_along, meeting_dim, name_along, size_along


class RuleBroken(Exception):
    """A rule is broken: its name, what is wrong, which operand, and the fix."""

    def __init__(self, rule: str, what: str, operand: int = 0, fix: str = "reduce_scatter or all_reduce it first"):
        super().__init__(what)
        self.rule, self.what, self.operand, self.fix, self.made = rule, what, operand, fix, ""


class NotInferred(Exception):
    """It is not judged: why."""


def of_nothing(shape: Sequence[int], zero: bool = False) -> HeldType:
    return HeldType(tuple(any_dim(n) for n in shape), None if zero else frozenset(), made="of nothing")


def fill_value(args, i) -> Any:
    value = args[i] if len(args) > i else 0
    return 0 if isinstance(value, Tensor) and value.dim() == 0 and value.is_meta else value


def summed_type(dims: tuple[Dim, ...], unreduced, parts: str = "") -> HeldType:
    return HeldType(dims, unreduced, parts if unreduced else "")


def refuse_sums(operands: Sequence[HeldType], rule: str, what: str) -> None:
    for i, x in enumerate(operands):
        if x.unreduced:
            raise RuleBroken(rule, what.format(x), i)


def split_apart(a: Dim, b: Dim) -> str:
    one, other = (", ".join(axes_along(d) or ()) or "no axis" for d in (a, b))
    return f"{name_along(a) or 'a dim'} is split over {one} and over {other}"


def met_dim(name: str, a: Dim, b: Dim, x: HeldType) -> Dim:
    if (found := meeting_dim(a, b)) is None:
        raise RuleBroken(
            "split", f"{name}: {split_apart(a, b)}", 0, "all_gather, reduce_scatter or shard one of them first"
        )
    return found


def meeting_dims(name: str, operands: Sequence[HeldType], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The dims of elements that meeting_dim."""
    dims = [any_dim(n) for n in shape]
    for x in operands:
        for i, dim in enumerate(reversed(x.dims), 1):
            if i <= len(shape) and (size_along(dim) != 1 or shape[-i] == 1):
                dims[-i] = met_dim(name, dims[-i], dim, x)
    return tuple(dims)


def dims_named(args, kwargs, x: HeldType) -> list[int]:
    given = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], Tensor) else None)
    if given is None or given == [] or isinstance(given, bool):
        return list(range(len(x.dims)))
    return [i % max(1, len(x.dims)) for i in ((given,) if isinstance(given, int) else given)]


def dims_left(x: HeldType, gone: list[int], shape: Sequence[int]) -> tuple[Dim, ...]:
    if len(shape) == len(x.dims):
        return tuple(any_dim(1) if i in gone else dim for i, dim in enumerate(x.dims))
    return tuple(dim for i, dim in enumerate(x.dims) if i not in gone)


def summed_over(x: HeldType, gone: list[int]) -> "frozenset[str] | None":
    if x.unreduced is None:
        return None
    if any(axes_along(x.dims[i]) is None and size_along(x.dims[i]) > 1 for i in gone):
        return None
    return x.unreduced | {axis for i in gone for axis in axes_along(x.dims[i]) or ()}


def parts_left(x: HeldType, gone: list[int], how: str) -> str:
    return x.parts or how if summed_over(x, gone) else ""


def partly_alike(x: HeldType, shape: Sequence[int]) -> HeldType:
    """An array of x's type but for the dims whose size is another."""
    if len(x.dims) != len(shape):
        return summed_type(tuple(map(any_dim, shape)), x.unreduced, x.parts)
    dims = tuple(
        d if size_along(d) == n else (DimPart(n, None, axes_along(d)),) for d, n in zip(x.dims, shape, strict=True)
    )
    return summed_type(dims, x.unreduced, x.parts)


def once_an_axis(name: str, found: HeldType, a: HeldType, b: HeldType) -> HeldType:
    """An axis occurs once in a type."""
    axes = [axis for dim in found.dims for axis in axes_along(dim) or ()]
    twice = {axis for axis in axes if axes.count(axis) > 1} | (set(axes) & set(found.unreduced or ()))
    if twice:
        raise RuleBroken(
            "split",
            f"{name} of {a} and {b}: {', '.join(sorted(twice))} would occur twice in the result",
            0,
            "all_gather one of them first",
        )
    return found
