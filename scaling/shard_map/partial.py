"""Two more types inside `shard_map`: unreduced over an axis, and reduced over it; each is the other's cotangent.

An *unreduced* value is the sum over the axis of what the devices hold. A *reduced* one is the same on all devices, as
what is invariant; but its cotangent comes out unreduced, and is summed where the caller says so: the law of the rest of
this project. Both are stacked over the axis, as what varies is, and a mark tells them apart. The mark is on all that
torch.func has wrapped around the tensor, so that it is still there where a transform ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from scaling.algebra.ops import names_of, op_kind
from scaling.common.torch_private import is_wrapped, unwrapped, without_functions

MARK = "_scaling_marks"
PARTS = {"__get__", "_unpack_dual"}  # x.T, x.real; the tangent of a dual tensor
KEEPS = names_of("linear", "permutes", "reshapes", "broadcasts", "takes", "joins", "parts") | {"sum", "flip"}
KEEPS -= {"to", "to_copy", "type"}  # which may round


class Marks(NamedTuple):
    """The axes over which a value is unreduced, and those over which it is reduced."""

    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def axes(self) -> frozenset[str]:
        return self.unreduced | self.reduced

    @property
    def dual(self) -> "Marks":
        """A cotangent's."""
        return Marks(self.reduced, self.unreduced)

    def without(self, axes) -> "Marks":
        return Marks(self.unreduced - {*axes}, self.reduced - {*axes})


PLAIN = Marks()


class Mismatch(Exception):
    """(the rule that is broken, the fix)."""


def marks(x: Tensor) -> Marks:
    """As `marked` has left them on x, or on what it wraps."""
    while (found := getattr(x, MARK, None)) is None:
        if not is_wrapped(x):
            return PLAIN
        x = unwrapped(x)
    return found


def marked(x: Tensor, as_: Marks) -> Tensor:
    """A view of x with these marks in place of its own; x itself where nothing changes."""
    if marks(x) == as_:
        return x
    with without_functions():
        y = layer = x.view_as(x)
    setattr(layer, MARK, as_)
    while is_wrapped(layer):
        layer = unwrapped(layer)
        setattr(layer, MARK, as_)
    return y


def result_of(name: str, found: Sequence[Marks], varying: Sequence[frozenset[str]]) -> Marks:
    """The marks of what a function of torch makes of operands with marks, at least one; `varying`: the axes over which
    each varies otherwise. Raises Mismatch."""
    varies = frozenset().union(*varying)  # where one varies, what is reduced varies too
    found = [each._replace(reduced=each.reduced - varies) for each in found]
    summed = frozenset().union(*(each.unreduced for each in found))
    if name == "ones_like":  # the cotangent that a loss begins with
        return Marks(reduced=frozenset().union(*(each.axes for each in found)))
    if name in PARTS:
        return found[0]
    alike = all(each == found[0] for each in found)
    if not summed and not alike:
        over = ", ".join(sorted(frozenset().union(*(each.reduced for each in found))))
        raise Mismatch(
            "what is reduced over an axis meets what is reduced or varies over it",
            f"pcast(x, {over!r}, to='reduced') of the operand that is invariant",
        )
    if not summed:
        return found[0]
    if alike and (name.strip("_") in KEEPS or (op_kind(name) == "adds" and len(found) == 2)):
        return found[0]
    if op_kind(name) == "multiplies" and len(found) == 2 and found[0] == found[1].dual:
        return Marks(unreduced=summed)
    raise Mismatch(
        "partial sums are added to partial sums, multiplied by what is reduced over the same axes, and summed; "
        "anything else wants the whole sum",
        f"psum or psum_scatter over {', '.join(sorted(summed))} first",
    )
