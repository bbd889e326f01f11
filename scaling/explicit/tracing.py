"""Trace a program on whole arrays into a list of operations, by running it on meta tensors.

Nothing is computed and no sharding is known yet. Each result of a torch function, operator or method on the arguments
becomes a node; `explicit.reshard` becomes a constraint.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling import tree
from scaling.algebra.ops import function_name
from scaling.explicit.arrays import reshard
from scaling.explicit.functions import Node, each_call, read_call
from scaling.explicit.planning import Graph
from scaling.spec import ShardingError


class Recording(TorchFunctionMode):
    """Adds a node for every function that makes a tensor from tensors."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.of, self.alive = graph, {}, []

    def add(self, x: Tensor, node: Node) -> Tensor:
        """Add a node for x, and return x."""
        self.of[id(x)] = len(self.graph.nodes)
        self.alive.append(x)
        self.graph.nodes.append(node)
        return x

    def number(self, x: Tensor) -> int:
        """Return the number of x's node."""
        if id(x) not in self.of:
            raise ShardingError(
                f"a tensor of shape {tuple(x.shape)} that the program makes or finds by itself\n"
                f"  rule: a program in auto mode knows arrays by its arguments\n  fix: give it as an argument"
            )
        return self.of[id(x)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is reshard:
            x, type = args
            return self.add(x.clone(), Node(tuple(x.shape), x.dtype, (self.number(x),), constraint=str(type)))
        if function_name(func).strip("_") in SHAPE_ONLY.split() or not any(
            _is_array(x) for x in tree.leaves((args, kwargs))
        ):
            return func(*args, **kwargs)

        def record(call: Node) -> Tensor:
            result = torch.empty(call.shape, dtype=call.dtype, device="meta")
            return self.add(result, replace(call, operands=tuple(map(self.number, call.operands))))

        return each_call(record, read_call(func, args, kwargs, _is_array))


SHAPE_ONLY = (
    "shape dtype device ndim layout requires_grad is_meta size dim numel len stride is_floating_point is_complex "
    "is_contiguous names grad_fn is_leaf element_size itemsize nbytes format repr"
)


def _is_array(x) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or x.dim() > 0)


def graph_of(fn: Callable, args: tuple) -> Graph:
    """Return the graph of fn on trees of arguments of these shapes and dtypes."""
    graph = Graph()
    recording = Recording(graph)

    def meta(x):
        made = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
        return recording.add(made, Node(tuple(x.shape), x.dtype))

    metas = tree.map(meta, args)
    with recording:
        result = fn(*metas)
    leaves, graph.structure = tree.leaves(result), tree.structure(result)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        what = f"the program returns {', '.join(type(x).__name__ for x in leaves) or 'nothing'}"
        raise ShardingError(f"{what}\n  rule: one in auto mode returns tensors\n  fix: return them, or a tree of them")
    graph.outputs = tuple(recording.number(x) for x in leaves)
    return graph
