"""JAX's collectives as data, their law of transposes with check_vma=True, and their execution (JAX 0.10; notation.md).

A value inside `shard_map` is *varying* over a mesh axis if its devices may hold different values, and *invariant* if
all devices hold equal ones. A cotangent has its value's type. So the sum that an invariant value's cotangent needs is
not left to the caller: it happens in `pvary`, the operation that makes the value varying.

Operands come with a dim in front for each axis of `call.lead`, in the mesh's order. It has the axis's size if one
process holds all shards stacked, and size 1 on the ranks of a mesh. Both take the axes of the call together, as one dim
of blocks in front: [blocks, ...].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scaling.algebra.layouts import unsplit_spec
from scaling.collectives.linear import run_op
from scaling.collectives.moves import combine_parts, join, split_dim
from scaling.collectives.op import Op, event
from scaling.trace import done, open_logs, record


class JaxKind(NamedTuple):
    """A kind of call.

    Attributes:
        dual: the kind that carries cotangents back, or "" if the call has no derivative.
        kind: the collective of this project that it corresponds to.
        before: the type of its operand there (see `op_of`).
        after: the type of its result there.
        enters: whether its operand is invariant over the axes; otherwise it varies.
        leaves: whether its result is invariant over the axes; otherwise it varies.
        by: the reduction.
    """

    dual: str
    kind: str
    before: str
    after: str
    enters: bool = False
    leaves: bool = False
    by: str = "sum"


KINDS_IN_JAX = {
    "psum": JaxKind("pvary", "AllReduce", "summed", "whole", leaves=True),
    "pvary": JaxKind("psum", "", "whole", "whole", enters=True),  # nothing is sent
    "pmax": JaxKind("", "AllReduce", "summed", "whole", leaves=True, by="max"),
    "pmin": JaxKind("", "AllReduce", "summed", "whole", leaves=True, by="min"),
    "all_gather": JaxKind("psum_scatter", "AllGather", "dim", "whole"),
    "psum_scatter": JaxKind("all_gather", "ReduceScatter", "summed", "dim"),
    "all_to_all": JaxKind("all_to_all", "AllToAll", "dim", "to"),
    "ppermute": JaxKind("ppermute", "CollectivePermute", "whole", "whole"),
    "gather": JaxKind("slice", "AllGather", "dim", "whole", leaves=True),  # by which results leave
    "slice": JaxKind("gather", "Slice", "whole", "dim", enters=True),  # by which operands enter
}


class Call(NamedTuple):
    """One collective over mesh axes, the first axis being the major one.

    Attributes:
        kind: its name among JAX's collectives, or "gather" or "slice".
        axes: the mesh axes.
        dim: the dim that grows or is split.
        to: the dim that an all_to_all splits.
        pairs: the (source, target) pairs of a ppermute.
        lead: the axes over which the operand is stacked, in leading dims.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = 0
    to: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    lead: tuple[str, ...] = ()

    @property
    def law(self) -> JaxKind:
        """The kind of the call."""
        return KINDS_IN_JAX[self.kind]

    def batched(self) -> "Call":
        """Return the call on operands with one more dim in front."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)

    def transposed(self) -> "Call":
        """Return the call that carries its cotangent back."""
        dim, to = (self.to, self.dim) if self.kind == "all_to_all" else (self.dim, self.to)
        pairs = tuple((target, source) for source, target in self.pairs)
        return Call(self.law.dual, self.axes, dim, to, pairs)

    def lead_after(self, order) -> tuple[str, ...]:
        """Return the axes over which the result is stacked; `order` is the mesh's axes."""
        if self.law.leaves:
            return tuple(axis for axis in self.lead if axis not in self.axes)
        return tuple(axis for axis in order if axis in self.lead or axis in self.axes)


def apply_typed(x: Tensor, bound: "Bound", call: Call) -> Tensor:
    """Run the call on one device's x, differentiable by JAX's law."""
    return Collective.apply(x, bound, call, *bound.places)


def apply_stacked(x: Tensor, bound: "Bound", call: Call) -> Tensor:
    """Run the call on an array that is stacked over `call.lead` already."""
    return Collective.apply(x, bound, call, *(None for _ in bound.mesh.sizes))


class Collective(torch.autograd.Function):
    """A call as torch.func sees it.

    Each mesh axis is a level of vmap, at which only that axis's `places` is batched. At this level the call learns
    whether x varies over the axis, and stacks it. With all axes stacked, `bound` runs it.
    """

    @staticmethod
    def forward(x, bound, call, *places):
        """Run the call."""
        return bound.run(x, call)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the call for the derivative."""
        _, ctx.bound, ctx.call, *places = inputs
        ctx.stacked = not places or places[0] is None

    @staticmethod
    def backward(ctx, cotangent):
        """Return the cotangent of x, by the transposed call."""
        call, sizes = with_derivative(ctx.call).transposed(), ctx.bound.mesh.sizes
        if ctx.stacked:
            result = apply_stacked(cotangent, ctx.bound, call._replace(lead=ctx.call.lead_after(sizes)))
        else:
            result = apply_typed(cotangent, ctx.bound, call)
        return result, *(None,) * (2 + len(sizes))

    @staticmethod
    def jvp(ctx, tangent, *_):
        """Return the tangent of the result: the call is linear."""
        return (apply_stacked if ctx.stacked else apply_typed)(tangent, ctx.bound, with_derivative(ctx.call))

    @staticmethod
    def vmap(info, in_dims, x, bound, call, *places):
        """Handle a level of vmap: a mesh axis's, or another one inside or around the program."""
        order = tuple(bound.mesh.sizes)
        level = next((i for i, dim in enumerate(in_dims[3:]) if dim is not None), None)
        if level is None:
            result = Collective.apply(x.movedim(in_dims[0], len(call.lead)), bound, call.batched(), *places)
            return result, len(call.lead_after(order)) if places[0] is None else 0
        axis, places = order[level], [None if i == level else place for i, place in enumerate(places)]
        if in_dims[0] is not None:
            x, call = x.movedim(in_dims[0], 0), call._replace(lead=(axis, *call.lead))
        elif axis in call.axes and not call.law.enters:
            x, call = x.expand(info.batch_size, *x.shape), call._replace(lead=(axis, *call.lead))
        result = Collective.apply(x, bound, call, *places)
        return result, 0 if axis in call.lead_after(order) else None


