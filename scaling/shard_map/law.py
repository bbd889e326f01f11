"""JAX's collectives as data, and its law of transposes with check_vma=True (JAX 0.10; notation.md has it beside ours).

A value inside `shard_map` is *varying* over a mesh axis, if its devices may hold different values, or *invariant*, if
all hold the same. A cotangent has its value's type. So the sum that an invariant value's cotangent needs is not left to
the caller: it happens where the value becomes varying, in `pvary`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DUAL = {  # each kind, and the one that carries cotangents back
    "psum": "pvary",  # varying -> invariant
    "pvary": "psum",  # invariant -> varying: nothing is sent
    "all_gather": "psum_scatter",  # varying -> varying
    "psum_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "gather": "slice",  # varying -> invariant: how results leave
    "slice": "gather",  # invariant -> varying: how operands enter
}
LEAVES = ("psum", "pmax", "pmin", "gather")  # what comes out is invariant over the axes
ENTERS = ("pvary", "slice")  # what goes in is invariant over them


class Call(NamedTuple):
    """One collective over mesh axes, the first the major one.

    `dim`: the dim that grows or is split; `to`: the dim that an all_to_all splits; `pairs`: (source, target) of a
    ppermute; `lead`: the axes over which the operand is stacked, in dims in front of its own.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = 0
    to: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    lead: tuple[str, ...] = ()

    def batched(self) -> "Call":
        """The call on operands with one more dim in front of their own."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)

    def transposed(self) -> "Call":
        """What carries its cotangent back."""
        dim, to = (self.to, self.dim) if self.kind == "all_to_all" else (self.dim, self.to)
        pairs = tuple((target, source) for source, target in self.pairs)
        return Call(DUAL[self.kind], self.axes, dim, to, pairs)

    def lead_after(self, order) -> tuple[str, ...]:
        """The axes over which the result is stacked; `order`: the mesh's axes."""
        if self.kind in LEAVES:
            return tuple(axis for axis in self.lead if axis not in self.axes)
        return tuple(axis for axis in order if axis in self.lead or axis in self.axes)


def apply_typed(x: Tensor, bound, call: Call) -> Tensor:
    """The call on one device's x, differentiable by JAX's law. `bound`: what runs it, a `transport.Bound`."""
    return Collective.apply(x, bound, call, *bound.places)


def apply_stacked(x: Tensor, bound, call: Call) -> Tensor:
    """The same on what is stacked already, over `call.lead`."""
    return Collective.apply(x, bound, call, *(None for _ in bound.mesh.sizes))


class Collective(torch.autograd.Function):
    """A call as torch.func sees it. Each mesh axis is a level of vmap, at which only that axis's `places` is batched:
    there the call learns whether x varies over the axis, and stacks it. With all axes stacked, `bound` runs it."""

    @staticmethod
    def forward(x, bound, call, *places):
        return bound.run(x, call)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.bound, ctx.call, *places = inputs
        ctx.stacked = not places or places[0] is None

    @staticmethod
    def backward(ctx, cotangent):
        call, sizes = with_derivative(ctx.call).transposed(), ctx.bound.mesh.sizes
        if ctx.stacked:
            result = apply_stacked(cotangent, ctx.bound, call._replace(lead=ctx.call.lead_after(sizes)))
        else:
            result = apply_typed(cotangent, ctx.bound, call)
        return result, *(None,) * (2 + len(sizes))

    @staticmethod
    def jvp(ctx, tangent, *_):
        return (apply_stacked if ctx.stacked else apply_typed)(tangent, ctx.bound, with_derivative(ctx.call))

    @staticmethod
    def vmap(info, in_dims, x, bound, call, *places):
        """At one level of vmap: a mesh axis's, or another's, inside or around the program."""
        order = tuple(bound.mesh.sizes)
        level = next((i for i, dim in enumerate(in_dims[3:]) if dim is not None), None)
        if level is None:
            result = Collective.apply(x.movedim(in_dims[0], len(call.lead)), bound, call.batched(), *places)
            return result, len(call.lead_after(order)) if places[0] is None else 0
        axis, places = order[level], [None if i == level else place for i, place in enumerate(places)]
        if in_dims[0] is not None:
            x, call = x.movedim(in_dims[0], 0), call._replace(lead=(axis, *call.lead))
        elif axis in call.axes and call.kind not in ENTERS:
            x, call = x.expand(info.batch_size, *x.shape), call._replace(lead=(axis, *call.lead))
        result = Collective.apply(x, bound, call, *places)
        return result, 0 if axis in call.lead_after(order) else None


def with_derivative(call: Call) -> Call:
    """The call, but of pmax and pmin, which as in JAX have no derivative."""
    if call.kind not in DUAL:
        raise NotImplementedError(
            f"{call.kind} over {', '.join(call.axes)} is not differentiated\n"
            f"  rule: as in JAX, {call.kind} has no derivative\n"
            f"  fix: {call.kind}(x.detach(), ...), or all_gather and torch.amax, which has one"
        )
    return call
