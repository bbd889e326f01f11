"""`jit`: a function of whole arrays and a few types, made into a program with collectives."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from scaling import tree
from scaling.algebra.layouts import layout, letters, unsplit_spec
from scaling.auto.lowering import Lowered, lower
from scaling.explicit.arrays import Array, array, array_spec, reshard
from scaling.explicit.planning import plan
from scaling.explicit.tracing import graph_of
from scaling.spec import ShardingError, Spec


class JittedProgram:
    """A function with its mesh and types. Called with tensors, which are whole, it returns whole ones; with `Array`s of
    the types given, `Array`s of the types asked for. It is differentiated as the function is (`explicit.grad`)."""

    def __init__(self, fn: Callable, mesh, in_types, out_types):
        self.fn, self.mesh, self.in_types, self.out_types = fn, mesh, in_types, out_types
        self._lowered: dict = {}

    def lower(self, *args) -> Lowered:
        """The program for arguments of these shapes: `.listing`, `.steps`, `.wire_bytes`. Meta tensors do."""
        flat, structure = tree.leaves(args), tree.structure(args)
        given: Any = args
        for x in optree.tree_leaves(given, none_is_leaf=True):
            if not isinstance(x, (Tensor, Array)):
                raise ShardingError(
                    f"an argument is a {type(x).__name__}\n  rule: a program in auto mode is of tensors\n"
                    "  fix: torch.as_tensor(x); or a number in the function itself"
                )
        key = tuple((tuple(x.shape), x.dtype) for x in flat), structure
        if key not in self._lowered:
            self._lowered[key] = self._lower(args, flat)
        return self._lowered[key]

    def _lower(self, args, flat) -> Lowered:
        if not hasattr(self.mesh, "sizes"):
            raise ShardingError(f"jit on {self.mesh!r:.40}, which is no mesh\n  fix: give a Mesh or an AbstractMesh")
        one_each = isinstance(self.in_types, (tuple, list)) and len(self.in_types) == len(args)
        types = tree.for_each(tuple(self.in_types) if one_each else (self.in_types,), args, "in_types", True)
        arguments, first = [], 8
        for number, (t, x) in enumerate(zip(types, flat, strict=True), 1):
            dims = letters(len(x.shape), first)
            arguments.append(self._spec(t, x, dims, f"x{number}") or unsplit_spec(f"x{number}", dims))
            first += len(dims)
        graph = graph_of(self.fn, args)
        asked = tree.for_each(self.out_types, optree.tree_unflatten(graph.structure, graph.outputs), "out_types", True)
        outputs = [self._spec(t, graph.nodes[n]) for t, n in zip(asked, graph.outputs, strict=True)]
        asked_of = [(i, self._spec(x.constraint, x)) for i, x in enumerate(graph.nodes) if x.constraint]
        constraints = {i: layout(spec) for i, spec in asked_of if spec}
        ends = [spec and layout(spec) for spec in outputs]
        chosen = plan(graph, list(map(layout, arguments)), ends, constraints, self.mesh)
        return lower(graph, arguments, outputs, chosen, self.mesh)

    def _spec(self, type: "str | Spec | None", x, dims: Sequence[str] = (), name: str = "") -> Spec | None:
        spec = None if type is None else array_spec(type, x.shape, self.mesh, x.dtype, dims)
        return spec and spec.with_name(spec.name or name)

    def __call__(self, *args):
        lowered, flat = self.lower(*args), tree.leaves(args)
        if any(isinstance(x, Array) and x.mesh is not self.mesh for x in flat):
            raise ShardingError(f"an array is on another mesh than the program\n  fix: make it on {self.mesh}")
        arrays = [
            reshard(x, at) if isinstance(x, Array) else array(x, at, self.mesh)
            for x, (_, at) in zip(flat, lowered.inputs, strict=True)
        ]
        result = lowered.run(arrays)
        return result if any(isinstance(x, Array) for x in flat) else tree.map(Array.whole, result)


def jit(fn: Callable, mesh, in_types, out_types=None) -> JittedProgram:
    """fn on whole arrays as a program with collectives, planned to send the least.

    `in_types`: a type for each argument, or a tree of them; None: every device has the whole. `out_types`: for the
    result, or a tree; None leaves it to the planner. Types are `In[B_X, D_Y]` or `[8_X, 2_Y]`. `fn` is
    pure: it is looked at once for each shapes of its arguments. Raises ShardingError where types do not fit, or where a
    function is not known.
    """
    return JittedProgram(fn, mesh, in_types, out_types)
