"""A step as a count of its typed lines and of what runs between them, from a run of its own code (`cost.counted`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch

from scaling._torch import TorchDispatchMode, storage_key
from scaling.cost.counted import NONE, Calls, CountedStep, LineKind
from scaling.trace.events import Event, trace

CURVED = ("gelu", "silu", "exp", "log", "erf", "tanh", "sigmoid", "softmax", "cos", "sin", "pow")  # in an op's name
FREE = ("empty", "detach", "new_empty", "empty_like", "promote_types", "scalar_tensor")  # nothing is computed
ATTENTION = "_scaled_dot_product"


class Between(TorchDispatchMode):
    """Counts the operations that run outside the lines of a trace: by kind, as a CountedStep names them."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.calls: dict[str, Calls] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if name.startswith(ATTENTION):
            self.add("attention", attention_flops(name, args))
        elif name not in FREE and not in_product(name):
            given, made = tensors((args, kwargs)), tensors(result)
            storages = {storage_key(x.untyped_storage()) for x in given}
            fresh = [x for x in made if storage_key(x.untyped_storage()) not in storages]
            if fresh or function._schema.is_mutable:
                nbytes = sum(x.nbytes for x in given) + sum(x.nbytes for x in fresh or made)
                self.add("curved" if name.strip("_").startswith(CURVED) else "plain", nbytes)
        return result

    def add(self, what: str, amount: float) -> None:
        self.calls[what] = self.calls.get(what, NONE).and_more(amount)


def in_product(name: str) -> bool:
    """Whether it is the matmul inside a line."""
    return name in ("mm", "addmm", "bmm", "baddbmm", "_unsafe_view")


def tensors(values: Any) -> list[torch.Tensor]:
    leaves: list = optree.tree_leaves(values)  # pyright: ignore[reportArgumentType]: a tree of anything
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def attention_flops(name: str, args: Sequence) -> float:
    """Of a causal kernel: two products of T S / 2 scores a head forward, five backward."""
    Q, K = [x for x in args if isinstance(x, torch.Tensor)][1 if "backward" in name else 0 :][:2]
    return (5 if "backward" in name else 2) * Q.numel() * K.shape[2]


def counted_step(events: Iterable[Event], between: Mapping[str, Calls]) -> CountedStep:
    """A step of these lines, and of what ran between them."""
    products, reads, attention, flops = NONE, NONE, between.get("attention", NONE), 0
    lines: dict[LineKind, Calls] = {}
    for event in events:
        flops += event.flops
        if event.op == "Einsum" and event.memory:
            products, reads = products.and_more(event.flops), reads.and_more(event.memory)
        elif event.op == "Einsum":  # a block of attention
            attention = attention.and_more(event.flops)
        elif event.op != "Slice":
            kind = LineKind(event.op, event.axes, str(event.dtype).removeprefix("torch."), event.async_op)
            lines[kind] = lines.get(kind, NONE).and_more(event.nbytes, event.wire_bytes)
    plain, curved = between.get("plain", NONE), between.get("curved", NONE)
    return CountedStep(products, reads, attention, plain, curved, lines, flops)


def count_call(f: Callable[[], Any]) -> CountedStep:
    """What f does, on an abstract mesh."""
    with trace() as log, Between() as between:
        f()
    return counted_step(log.events, between.calls)
