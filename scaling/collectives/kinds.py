"""The kinds of collectives in one table, and what follows from it: transposes, shapes, bytes, and how each is run."""

from collections.abc import Callable
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling._torch import lazy_clone
from scaling.collectives import eager, traced
from scaling.collectives.eager import Start, Started
from scaling.collectives.op import Op, dual_line
from scaling.mesh import Group
from scaling.spec import parse_line, refuse
from scaling.trace import Event, now


class Kind(NamedTuple):
    """`dual`: the kind of the transpose. `resize(op, shape)`: makes the result's shape of the operand's. `sent(op, V)`:
    bytes that one rank sends, by the algorithm that is optimal in bytes, of the book's V (the gathered or unreduced
    array). `traced`, `eager`: how it runs."""

    dual: str
    resize: Callable[[Op, list[int]], None]
    sent: Callable[[Op, int], int]
    traced: Callable[[Tensor, Op], Tensor]
    eager: Start | None = None


def grows(op: Op, shape: list[int]) -> None:
    shape[op.dim] *= op.size


def _splits(op: Op, shape: list[int]) -> None:
    shape[op.dim] //= op.size


def _moves(op: Op, shape: list[int]) -> None:
    shape[op.dim], shape[op.to] = shape[op.dim] * op.size, shape[op.to] // op.size


def stays(op: Op, shape: list[int]) -> None:
    pass


def no_bytes(op: Op, V: int) -> int:
    return 0


def others_share(op: Op, V: int) -> int:
    return (op.size - 1) * V // op.size


def both_ways(op: Op, V: int) -> int:
    return 2 * (op.size - 1) * V // op.size


def _exchanged(op: Op, V: int) -> int:
    return (op.size - 1) * V // op.size**2


def permuted(op: Op, V: int) -> int:
    return V if any(source == op.index != target for source, target in op.pairs) else 0


def from_root(op: Op, V: int) -> int:
    return (op.size - 1) * V if traced.at_root(op) else 0


def parts_from_root(op: Op, V: int) -> int:
    return others_share(op, V) if traced.at_root(op) else 0


def to_root(op: Op, V: int) -> int:
    return 0 if traced.at_root(op) else V


def part_to_root(op: Op, V: int) -> int:
    return 0 if traced.at_root(op) else V // op.size


KINDS = {
    "AllGather": Kind("ReduceScatter", grows, others_share, traced.all_gather, eager.all_gather),
    "ReduceScatter": Kind("AllGather", _splits, others_share, traced.reduce_scatter, eager.reduce_scatter),
    "AllReduce": Kind("AllReduce", stays, both_ways, traced.all_reduce, eager.all_reduce),
    "AllToAll": Kind("AllToAll", _moves, _exchanged, traced.all_to_all, eager.all_to_all),
    "CollectivePermute": Kind("CollectivePermute", stays, permuted, traced.permute, eager.permute),
    "Slice": Kind("Pad", _splits, no_bytes, traced.slice_),
    "Pad": Kind("Slice", grows, no_bytes, traced.pad),
    "Broadcast": Kind("Reduce", stays, from_root, traced.broadcast),
    "Reduce": Kind("Broadcast", stays, to_root, traced.reduce),
    "Scatter": Kind("Gather", _splits, parts_from_root, traced.scatter),
    "Gather": Kind("Scatter", grows, part_to_root, traced.gather),
}
LOCAL = ("Slice", "Pad")  # nothing is sent
ADDS = ("ReduceScatter", "AllReduce", "Broadcast", "Reduce")  # put elements of several ranks together (of zeros too)


def dual(op: Op) -> Op:
    """The transpose (of a sum), which carries cotangents back."""
    pairs = tuple((target, source) for source, target in op.pairs)
    dim, to = (op.to, op.dim) if op.kind == "AllToAll" else (op.dim, op.to)
    kind, line = KINDS[op.kind].dual, dual_line(op.line, op.axes)
    return op._replace(kind=kind, dim=dim, to=to, pairs=pairs, by="sum", line=line)


def output_shape(op: Op, shape) -> list[int]:
    """The shape of the result of an op on a tensor of this shape."""
    result = list(shape)
    KINDS[op.kind].resize(op, result)
    return result