def with_derivative(call: Call) -> Call:
    """Return the call; refuse pmax and pmin, which have no derivative, as in JAX."""
    if not call.law.dual:
        raise NotImplementedError(
            f"{call.kind} over {', '.join(call.axes)} is not differentiated\n"
            f"  rule: as in JAX, {call.kind} has no derivative\n"
            f"  fix: {call.kind}(x.detach(), ...), or all_gather and torch.amax, which has one"
        )
    return call


class Bound:
    """A mesh during one call of `shard_map`.

    Attributes:
        mesh: the mesh.
        in_process: whether this process holds all shards.
        places: for each axis, this device's index as the program sees it, a 0-dim tensor that varies over that axis.
        levels: the mesh axis of each level of vmap.
    """

    def __init__(self, mesh, in_process: bool, places: tuple = (), levels: dict[int, str] | None = None):
        self.mesh, self.in_process, self.places, self.levels = mesh, in_process, places, levels or {}

    def in_order(self, axes) -> list[str]:
        """Return the axes in the mesh's order."""
        return [axis for axis in self.mesh.sizes if axis in axes]

    def width(self, axis: str) -> int:
        """Return the number of devices along an axis whose shards this process holds."""
        return self.mesh.sizes[axis] if self.in_process else 1

    def run(self, x: Tensor, call: Call) -> Tensor:
        """Run the call on stacked operands."""
        if call.kind == "pvary":
            call = call._replace(axes=tuple(axis for axis in call.axes if axis not in call.lead))
        kept = [axis for axis in call.lead if axis not in call.axes]
        widths = [self.width(axis) for axis in call.axes]
        if not call.law.enters:
            x = x.movedim([call.lead.index(axis) for axis in call.axes], list(range(len(widths))))
            x = x.flatten(0, len(widths) - 1) if widths else x[None]
        call = call._replace(dim=call.dim + len(kept), to=call.to + len(kept))
        y = (one_process if self.in_process else one_rank)(x, call, self.mesh)
        if call.law.leaves:
            return y
        y = y.unflatten(0, widths) if widths else y[0]
        stacked = (*call.axes, *kept)
        return y.movedim([stacked.index(a) for a in call.lead_after(self.mesh.sizes)], list(range(len(stacked))))


def one_rank(x: Tensor, call: Call, mesh) -> Tensor:
    """[1, ...] -> [1, ...], without the leading dim if the call enters or leaves the axes."""
    if call.kind == "pvary":
        return x[None].clone()
    x = x if call.law.enters else x[0]
    y = run_op(x, op_of(call, x.dim(), mesh))
    return y if call.law.leaves else y[None]


def one_process(x: Tensor, call: Call, mesh) -> Tensor:
    """[n, ...] -> [n, ...], the call on all shards at once, by operations that torch differentiates."""
    n, kind = mesh.size(call.axes), call.kind
    if open_logs and kind != "pvary":
        own = x if call.law.enters else x[0]
        done(record(event(op_of(call, own.dim(), mesh), own)))
    if call.law.kind == "AllReduce":
        return combine_parts(x, call.law.by)
    if kind == "pvary":
        return x.expand(n, *x.shape).clone()  # forward-mode AD wants separate memory for each element
    if kind == "slice":
        return split_dim(x, n, call.dim)
    if kind == "gather":
        return join(x, call.dim)
    if kind == "all_gather":
        whole = join(x, call.dim)
        return whole.expand(n, *whole.shape).clone()
    if kind == "psum_scatter":
        return split_dim(combine_parts(x, "sum"), n, call.dim)
    if kind == "all_to_all":
        parts = split_dim(x, n, call.to + 1)  # [to, from, ...]
        return join(parts.movedim(1, 0), call.dim + 1)
    source_of = {target: source for source, target in call.pairs}
    return torch.stack([x[source_of[i]] if i in source_of else torch.zeros_like(x[0]) for i in range(n)])


def op_of(call: Call, dims: int, mesh) -> Op:
    """Return the call as a collective of this project, on an operand with `dims` dims: "[D0_X, D1] -> [D0, D1]"."""
    whole = unsplit_spec("", [f"D{i}" for i in range(dims)])
    types = {
        "whole": lambda: whole,
        "summed": lambda: whole.with_unreduced(call.axes),
        "dim": lambda: whole.with_axes(f"D{call.dim}", call.axes),
        "to": lambda: whole.with_axes(f"D{call.to}", call.axes),
    }
    _, kind, before, after, *_, by = call.law
    line = f"{types[before]()} -> {types[after]()}"
    return Op.over(mesh.group(call.axes), kind, line, dim=call.dim, to=call.to, pairs=call.pairs, by=by)


def index_of(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the row-major index of places along axes of these sizes."""
    index = torch.zeros((), dtype=torch.int64)
    for place, size in zip(places, sizes, strict=True):
        index = index * size + place
    return index
