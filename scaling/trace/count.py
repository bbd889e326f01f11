"""Count a step's typed lines and the operations between them while its own code runs (for `cost.counted`)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from scaling.common.torch_private import storage_of
from scaling.cost.counted import NONE, Calls, CountedStep, LineKind
from scaling.trace.events import Event, in_product

CURVED = ("gelu", "silu", "exp", "log", "erf", "tanh", "sigmoid", "softmax", "cos", "sin", "pow")  # in an op's name
FREE = ("_unsafe_view", "empty", "detach", "new_empty", "empty_like", "promote_types", "scalar_tensor")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"


class Between:
    """Count the operations that run outside the typed lines of a trace, by the kinds that a CountedStep has.

    `peak_memory` calls `saw` for each operation.
    """

    def __init__(self):
        self.calls: dict[str, Calls] = {}

    def saw(self, function: Any, args: Sequence, given: list[Tensor], made: list[Tensor]) -> None:
        """Count one operation, from its arguments, the tensors given to it and the tensors that it made."""
        what, mutable = _sort_of(function)
        if what in ("attention", "products") and in_product():
            return  # the event of the line has its FLOPs; torch's own derivative of a line has no event
        if what == "attention":
            self.add(what, attention_flops(function._schema.name, args))
        elif what == "products":
            self.add(what, 2 * made[0].numel() * given[-1].shape[-2])
            self.add("reads", sum(x.nbytes for x in (*given[-2:], made[0])))
        elif what:
            storages = {storage_of(x) for x in given}
            fresh = [x for x in made if storage_of(x) not in storages]
            if fresh or mutable:
                self.add(what, sum(x.nbytes for x in given) + sum(x.nbytes for x in fresh or made))

    def add(self, what: str, amount: float) -> None:
        """Add one call of this kind, and its amount: FLOPs of products and attention, else bytes."""
        self.calls[what] = self.calls.get(what, NONE).and_more(amount)


@lru_cache(maxsize=4096)
def _sort_of(function: Any) -> tuple[str, bool]:
    """Return an operation's kind, and whether it writes into its operands.

    The kind is one that a CountedStep has, or "" if the operation computes nothing.
    """
    name = function._schema.name.split("::")[1]
    if name.startswith(ATTENTION):
        what = "attention"
    elif name in PRODUCTS:
        what = "products"
    elif name in FREE:
        what = ""
    else:
        what = "curved" if name.strip("_").startswith(CURVED) else "plain"
    return what, function._schema.is_mutable


def attention_flops(name: str, args: Sequence) -> float:
    """Return a causal attention kernel's FLOPs: two products of T S / 2 scores per head forward, five backward."""
    Q, K = [x for x in args if isinstance(x, Tensor)][1 if "backward" in name else 0 :][:2]
    return (5 if "backward" in name else 2) * Q.numel() * K.shape[2]


def counted_step(events: Iterable[Event], between: Mapping[str, Calls]) -> CountedStep:
    """Return the count of a step from its typed lines and from what ran between them."""
    products, reads, attention = (between.get(what, NONE) for what in ("products", "reads", "attention"))
    lines: dict[LineKind, Calls] = {}
    for event in events:
        if event.op == "Einsum" and event.memory:
            products, reads = products.and_more(event.flops), reads.and_more(event.memory)
        elif event.op == "Einsum":  # a block of attention
            attention = attention.and_more(event.flops)
        elif event.op != "Slice":
            kind = LineKind(event.op, event.axes, str(event.dtype).removeprefix("torch."), event.async_op)
            lines[kind] = lines.get(kind, NONE).and_more(event.nbytes, event.wire_bytes)
    plain, curved = between.get("plain", NONE), between.get("curved", NONE)
    return CountedStep(products, reads, attention, plain, curved, lines)
