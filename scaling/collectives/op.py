"""Collectives as data: an `Op` is one collective over one group; the table of kinds says what follows from its kind.

The table gives the transpose, the shape of the result, the dtypes that can be combined, and the record in a trace. How
data moves is in `scaling.collectives.moves`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import time_ns
from typing import NamedTuple

import torch
from torch import Tensor

from scaling.algebra.steps import sent_share
from scaling.mesh import Group
from scaling.spec import ShardingError, parse_line, refuse
from scaling.trace import Event, now


class Op(NamedTuple):
    """One collective over one group, as constants that a compiler can keep in its graph.

    A block is the part of the array that belongs to one rank of the group. Blocks are numbered by the axes of the type.

    Attributes:
        kind: The collective.
        group: The name of the process group.
        size: The number of ranks in the group.
        index: This rank's block.
        backend: The group's backend.
        order: The block of each member of the process group; () if members are in the order of the blocks.
        dim: The dim that grows (AllGather, Pad, Gather, AllToAll) or is split (ReduceScatter, Slice, Scatter).
        to: The dim that an AllToAll splits.
        pairs: A CollectivePermute's (source, target) blocks.
        root: The root's block.
        by: How partial values are combined: "sum", "mean", "max" or "min".
        axes: The mesh axes of the group.
        line: The types before and after.
        checked: Whether the ranks compare their calls first.
        sends: In a ragged AllToAll, the number of rows to each block.
        receives: In a ragged AllToAll, the number of rows from each block.
        sliced: Whether the types are a slice's, not the whole mesh's (`mesh.sliced`).
        dims: The number of dims of the operand.
        splits: The operand's dim whose size the group's size must divide, or None.
        numbers: (position, size) of each of the operand's dims whose name is a number.
    """

    kind: str
    group: str
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    dim: int = 0
    to: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    root: int | None = None
    by: str = "sum"
    axes: tuple[str, ...] = ()
    line: str = ""
    checked: bool = False
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    sliced: bool = False
    dims: int = 0
    splits: int | None = None
    numbers: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.line}"

    @property
    def linear(self) -> bool:
        """Whether the op adds."""
        return self.by in ("sum", "mean")

    @property
    def at_root(self) -> bool:
        """Whether this rank is the root."""
        return self.index == self.root

    def member(self, block: int) -> int:
        """Return the member of the process group that has a block."""
        return self.order.index(block) if self.order else block

    @property
    def ends(self) -> tuple[list[int], list[int]]:
        """The blocks of `pairs`: ([the one that this rank sends to], [the one that it receives from]); [] for none."""
        to = [target for source, target in self.pairs if source == self.index]
        return to, [source for source, target in self.pairs if target == self.index]

    @staticmethod
    def over(group: Group, kind: str, line: str, **options) -> "Op":
        """Return the op over a group, with its other fields given by name."""
        g = group
        return Op(
            kind, g.name, g.size, g.index, g.backend, g.order, axes=g.axes, line=line, checked=g.checked, **options
        )

    def batched(self) -> "Op":
        """Return the op under vmap, on tensors with one more dim in front."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an operand of this shape has the dims of its type."""
        if len(shape) != self.dims or (self.splits is not None and shape[self.splits] % self.size):
            return False
        return not self.numbers or all(shape[i] == size for i, size in self.numbers)

    def check(self, x: Tensor, mesh) -> None:
        """Raise a ShardingError unless x is a tensor with the dims of its type, on the mesh's device."""
        if not isinstance(x, Tensor):
            what = f"the operand is a {type(x).__module__}.{type(x).__name__}"
            refuse(self, what, "arrays are torch.Tensors", "torch.as_tensor(...)")
        if not self.fits(x.shape):
            self.refuse_shape(tuple(x.shape))
        if x.device.type != mesh.device.type and type(x) in PLAIN:
            if self.backend == "abstract" or mesh.device.type == "meta":
                what = f"an AbstractMesh moves no data, and the operand is on {x.device}"
                raise ShardingError(f"{self}\n  {what}\n  fix: give it tensors on the meta device")
            rule = f"a mesh moves what is on its own device, {mesh.device}"
            fix = "plan with shapes alone on an AbstractMesh" if x.is_meta else f".to({str(mesh.device)!r}) first"
            refuse(self, f"the operand is on {x.device}", rule, fix)
        if x.layout is not torch.strided:
            refuse(self, f"the operand is {x.layout}", "shards are dense tensors", "give it as .to_dense()")
        self.check_dtype(x.dtype)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise a ShardingError if elements of this dtype cannot be combined."""
        if dtype not in CARRIED and self.kind in ADDS and not (dtype.is_complex and self.linear):
            rule = (
                "the parts are put together by float, int8, uint8, int32 and int64 arithmetic; complex ones are added"
            )
            refuse(self, f"the {self.by} of {dtype}", rule, "convert it, e.g. .to(torch.float32)")
        if self.by == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            refuse(self, f"the mean of {dtype}", "a mean has fractions", "convert it, or use op='sum'")

    def refuse_shape(self, shape: tuple[int, ...]) -> None:
        """Raise the ShardingError that says why an operand of this shape does not fit."""
        before = parse_line(self.line).operands[0]
        if len(shape) != self.dims:
            what = f"the operand has shape {shape}, but its type has {self.dims} dims"
            raise ShardingError(f"{self}\n  {what}\n  fix: name each dim of it")
        for i, size in self.numbers:
            if shape[i] != size:
                what = f"dim {before.dim_names[i]} of this shard has size {shape[i]}, not {size}"
                refuse(self, what, "a dim that is a number says its own size", "give a dim of any size a name")
        split = self.splits or 0
        dim = before.dim_names[split]
        raise ShardingError(
            f"{self}\n  dim {dim} of this shard has size {shape[split]}, "
            f"which does not divide into {self.size} blocks over {', '.join(self.axes)}\n"
            f"  fix: make {dim} a multiple of {self.size} on each rank"
        )


RUN_BY = Op._fields.index("dims")  # the fields that determine how it runs; the later ones describe x


class Kind(NamedTuple):
    """The properties of a kind of op.

    `dual`: the kind of the transpose. `sent(op, V)`: the bytes that one rank sends, by the algorithm that sends least,
    for the book's V (the bytes of the gathered or unreduced array). `grows`, `splits`: whether a dim does (for an
    AllToAll `dim` and `to`). `adds`: whether elements of several ranks, zeros included, are combined. `traced`: the
    name in a trace, if that differs.
    """

    dual: str
    sent: Callable[[Op, int], int]
    grows: bool = False
    splits: bool = False
    adds: bool = False
    traced: str = ""


def _sent_evenly(op: Op, V: int) -> int:
    """Return the bytes that a rank sends, for an op in which all ranks send equally many."""
    sent, of = sent_share(op.kind, op.size)
    return (V // op.size if KINDS[op.kind].grows else V) * sent // of


def _permuted(op: Op, V: int) -> int:
    return V if any(source == op.index != target for source, target in op.pairs) else 0


def _sent_rows(op: Op, V: int) -> int:
    rows = sum(op.sends)
    return V // op.size * (rows - op.sends[op.index]) // max(1, rows)


KINDS = {
    "AllGather": Kind("ReduceScatter", _sent_evenly, grows=True),
    "ReduceScatter": Kind("AllGather", _sent_evenly, splits=True, adds=True),
    "AllReduce": Kind("AllReduce", _sent_evenly, adds=True),
    "AllToAll": Kind("AllToAll", _sent_evenly, grows=True, splits=True),
    "CollectivePermute": Kind("CollectivePermute", _permuted),
    "Slice": Kind("Pad", _sent_evenly, splits=True),
    "Pad": Kind("Slice", _sent_evenly, grows=True, traced="Slice"),
    "Broadcast": Kind("Reduce", lambda op, V: (op.size - 1) * V if op.at_root else 0, adds=True),
    "Reduce": Kind("Broadcast", lambda op, V: 0 if op.at_root else V, adds=True),
    "Scatter": Kind("Gather", lambda op, V: (op.size - 1) * V // op.size if op.at_root else 0, splits=True),
    "Gather": Kind("Scatter", lambda op, V: 0 if op.at_root else V // op.size, grows=True),
    "Ragged": Kind("Ragged", _sent_rows, traced="AllToAll"),
}
LOCAL = ("Slice", "Pad")  # nothing is sent
ADDS = tuple(name for name, kind in KINDS.items() if kind.adds)
PLAIN = (Tensor, torch.nn.Parameter)  # other classes belong to tracers
CARRIED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}  # dtypes that every transport moves and adds
CARRIED |= {torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool}
TWIN = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}  # dtypes that carry others' bits, by size


def dual(op: Op) -> Op:
    """Return the op that carries cotangents back: the transpose of this op, taken as a sum."""
    pairs = tuple((target, source) for source, target in op.pairs)
    dim, to = (op.to, op.dim) if op.kind == "AllToAll" else (op.dim, op.to)
    back = {"pairs": pairs, "dim": dim, "to": to, "sends": op.receives, "receives": op.sends}
    return op._replace(kind=KINDS[op.kind].dual, by="sum", line=dual_line(op.line, op.axes), **back)


@lru_cache(maxsize=4096)
def dual_line(line: str, axes: tuple[str, ...]) -> str:
    """Return the line of the transpose, with the types of the cotangents.

    They are unreduced over `axes` if the array was replicated, and replicated if it was unreduced.
    """
    before, after = parse_line(line).operands[0], parse_line(line).result
    return f"{after.cotangent(axes)} -> {before.cotangent(axes)}"


def output_shape(op: Op, shape: Sequence[int]) -> list[int]:
    """Return the shape of an op's result for an operand of this shape."""
    kind, result = KINDS[op.kind], list(shape)
    if op.size == 1:
        return result
    if kind.grows:
        result[op.dim] *= op.size
    if kind.splits:
        result[op.to if kind.grows else op.dim] //= op.size
    if op.receives:
        result[op.dim] = sum(op.receives)
    return result


