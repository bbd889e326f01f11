"""The types of values inside `shard_map`, tracked and checked: varying, invariant, unreduced, reduced.

A value varies over an axis if it is batched at the axis's level of vmap, so torch.func itself carries the types through
its transforms. `Checks` looks at every call of a torch function. If the types of operands differ, the invariant ones
first become varying, as in JAX, so that their cotangents are summed.

An *unreduced* value is the sum over the axis of the devices' values. A *reduced* one is equal on all devices, like an
invariant one, but its cotangent comes out unreduced and is summed only when the caller says so, by the law of the rest
of this project. Both are stacked over the axis like varying values, and a mark tells them apart. The mark is put on
every layer that torch.func has wrapped around the tensor, so that it survives the end of a transform.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling.algebra.law import Illegal, kept_over
from scaling.algebra.ops import Groups, kept_sums, op_kind
from scaling.common.torch_private import (
    is_wrapped,
    level_of,
    storage_of,
    unwrapped,
    unwrapped_by_all,
    without_functions,
)
from scaling.shard_map.calls import Bound, Call, Collective, apply_typed
from scaling.spec import ShardingError, format_axes

MARK = "_scaling_marks"
PARTS = {"__get__", "_unpack_dual"}  # x.T, x.real; the tangent of a dual tensor
ASKS = ("requires_grad_",)  # which changes no values


class Marks(NamedTuple):
    """The axes over which a value is unreduced, and those over which it is reduced."""

    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def axes(self) -> frozenset[str]:
        """The axes of both kinds."""
        return self.unreduced | self.reduced

    @property
    def dual(self) -> "Marks":
        """The marks of a cotangent."""
        return Marks(self.reduced, self.unreduced)

    def without(self, axes) -> "Marks":
        """Return the marks without these axes."""
        return Marks(self.unreduced - {*axes}, self.reduced - {*axes})


PLAIN = Marks()


def marks(x: Tensor) -> Marks:
    """Return the marks that `marked` has put on x, or on the tensor that it wraps."""
    while (found := getattr(x, MARK, None)) is None:
        if not is_wrapped(x):
            return PLAIN
        x = unwrapped(x)
    return found


def marked(x: Tensor, as_: Marks) -> Tensor:
    """Return a view of x with these marks instead of its present ones; x itself if nothing changes."""
    if marks(x) == as_:
        return x
    with without_functions():
        y = layer = x.view_as(x)
    setattr(layer, MARK, as_)
    while is_wrapped(layer):
        layer = unwrapped(layer)
        setattr(layer, MARK, as_)
    return y


def varying(x: Tensor, bound: Bound) -> frozenset[str]:
    """Return the mesh axes over which x varies, or is unreduced or reduced: it is stacked over them."""
    found = set()
    while is_wrapped(x):
        if (level := level_of(x)) in bound.levels:
            found.add(bound.levels[level])
        x = unwrapped(x)
    return frozenset(found)


def memory_of(x: Tensor) -> int:
    """Return an identifier of the memory of x, or of the tensor that it wraps."""
    return storage_of(unwrapped_by_all(x))


def vary(x: Tensor, axes, bound: Bound) -> Tensor:
    """Return x stacked over `axes` too. Nothing is sent; its cotangent is summed over the axes that are new."""
    new = tuple(axis for axis in bound.mesh.sizes if axis in set(axes) - varying(x, bound))
    return marked(apply_typed(x, bound, Call("pvary", new)), marks(x)) if new else x


def described_type(x: Tensor, bound: Bound) -> str:
    """Return a value's type in words, for messages."""
    kinds = {**marks(x)._asdict(), "varying": varying(x, bound) - marks(x).axes}
    parts = [f"{kind} over {format_axes(bound.in_order(axes))}" for kind, axes in kinds.items() if axes]
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} " + (" and ".join(parts) or "invariant")


