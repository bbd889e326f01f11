"""Count a step's typed lines and the operations between them while its own code runs (for `cost.counted`)."""

from collections import Counter
from collections.abc import Iterable, Sequence
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


class Numbers:
    """Take the numbers of a trace unchanged."""

    def of(self, n: int, times: int = 1) -> Any:
        """Return n bytes or FLOPs, multiplied by `times`."""
        return n * times

    def attention(self, event: Event) -> Any:
        """Return the FLOPs of a block of attention."""
        return event.flops

    def sent(self, event: Event) -> Any:
        """Return the bytes that a rank sends in a collective."""
        return event.wire_bytes


NUMBERS = Numbers()


class Between:
    """Count the operations that run outside the typed lines of a trace, by the kinds that a CountedStep has.

    `peak_memory` calls `saw` for each operation. `terms` has the amounts of each kind, each with how often it came.
    """

    def __init__(self):
        self.number: Counter[str] = Counter()
        self.terms: dict[str, Counter[int]] = {}

    def saw(self, function: Any, args: Sequence, given: list[Tensor], made: list[Tensor]) -> None:
        """Count one operation, from its arguments, the tensors given to it and the tensors that it made."""
        what, mutable = _sort_of(function)
        if what in ("attention", "products") and in_product():
            return  # the event of the line has its FLOPs; torch's own derivative of a line has no event
        if what == "attention":
            self.add(what, attention_flops(function._schema.name, args))
        elif what == "products":
            self.add(what, 2 * made[0].numel() * given[-1].shape[-2])
            self.add("reads", *(x.nbytes for x in (*given[-2:], made[0])))
        elif what:
            storages = {storage_of(x) for x in given}
            fresh = [x for x in made if storage_of(x) not in storages]
            if fresh or mutable:
                self.add(what, *(x.nbytes for x in (*given, *(fresh or made))))

    def add(self, what: str, *terms: int) -> None:
        """Add one call of this kind, and the terms of its amount: FLOPs of products and attention, else bytes."""
        self.number[what] += 1
        self.terms.setdefault(what, Counter()).update(terms)

    def calls(self, what: str, numbers: Numbers) -> Calls:
        """Return the calls of a kind."""
        terms = self.terms.get(what, {})
        return Calls(self.number[what], sum(numbers.of(n, times) for n, times in terms.items()))


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


def attention_flops(name: str, args: Sequence) -> int:
    """Return a causal attention kernel's FLOPs: two products of T S / 2 scores per head forward, five backward."""
    Q, K = [x for x in args if isinstance(x, Tensor)][1 if "backward" in name else 0 :][:2]
    return (5 if "backward" in name else 2) * Q.numel() * K.shape[2]


def counted_step(events: Iterable[Event], between: Between, numbers: Numbers = NUMBERS) -> CountedStep:
    """Return the count of a step from its typed lines and from what ran between them, without its memory."""
    lines: dict[LineKind, Calls] = {}
    typed, attention = Between(), between.calls("attention", numbers)
    for event in events:
        if event.op == "Einsum" and event.memory:
            typed.add("scaled" if str(event.dtype).startswith("torch.float8") else "products", event.flops)
            typed.add("reads", *event.memory)
        elif event.op == "Einsum":  # a block of attention
            attention = attention.and_more(numbers.attention(event))
        elif event.op != "Slice":
            kind = LineKind(event.op, event.axes, str(event.dtype).removeprefix("torch."), event.async_op)
            lines[kind] = lines.get(kind, NONE).and_more(numbers.of(event.nbytes), numbers.sent(event))

    def both(what: str) -> Calls:
        more = typed.calls(what, numbers)
        return between.calls(what, numbers).and_more(more.amount, number=more.number)

    plain, curved = (between.calls(what, numbers) for what in ("plain", "curved"))
    scaled = typed.calls("scaled", numbers)
    return CountedStep(both("products"), scaled, both("reads"), attention, plain, curved, lines)
