"""The time of a training step on a chip, from a run of its own code on an abstract mesh.

What runs is counted (`count`): products, the operations between them, collectives. Each is then priced as a chip file
says that this machine does it (`price`): a call and FLOPs or bytes. Where a chip has no such measurements: at its peak
FLOPs/s, at its memory's bytes/s, and by its network. Seconds, of one chip.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch

from scaling import cost
from scaling._torch import TorchDispatchMode, storage_key
from scaling.hardware import Chip, Measured
from scaling.mesh import AbstractMesh
from scaling.trace import Log, trace

CURVED = ("gelu", "silu", "exp", "log", "erf", "tanh", "sigmoid", "softmax", "cos", "sin", "pow")  # in an op's name
FREE = ("empty", "detach", "new_empty", "empty_like", "promote_types", "scalar_tensor")  # nothing is computed
ATTENTION = "_scaled_dot_product"


@dataclass
class CallTotals:
    """So many calls, and what they do in all: FLOPs or bytes."""

    number: int = 0
    amount: float = 0.0

    def add(self, amount: float) -> None:
        self.number, self.amount = self.number + 1, self.amount + amount


@dataclass
class CountedStep:
    """What a step does on one device. `products` and `attention`: FLOPs; `reads`: bytes of the products' operands and
    results; `plain` and `curved`: bytes that pointwise and other operations read and write, `curved` those with a
    transcendental function; `log`: its lines, the collectives among them."""

    products: CallTotals = field(default_factory=CallTotals)
    reads: CallTotals = field(default_factory=CallTotals)
    attention: CallTotals = field(default_factory=CallTotals)
    plain: CallTotals = field(default_factory=CallTotals)
    curved: CallTotals = field(default_factory=CallTotals)
    log: Log = field(default_factory=Log)


class _Count(TorchDispatchMode):
    """Counts the operations that run outside the lines of a trace, which counts those."""

    only_looks = True

    def __init__(self, counted: CountedStep):
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if name.startswith(ATTENTION):
            self.counted.attention.add(attention_flops(name, args))
        elif name not in FREE and not in_product(name):
            given, made = tensors((args, kwargs)), tensors(result)
            storages = {storage_key(x.untyped_storage()) for x in given}
            fresh = [x for x in made if storage_key(x.untyped_storage()) not in storages]
            if fresh or function._schema.is_mutable:
                nbytes = sum(x.nbytes for x in given) + sum(x.nbytes for x in fresh or made)
                where = self.counted.curved if name.strip("_").startswith(CURVED) else self.counted.plain
                where.add(nbytes)
        return result


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


def count_call(f: Callable[[], Any]) -> CountedStep:
    """What f does, on an abstract mesh."""
    found = CountedStep()
    with trace() as found.log, _Count(found):
        f()
    for event in found.log.events:
        if event.op == "Einsum" and event.memory:
            found.products.add(event.flops)
            found.reads.add(event.memory)
        elif event.op == "Einsum":  # a block of attention
            found.attention.add(event.flops)
    return found


@dataclass(frozen=True)
class Prediction:
    """Seconds of the products, of the work between them, and of the collectives by mesh axes."""

    math: float
    between: float
    comms: tuple[tuple[str, float], ...]

    @property
    def own(self) -> float:
        """What does not depend on other ranks."""
        return self.math + self.between

    @property
    def total(self) -> float:
        """Nothing overlaps: as on CPUs, where the core that computes also moves the bytes."""
        return self.own + sum(seconds for _, seconds in self.comms)

    @property
    def overlapped(self) -> float:
        """Communication hides behind the rest."""
        return max(self.own, sum(seconds for _, seconds in self.comms))


def price(counted: CountedStep, sizes: Mapping[str, int], chip: Chip, dtype: str = "fp32") -> Prediction:
    """Seconds of what was counted on a mesh of these sizes. ValueError if the chip lacks what that takes."""
    mesh = AbstractMesh(sizes)
    comms: dict[str, float] = {}
    for event in counted.log.collectives():
        ranks = mesh.size(event.axes)
        if ranks > 1 and event.op != "Send":  # its Recv is counted
            op = "CollectivePermute" if event.op == "Recv" else event.op
            axes = "".join(event.axes)
            comms[axes] = comms.get(axes, 0.0) + cost.seconds(op, event.nbytes, chip, ranks)
    memory, n = chip.need("hbm_bw"), mesh.size()
    product = measured_row(chip, "Product", n) or Measured("Product", n, 0.0, float("inf"))
    plain = measured_row(chip, "Pointwise", n) or Measured("Pointwise", n, 0.0, memory)
    curved = measured_row(chip, "Activation", n) or plain
    flops = chip.flops(dtype)
    math = counted.products.amount / flops + counted.attention.amount / (flops * chip.efficiency.attention)
    math += _seconds(product, counted.reads) + counted.attention.number * product.latency
    between = _seconds(plain, counted.plain) + _seconds(curved, counted.curved)
    return Prediction(math, between, tuple(comms.items()))


def _seconds(measured: Measured, calls: CallTotals) -> float:
    return calls.number * measured.latency + calls.amount / measured.bandwidth


def measured_row(chip: Chip, op: str, ranks: int) -> Measured | None:
    """What was measured of an operation while so many ranks ran it; the nearest number of ranks, if not this one."""
    rows = [r for r in chip.measured if r.op == op]
    return min(rows, key=lambda r: (abs(r.ranks - ranks), r.ranks)) if rows else None


def others_idle(chip: Chip) -> Chip:
    """The chip as its collectives are while the ranks that do not take part stand still, where that was measured."""
    rows = tuple(replace(row, alone=False) for row in chip.measured if row.alone)
    return replace(chip, measured=(*rows, *chip.measured))


def pipelined(stages: Sequence[Prediction], microbatches: int, alone: Sequence[float] = ()) -> float:
    """Seconds of a step whose stages follow each other: stage z works on microbatch k - z in slot k.

    `alone`: seconds of each stage while all others stand still, as they do where the pipeline fills and drains; no
    less than beside them where each rank has a processor of its own, which is taken for granted if none are given.
    With some of the others at work it is taken to lie in proportion between the two.
    """
    Z, M, totals = len(stages), microbatches, [stage.total for stage in stages]

    def slot(active: Sequence[int]) -> float:
        took = done = 0.0
        for i, z in enumerate(sorted(active, key=totals.__getitem__)):
            idle = (Z - (len(active) - i)) / max(1, Z - 1)  # of the other stages; those with less to do have ended
            ratio = min(1.0, alone[z] / totals[z]) if alone else 1.0
            took, done = took + (totals[z] - done) * (1 - (1 - ratio) * idle), totals[z]
        return took

    return sum(slot([z for z in range(Z) if 0 <= k - z < M]) for k in range(M + Z - 1)) / M
