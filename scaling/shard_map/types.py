"""The types of values inside `shard_map`, tracked and checked: varying, invariant, unreduced, reduced.

A value varies over an axis if it is batched at the level of vmap that stands for the axis; so torch.func itself carries
the types through its transforms. `Checks` looks at every call of torch's: where operands differ in their types, those
that are invariant first become varying, as in JAX, so that their cotangents are summed.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling.algebra.ops import op_kind
from scaling.common.torch_private import is_wrapped, level_of, storage_of, unwrapped
from scaling.shard_map.calls import Bound, Call, Collective, apply_typed
from scaling.shard_map.partial import PLAIN, Marks, Mismatch, marked, marks, result_of
from scaling.spec import ShardingError, format_axes

ASKS = {"dim", "size", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__repr__", "requires_grad_"}


def varying(x: Tensor, bound: Bound) -> frozenset[str]:
    """The mesh axes over which x is stacked: those over which it varies, or is unreduced or reduced."""
    found = set()
    while is_wrapped(x):
        if (level := level_of(x)) in bound.levels:
            found.add(bound.levels[level])
        x = unwrapped(x)
    return frozenset(found)


def memory_of(x: Tensor) -> int:
    """What tells the memory apart that x, or what it wraps, lies in."""
    while is_wrapped(x):
        x = unwrapped(x)
    return storage_of(x)


def vary(x: Tensor, axes, bound: Bound) -> Tensor:
    """x, stacked over `axes` too: nothing is sent; its cotangent is summed over the axes that are new."""
    new = tuple(axis for axis in bound.mesh.sizes if axis in set(axes) - varying(x, bound))
    return marked(apply_typed(x, bound, Call("pvary", new)), marks(x)) if new else x


def described_type(x: Tensor, bound: Bound) -> str:
    """A value's type in words, for messages."""
    kinds = {**marks(x)._asdict(), "varying": varying(x, bound) - marks(x).axes}
    parts = [f"{kind} over {format_axes(bound.in_order(axes))}" for kind, axes in kinds.items() if axes]
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} " + (" and ".join(parts) or "invariant")


class Checks(TorchFunctionMode):
    """Every call of torch's inside the program: operands are brought to one type, or refused. `given`: the memory of
    the arguments, which is not written to."""

    def __init__(self, bound: Bound, given: frozenset[int] = frozenset()):
        super().__init__()
        self.bound, self.given = bound, given

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.autograd.grad or name == "_make_dual":
            return self.derivative(func, name, args, kwargs)
        if args and args[0] is Collective:
            return func(*args, **kwargs)
        operands: Any = (args, kwargs)
        tensors = [x for x in optree.tree_leaves(operands) if isinstance(x, Tensor)]
        found, after = [varying(x, self.bound) for x in tensors], PLAIN
        if name not in ASKS and any(map(marks, tensors)):
            try:
                kinds = [marks(x) for x in tensors]
                after = result_of(name, kinds, [each - own.axes for each, own in zip(found, kinds, strict=True)])
            except Mismatch as mismatch:
                self.refuse(name, tensors, *mismatch.args)
        axes = frozenset().union(*found)
        if axes and op_kind(name) == "values":
            self.refuse(
                name,
                tensors,
                "a value that differs by device decides nothing in Python: each device would go its own way",
                "torch.where, or an index as a tensor: x[i], x.index_select(0, i)",
            )
        changed = changed_by(name, args, kwargs)
        if changed is not None and (varying(changed, self.bound) != axes or after):
            self.refuse(
                name,
                tensors,
                "a value keeps its type: what is written to is not invariant afterwards",
                "x = x + y in place of x += y; torch.where or torch.cat in place of x[i] = y; or pvary(x, ...)",
            )
        if changed is not None and name not in ASKS and memory_of(changed) in self.given:
            rule = "arguments are not changed: this would write to the caller's own array"
            self.refuse(name, tensors, rule, "x = x + y in place of x += y; or write to x.clone()")
        if any(each != axes for each in found):
            vary_all = lambda x: vary(x, axes, self.bound) if isinstance(x, Tensor) else x  # noqa: E731
            args, kwargs = optree.tree_map(vary_all, operands)
        result = self.call(func, name, tensors, args, kwargs)
        mark = lambda x: marked(x, after) if isinstance(x, Tensor) else x  # noqa: E731
        return optree.tree_map(mark, result) if after else result

    def call(self, func, name: str, tensors: list[Tensor], args, kwargs):
        """func(*args, **kwargs); what no level of vmap can do is refused in our words."""
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
        """torch.autograd.grad and jvp's _make_dual: a tangent is of its value's type, a cotangent of the dual one."""
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

    def refuse(self, name: str, tensors: Sequence[Tensor], rule: str, fix: str) -> NoReturn:
        kinds = ", ".join(described_type(x, self.bound) for x in tensors)
        raise ShardingError(f"{name}({kinds}) inside shard_map\n  rule: {rule}\n  fix: {fix}")


def changed_by(name: str, args, kwargs) -> "Tensor | None":
    """The operand that a call of this name writes to."""
    if isinstance(out := kwargs.get("out"), Tensor):
        return out
    in_place = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    in_place |= name.endswith("_") and not name.endswith("__")
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None