def event(op: Op, x: Tensor, async_op: bool = False) -> Event:
    """What a trace records of an op on x."""
    kind, (before,), after = KINDS[op.kind], parse_line(op.line).operands, parse_line(op.line).result
    V = x.numel() * x.element_size() * (op.size if kind.resize in (grows, _moves) and op.kind != "Pad" else 1)
    name = "Slice" if op.kind == "Pad" else op.kind
    sources = [source for source, target in op.pairs if target == op.index != source]
    sources += [] if op.root is None or op.root == op.index else [op.root]
    peers = tuple(op.order.index(source) if op.order else source for source in sources)
    return Event(name, op.axes, before, after, V, kind.sent(op, V), async_op=async_op, called=now(), group=op.group,
                 peers=peers, dtype=x.dtype, key=key_of(x))  # fmt: skip


def key_of(x: Tensor) -> tuple[int, ...]:
    """What tells x apart from other operands as long as it is not changed; () of what has no memory. Addresses are used
    again: so the memory keeps when it was first asked about."""
    try:
        first = x.untyped_storage().__dict__.setdefault("_first_seen", time_ns())
        return (first, x.data_ptr(), x._version)
    except RuntimeError:
        return ()


def runs_behind(op: Op, group: Group) -> bool:
    """Whether an op that is started runs while this rank goes on."""
    return KINDS[op.kind].eager is not None and (group.pg is not None or op.backend == "gloo") and op.by == "sum"


def starter(op: Op, group: Group, dtype: torch.dtype) -> Start:
    """What starts an op that nothing differentiates, on operands of this dtype."""
    if op.size == 1 and op.kind != "CollectivePermute":
        return _alone
    run = KINDS[op.kind].eager
    if run is None or not runs_behind(op, group):
        return _at_once
    return run if dtype in CARRIED else _carried


def _alone(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    return (), lambda: lazy_clone(x) if out is None else x


def _at_once(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    result = out if out is not None and op.backend == "abstract" else traceable(x, op)
    return (), lambda: result


def _carried(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    """Of a dtype that transports do not carry as it is."""
    carried, back = as_carried(x)
    run: Any = KINDS[op.kind].eager
    works, make = run(carried, op, group, None)
    return works, lambda: back(make())


def traceable(x: Tensor, op: Op) -> Tensor:
    """An op as torch.func, torch.compile and make_fx see through it; of an AbstractMesh, its result's shape."""
    kind = KINDS[op.kind]
    if op.size == 1 and op.kind != "CollectivePermute":
        return x.clone()
    if op.kind in LOCAL:
        return kind.traced(x, op)
    if op.backend == "abstract":
        return x.new_empty(output_shape(op, x.shape))
    carried, back = as_carried(x)
    return back(kind.traced(carried, op))


CARRIED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}  # dtypes that every transport moves and adds
CARRIED |= {torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool}
TWIN = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}  # what carries other dtypes' bits, by size


def check_dtype(op: Op, dtype: torch.dtype) -> None:
    """ShardingError if an op cannot put elements of this dtype together."""
    if op.kind in ADDS and dtype not in CARRIED and not (dtype.is_complex and op.by == "sum"):
        rule = "the parts are put together by float, int8, uint8, int32 and int64 arithmetic; complex ones are added"
        refuse(f"{op.kind}: {op.line}", f"the {op.reduction} of {dtype}", rule, "convert it, e.g. .to(torch.float32)")
    if op.mean and not (dtype.is_floating_point or dtype.is_complex):
        refuse(f"{op.kind}: {op.line}", f"the mean of {dtype}", "a mean has fractions", "convert it, or use op='sum'")


def as_carried(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """x in a dtype that transports carry, and the way back. They read memory: what is conjugated or negated only by a
    bit of the tensor's is written out first."""
    x, dtype = x.resolve_neg(), x.dtype
    if dtype in CARRIED:
        return x, _same
    if dtype.is_complex:
        return torch.view_as_real(x.resolve_conj()), torch.view_as_complex
    return x.view(TWIN[dtype.itemsize]), lambda y: y.view(dtype)


def _same(x: Tensor) -> Tensor:
    return x