def as_carried(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return x in a dtype that transports can send, and the function that converts back.

    Transports read memory, so a tensor that is conjugated or negated only by a bit is written out first.
    """
    x, dtype = x.resolve_neg(), x.dtype
    if dtype in CARRIED:
        return x, _same
    if dtype.is_complex:
        return torch.view_as_real(x.resolve_conj()), torch.view_as_complex
    return x.view(TWIN[dtype.itemsize]), lambda y: y.view(dtype)


def _same(x: Tensor) -> Tensor:
    return x


def event(op: Op, x: Tensor, async_op: bool = False) -> Event:
    """Return the record of an op on x for a trace."""
    kind, (before,), after = KINDS[op.kind], parse_line(op.line).operands, parse_line(op.line).result
    whole = (kind.grows and op.kind != "Pad") or op.kind == "Ragged"
    V = x.numel() * x.element_size() * (op.size if whole else 1)
    peers = [] if op.root is None or op.at_root else [op.member(op.root)]
    peers += [op.member(block) for block in op.ends[1] if block != op.index]
    return Event(kind.traced or op.kind, op.axes, before, after, V, kind.sent(op, V), async_op=async_op, called=now(),
                 group=op.group, peers=tuple(peers), dtype=x.dtype, key=key_of(x), perm=op.pairs)  # fmt: skip


def key_of(x: Tensor) -> tuple[int, ...]:
    """Return a key that identifies x and its values, and changes when x is changed; () for a tensor without memory.

    An address alone would not do, because freed memory is reused. So the key also has the time at which this function
    first saw the memory.
    """
    try:
        first = x.untyped_storage().__dict__.setdefault("_first_seen", time_ns())
        return (first, x.data_ptr(), x._version)
    except RuntimeError:
        return ()
