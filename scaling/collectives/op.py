"""Collectives as data: an `Op` is one collective over one group, linear, and knows its transpose."""

from functools import lru_cache
from typing import NamedTuple

import torch

from scaling.mesh import Group
from scaling.spec import Spec, parse_line
from scaling.trace import Event, now

DUAL = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather", "Slice": "Pad", "Pad": "Slice"}
DUAL |= {"Broadcast": "Reduce", "Reduce": "Broadcast", "Scatter": "Gather", "Gather": "Scatter"}


class Op(NamedTuple):
    """One collective over one group, as constants that a compiler can keep in its graph.

    `dim`: the dim that grows (AllGather, Pad, Gather, AllToAll) or is split (ReduceScatter, Slice, Scatter); `to`: the
    dim that an AllToAll splits; `moves`: of a CollectivePermute, its (source, target) blocks, and of an op with a root
    ((root, root),); `line`: the types before and after; `checked`: ranks compare calls first.
    """

    kind: str
    group: str
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    dim: int = 0
    to: int = 0
    moves: tuple[tuple[int, int], ...] = ()
    axes: tuple[str, ...] = ()
    line: str = ""
    checked: bool = False

    @staticmethod
    def over(group: Group, kind: str, line: str, dim: int = 0, to: int = 0, moves=()) -> "Op":
        g = group
        return Op(kind, g.name, g.size, g.index, g.backend, g.order, dim, to, tuple(moves), g.axes, line, g.checked)

    def dual(self) -> "Op":
        """The transpose: what carries cotangents back."""
        moves = self.moves
        if self.kind == "CollectivePermute":
            moves = tuple((target, source) for source, target in moves)
        dim, to = (self.to, self.dim) if self.kind == "AllToAll" else (self.dim, self.to)
        line = dual_line(self.line, self.axes)
        return self._replace(kind=DUAL.get(self.kind, self.kind), dim=dim, to=to, moves=moves, line=line)

    def batched(self) -> "Op":
        """The same on tensors with one more dim in front."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)

    @property
    def root(self) -> int:
        return self.moves[0][0]

    def wire_bytes(self, nbytes: int) -> int:
        """Bytes that one rank sends, of V = `nbytes`, by the algorithms that are optimal in bytes."""
        n = self.size
        if self.kind == "AllReduce":
            return 2 * (n - 1) * nbytes // n
        if self.kind == "AllToAll":
            return (n - 1) * nbytes // n**2
        if self.kind == "CollectivePermute":
            return nbytes if any(s == self.index != t for s, t in self.moves) else 0
        if self.kind in ("Broadcast", "Scatter"):
            share = n - 1 if self.kind == "Broadcast" else (n - 1) / n
            return int(share * nbytes) if self.index == self.root else 0
        if self.kind in ("Reduce", "Gather"):
            return 0 if self.index == self.root else nbytes // (1 if self.kind == "Reduce" else n)
        return (n - 1) * nbytes // n if self.kind in ("AllGather", "ReduceScatter") else 0

    def volume(self, x: torch.Tensor) -> int:
        """V in bytes, of the operand."""
        return x.numel() * x.element_size() * (self.size if self.kind in ("AllGather", "AllToAll", "Gather") else 1)

    def event(self, x: torch.Tensor, async_op: bool = False) -> Event:
        line, volume = parse_line(self.line), self.volume(x)
        return Event(
            "Slice" if self.kind == "Pad" else self.kind,
            self.axes,
            line.operands[0],
            line.result,
            nbytes=volume,
            wire_bytes=self.wire_bytes(volume),
            start=now(),
            async_op=async_op,
        )


@lru_cache(maxsize=4096)
def dual_line(line: str, axes: tuple[str, ...]) -> str:
    """The types of the transpose: cotangents, which are unreduced over `axes` where the array was replicated."""
    before, after = parse_line(line).operands[0], parse_line(line).result

    def cotangent(spec: Spec) -> Spec:
        replicated = [a for a in axes if a not in spec.axes + spec.unreduced]
        kept = [a for a in spec.unreduced if a not in axes]
        return spec.with_name("d" + spec.name).with_unreduced(kept + replicated)

    return f"{cotangent(after)} -> {cotangent(before)}"


def output_shape(op: Op, shape) -> list[int]:
    shape = list(shape)
    if op.kind in ("AllGather", "Pad", "Gather", "AllToAll"):
        shape[op.dim] *= op.size
    if op.kind in ("ReduceScatter", "Slice", "Scatter"):
        shape[op.dim] //= op.size
    if op.kind == "AllToAll":
        shape[op.to] //= op.size
    return shape
