"""The types of values inside `shard_map`, tracked and checked: varying, invariant, unreduced.

A value varies over an axis if it is batched at the level of vmap that stands for the axis; so torch.func itself carries
the types through its transforms. `Checks` looks at every call of torch's: where operands differ in their types, those
that are invariant first become varying, as in JAX, so that their cotangents are summed.
"""

from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling.collectives.torch_private import is_wrapped, level_of, unwrapped, without_functions
from scaling.shard_map.law import Call, Collective, Extreme, apply
from scaling.shard_map.transport import Bound
from scaling.spec import ShardingError, format_axes

READS = {
    "item",
    "tolist",
    "numpy",
    "nonzero",
    "equal",
    "allclose",
    "is_nonzero",
    "unique",
    "masked_select",
    "__array__",
}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "bincount"}
ASKS = {"__get__", "dim", "size", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__repr__"}
MARK = "_unreduced_over"
ADDS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}


def varying(x: Tensor, bound: Bound) -> frozenset[str]:
    """The mesh axes over which x varies."""
    found = set()
    while is_wrapped(x):
        if (level := level_of(x)) in bound.levels:
            found.add(bound.levels[level])
        x = unwrapped(x)
    return frozenset(found)


def unreduced(x: Tensor) -> frozenset[str]:
    """The mesh axes over which x is a partial sum, as `pcast(x, axes, to="unreduced")` has declared."""
    return getattr(x, MARK, frozenset())


def as_unreduced(x: Tensor, axes: frozenset[str]) -> Tensor:
    """A view of x that is typed unreduced over the axes."""
    with without_functions():
        y = x.view_as(x)
    setattr(y, MARK, axes)
    return y


def vary(x: Tensor, axes, bound: Bound) -> Tensor:
    """x, varying over `axes` too: nothing is sent; its cotangent is summed over the axes that are new."""
    new = tuple(axis for axis in bound.mesh.sizes if axis in set(axes) - varying(x, bound))
    return apply(x, bound, Call("pvary", new)) if new else x


def described(x: Tensor, bound: Bound) -> str:
    """A value's type in words, for messages."""
    summed = unreduced(x)
    parts = [f"unreduced over {format_axes(sorted(summed))}"] if summed else []
    over = [axis for axis in bound.mesh.sizes if axis in varying(x, bound) - summed]
    parts += [f"varying over {format_axes(over)}"] if over else []
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} " + (" and ".join(parts) or "invariant")


class Checks(TorchFunctionMode):
    """Every call of torch's inside the program: operands are brought to one type, or refused."""

    def __init__(self, bound: Bound):
        super().__init__()
        self.bound = bound

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.autograd.grad or name == "_make_dual":
            self.derivatives(name, args, kwargs)
            return func(*args, **kwargs)
        if args and args[0] in (Collective, Extreme):
            return func(*args, **kwargs)
        operands: Any = (args, kwargs)
        tensors = [x for x in optree.tree_leaves(operands) if isinstance(x, Tensor)]
        summed = frozenset().union(*map(unreduced, tensors))
        if summed and name not in ASKS:
            return self.partial_sums(func, name, tensors, summed, args, kwargs)
        found = [varying(x, self.bound) for x in tensors]
        axes = frozenset().union(*found)
        if axes and name in READS:
            self.refuse(
                name,
                tensors,
                "a value that differs by device decides nothing in Python: each device would go its own way",
                "torch.where, or an index as a tensor: x[i], x.index_select(0, i)",
            )
        if all(each == axes for each in found):
            return self.call(func, name, tensors, args, kwargs)
        if (changed := changed_by(name, args, kwargs)) is not None and varying(changed, self.bound) != axes:
            self.refuse(
                name,
                tensors,
                "a value keeps its type: what is written to is not invariant afterwards",
                "x = x + y in place of x += y; torch.where or torch.cat in place of x[i] = y; or pvary(x, ...)",
            )
        args, kwargs = optree.tree_map(lambda x: vary(x, axes, self.bound) if isinstance(x, Tensor) else x, operands)
        return self.call(func, name, tensors, args, kwargs)

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

    def derivatives(self, name: str, args, kwargs) -> None:
        """A tangent or cotangent varies over the axes over which its value does."""
        given = args[1] if name == "_make_dual" else kwargs.get("grad_outputs", args[2] if len(args) > 2 else None)
        values, given = (optree.tree_leaves(each) for each in (args[0], given))
        for value, tangent in zip(values, given, strict=False):
            if varying(tangent, self.bound) != varying(value, self.bound):
                what = "jvp" if name == "_make_dual" else "vjp"
                rule = "a tangent or cotangent is of its value's type"
                self.refuse(what, [value, tangent], rule, "make the one that is invariant varying: pvary(x, ...)")

    def partial_sums(self, func, name: str, tensors: list[Tensor], summed, args, kwargs):
        if name not in ADDS or len(tensors) < 2 or any(unreduced(x) != summed for x in tensors):
            self.refuse(
                name,
                tensors,
                "partial sums are added to partial sums, and reduced; anything else wants the whole sum",
                f"psum or psum_scatter over {format_axes(sorted(summed))} first",
            )
        return as_unreduced(func(*args, **kwargs), summed)

    def refuse(self, name: str, tensors: list[Tensor], rule: str, fix: str) -> None:
        kinds = ", ".join(described(x, self.bound) for x in tensors)
        raise ShardingError(f"{name}({kinds}) inside shard_map\n  rule: {rule}\n  fix: {fix}")


def changed_by(name: str, args, kwargs) -> "Tensor | None":
    """The operand that a call of this name writes to."""
    if isinstance(out := kwargs.get("out"), Tensor):
        return out
    in_place = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    in_place |= name.endswith("_") and not name.endswith("__")
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None