def result_of(name: str, found: Sequence[Marks], varying: Sequence[frozenset[str]], sums: Groups) -> Marks:
    """Return the marks of a torch function's result, by the law of operations.

    Args:
        name: the function's name.
        found: the operands' marks; at least one is not plain.
        varying: the axes over which each operand varies otherwise.
        sums: the operands whose partial sums the function keeps, by the table of operations.

    Raises:
        Illegal: the function of these operands has no type.
    """
    varies = frozenset().union(*varying)  # if one operand varies, a reduced one varies too
    found = [each._replace(reduced=each.reduced - varies) for each in found]
    if name == "ones_like":  # the first cotangent of a loss
        return Marks(reduced=frozenset().union(*(each.axes for each in found)))
    if name in PARTS:
        return found[0]
    summed = frozenset().union(*(each.unreduced for each in found))
    same = frozenset().union(*(each.reduced for each in found)) - summed
    if any(each.reduced - summed != same for each in found):
        fix = f"pcast(x, {', '.join(sorted(same))!r}, to='reduced') of the operand that is invariant"
        raise Illegal("", "what is reduced over an axis meets what is reduced or varies over it", fix)
    used = {axis for axis in summed if any(axis not in each.axes for each in found)}
    over = [tuple(sorted(each.unreduced)) for each in found]
    if op_kind(name) == "fuses":  # the last two are multiplied, or for `linear` the first two
        order = (2, 0, 1) if name == "linear" else (0, 1, 2)
        first, *factors = [over[i] for i in order if i < len(over)]
        over = [first, kept_over("mul", ((0,), (1,)), factors, used) or ()] if factors else over
        sums = ((0, 1),)
    kept_over(name, sums, over, used)
    return Marks(summed, same)


class Checks(TorchFunctionMode):
    """Intercepts every torch function inside the program: operands are brought to one type, or refused.

    `given` is the memory of the arguments, which must not be written to.
    """

    def __init__(self, bound: Bound, given: frozenset[int] = frozenset()):
        super().__init__()
        self.bound, self.given = bound, given

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if isinstance(out := kwargs.get("out"), Tensor):  # vmap has no rules for functions with out=
            result = self.__torch_function__(func, types, args, {key: x for key, x in kwargs.items() if key != "out"})
            if result.shape != out.shape or result.dtype != out.dtype:
                rule = f"out has the result's shape and dtype, {list(result.shape)} and {result.dtype}"
                self.refuse(name, [out], rule, f"leave out= away, {name}(...)")
            return self.__torch_function__(Tensor.copy_, types, (out, result))
        if func is torch.autograd.grad or name == "_make_dual":
            return self.derivative(func, name, args, kwargs)
        if args and args[0] is Collective:
            return func(*args, **kwargs)
        operands: Any = (args, kwargs)
        tensors = [x for x in optree.tree_leaves(operands) if isinstance(x, Tensor)]
        found = [varying(x, self.bound) for x in tensors]
        axes = frozenset().union(*found)
        if axes and op_kind(name) == "values":
            self.refuse(
                name,
                tensors,
                "a value that differs by device decides nothing in Python: each device would go its own way",
                "torch.where, or an index as a tensor: x[i], x.index_select(0, i)",
            )
        if (changed := None if name in ASKS else changed_by(name, args)) is not None:
            self.check_write(changed, axes, self.marks_after(name, args, kwargs, tensors, changed.dtype), name, tensors)
        if any(each != axes for each in found):
            vary_all = lambda x: vary(x, axes, self.bound) if isinstance(x, Tensor) else x  # noqa: E731
            args, kwargs = optree.tree_map(vary_all, operands)
        result: Any = self.call(func, name, tensors, args, kwargs)
        made = next((x.dtype for x in optree.tree_leaves(result) if isinstance(x, Tensor)), None)
        if made is None or not any(map(marks, tensors)):
            return result
        after = self.marks_after(name, args, kwargs, tensors, made)
        return optree.tree_map(lambda x: marked(x, after) if isinstance(x, Tensor) else x, result)

    def marks_after(self, name: str, args, kwargs, tensors: Sequence[Tensor], made: torch.dtype) -> Marks:
        """Return the marks of a function's result of dtype `made`; refuse operands that give it no type."""
        kinds = [marks(x) for x in tensors]
        if not any(kinds) or name in ASKS:
            return kinds[0] if name in ASKS else PLAIN
        given = [x.dtype for x, own in zip(tensors, kinds, strict=True) if own.unreduced]
        varies = [varying(x, self.bound) - own.axes for x, own in zip(tensors, kinds, strict=True)]
        if name == "copy_":  # the old values are overwritten
            name, kinds = "clone", kinds[1:]
        try:
            return result_of(name, kinds, varies, kept_sums(name, args, kwargs, len(kinds), given, made))
        except Illegal as illegal:
            summed = ", ".join(sorted(frozenset().union(*(own.unreduced for own in kinds))))
            fix = f"psum or psum_scatter over {summed} first; what it meets is reduced, pcast(x, ..., to='reduced')"
            self.refuse(name, tensors, illegal.rule, fix if summed else illegal.fix, illegal.what)

    def check_write(self, changed: Tensor, axes, after: Marks, name: str, tensors: Sequence[Tensor]) -> None:
        """Refuse a write that would change a value's type, or the caller's own array."""
        if varying(changed, self.bound) != axes or marks(changed) != after:
            self.refuse(
                name,
                tensors,
                "a value keeps its type: what is written to would have another one afterwards",
                "x = x + y in place of x += y; torch.where or torch.cat in place of x[i] = y; or pvary(x, ...)",
            )
        if memory_of(changed) in self.given:
            rule = "arguments are not changed: this would write to the caller's own array"
            self.refuse(name, tensors, rule, "x = x + y in place of x += y; or write to x.clone()")

    def call(self, func, name: str, tensors: list[Tensor], args, kwargs):
        """Return func(*args, **kwargs); explain the errors of vmap in the words of this project."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "randomness" in str(error):
                rule = "random numbers drawn inside would not be those of another mesh"
                self.refuse(name, tensors, rule, "draw the whole array outside, and pass it as an argument")
            if "dynamic shape" in str(error):
                rule = "all devices' results have one shape: it does not depend on values"
                self.refuse(name, tensors, rule, "torch.where(mask, x, 0), and count with mask.sum()")
            raise

    def derivative(self, func, name: str, args, kwargs):
        """Check types and call torch.autograd.grad, or `_make_dual`, which torch.func.jvp calls.

        A tangent must have the type of its value. A cotangent must have the dual type: reduced for an unreduced value.
        """
        forward = name == "_make_dual"
        given = args[1] if forward else kwargs.get("grad_outputs", args[2] if len(args) > 2 else None)
        values, given = (optree.tree_leaves(each) for each in (args[0], given))
        for value, tangent in zip(values, given, strict=False):
            wanted = marks(value) if forward else marks(value).dual
            if varying(tangent, self.bound) != varying(value, self.bound) or marks(tangent) != wanted:
                rule = "a tangent is of its value's type; a cotangent too, but that what is unreduced has a reduced one"
                fix = "make the one that is invariant varying, pvary(x, ...), or reduced, pcast(x, ..., to='reduced')"
                self.refuse("jvp" if forward else "vjp", [value, tangent], rule, fix)
        result = func(*args, **kwargs)
        if forward:
            return marked(result, marks(args[0]))
        of_inputs = optree.tree_map(lambda x: marks(x).dual, args[1])
        is_marks = lambda x: x is None or isinstance(x, (Tensor, Marks))  # noqa: E731
        return optree.tree_map(lambda x, as_: x if x is None else marked(x, as_), result, of_inputs, is_leaf=is_marks)

    def refuse(self, name: str, tensors: Sequence[Tensor], rule: str, fix: str, what: str = "") -> NoReturn:
        """Raise the ShardingError of a function on operands of these types."""
        kinds = ", ".join(described_type(x, self.bound) for x in tensors)
        what = f"{name}({kinds}) inside shard_map" + (f": {what}" if what else "")
        raise ShardingError(f"{what}\n  rule: {rule}\n  fix: {fix}")


def changed_by(name: str, args) -> "Tensor | None":
    """Return the operand that a call of this name writes to, or None."""
    in_place = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    in_place |= name.endswith("_") and not name.endswith("__")
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None
