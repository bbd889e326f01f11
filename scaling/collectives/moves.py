"""Start the collective of an `Op`: the data of each kind moves in one way, over either of two transports.

`InGraph` uses torch's functional collectives, which torch.func, torch.compile and make_fx see through. `OnGroup` calls
the process group directly, at no extra cost, if nothing differentiates or compiles; its messages are waited for later.

Each function of a kind starts an op of more than one rank and returns (what to wait for, a function that then makes the
result). `out` is a preallocated output; it is returned as the result if the result was made there. A ReduceScatter over
gloo is an AllToAll and a local sum, since gloo's own is an AllReduce inside, with twice the bytes. Gathered and
scattered dims are outermost in memory, so that only shards are copied, never the whole array.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from scaling.collectives.op import Op, output_shape
from scaling.common.torch_private import (
    Nowhere,
    exchange_into,
    exchange_over,
    gather_into,
    gather_over,
    scatter_sum_into,
    scatter_sum_over,
    sum_over,
)
from scaling.mesh import Group

NOWHERE: Any = Nowhere()  # the process group of an AbstractMesh
TAG = 1 << 20  # messages of a collective have their own tag, so that no recv receives them

Started = tuple[Sequence[Any], Callable[[], Tensor]]


def in_order(rows: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """Reorder blocks of rows; `counts` has the number of rows of each block, or nothing if each has one."""
    if not order:
        return rows
    parts = rows.split(list(counts) or 1)
    return torch.cat([parts[i] for i in order])


def by_member(rows: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
    """Return the rows and counts of an exchange, given by block, in the order of the members that hold the blocks."""
    rows = in_order(rows, sends, op.order)
    return rows, [sends[block] for block in op.order if sends], [receives[block] for block in op.order if receives]


def by_block(rows: Tensor, op: Op, counts: Sequence[int] = ()) -> Tensor:
    """Return rows that came in the members' order in the order of the blocks; `counts`: rows of each block."""
    members = [op.member(block) for block in range(op.size)] if op.order else ()
    return in_order(rows, [counts[block] for block in op.order] if counts else (), members)


class InGraph:
    """The functional collectives, which are finished when they return. Each method returns (works, filled tensor)."""

    def total(self, x: Tensor, op: Op, out: Tensor | None) -> tuple[Sequence[Any], Tensor]:
        """Sum x over the group."""
        return (), sum_over(x, op.group)

    def gather(self, mine: Tensor, op: Op, into: Tensor | None) -> tuple[Sequence[Any], Tensor, bool]:
        """[...] -> [n, ...], and whether the blocks come in the members' order."""
        return (), gather_over(mine[None], op.size, op.group), bool(op.order)

    def scatter_sum(self, blocks: Tensor, op: Op) -> tuple[Sequence[Any], Tensor]:
        """Sum the blocks over the group and return this rank's."""
        return (), scatter_sum_over(in_order(blocks, (), op.order).flatten(0, 1), op.size, op.group)

    def exchange(self, rows: Tensor, op: Op, sends: Sequence[int] = (), receives: Sequence[int] = ()):
        """Send each member its block of rows: one row each, or as many as `sends` and `receives` say.

        The received rows are in the members' order: see `by_block`.
        """
        if op.order:
            rows, sends, receives = by_member(rows, op, sends, receives)
        ones = [1] * op.size
        return (), exchange_over(rows, receives or ones, sends or ones, op.group)

    def pass_on(self, x: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
        """Send x to one block's rank and receive from another's: an AllToAll in which all splits but one are empty."""
        flat = x.flatten()
        sent, received = ([flat.numel() if b in ends else 0 for b in range(op.size)] for ends in (sends, receives))
        works, got = self.exchange(flat if sends else flat[:0], op, sent, received)
        return works, got.view(x.shape) if receives else got


class OnGroup(InGraph):
    """The process group itself."""

    def __init__(self, group: Group):
        self.group, self.pg = group, group.pg or NOWHERE

    def total(self, x: Tensor, op: Op, out: Tensor | None) -> tuple[Sequence[Any], Tensor]:
        """Sum x over the group, in x itself if that is `out`."""
        total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return [self.pg.allreduce([total])], total

    def gather(self, mine: Tensor, op: Op, into: Tensor | None) -> tuple[Sequence[Any], Tensor, bool]:
        """[...] -> [n, ...], and whether the blocks come in the members' order.

        Over gloo each rank sends its block to every other, straight to its slot in the result. That takes 0.75 of the
        CPU time of gloo's own AllGather, which copies through a buffer.
        """
        blocks = mine.new_empty((op.size, *mine.shape)) if into is None else into
        if op.backend != "gloo":
            return [gather_into(blocks.flatten(0, 1), mine, self.pg)], blocks, bool(op.order)
        if self.group.pg is None:  # on an AbstractMesh, which may have thousands of ranks
            return [NOWHERE.send(mine, blocks)], blocks, False
        works: list[Any] = []
        for block, member in reversed(self.group.others):
            works.append(self.pg.recv([blocks[block]], member, TAG))
        for _, member in self.group.others:
            works.append(self.pg.send([mine], member, TAG))
        slot = blocks[op.index]
        if slot.data_ptr() != mine.data_ptr():  # else the AllGather is in place: mine is its block of the buffer
            slot.copy_(mine)
        return works, blocks, False

    def scatter_sum(self, blocks: Tensor, op: Op) -> tuple[Sequence[Any], Tensor]:
        """Sum the blocks over the group and return this rank's."""
        mine = torch.empty_like(blocks[0])
        return [scatter_sum_into(mine, in_order(blocks, (), op.order).flatten(0, 1), self.pg)], mine

    def exchange(self, rows: Tensor, op: Op, sends: Sequence[int] = (), receives: Sequence[int] = ()):
        """Send each member its block of rows; see `InGraph.exchange`."""
        if op.order:
            rows, sends, receives = by_member(rows, op, sends, receives)
        rows = rows.contiguous()
        received = rows.new_empty((sum(receives), *rows.shape[1:])) if receives else torch.empty_like(rows)
        return [exchange_into(received, rows, self.pg, receives, sends)], received

    def pass_on(self, x: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
        """Send x to one block's rank and receive from another's: over gloo one message each way."""
        if op.backend != "gloo":
            return super().pass_on(x, op, sends, receives)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        if receives == [op.index]:
            return (), received.copy_(x)
        x = x.contiguous()
        works = [self.pg.recv([received], op.member(block), TAG) for block in receives]
        return works + [self.pg.send([x], op.member(block), TAG) for block in sends], received


IN_GRAPH = InGraph()
TO_NOBODY = OnGroup(Group((), 0, 0, "gloo"))  # for an AbstractMesh that makes gloo's buffers
StartMove = Callable[[Tensor, Op, InGraph, "Tensor | None"], Started]


def split_dim(x: Tensor, n: int, dim: int) -> Tensor:
    """[..., n*m, ...] -> [n, ..., m, ...]: the blocks of a dim, as a leading dim."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join(blocks: Tensor, dim: int) -> Tensor:
    """[n, ..., m, ...] -> [..., n*m, ...]: the inverse of split_dim."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def combine_parts(parts: Tensor, by: str, out: Tensor | None = None, dim: int = 0) -> Tensor:
    """[n, m, ...] -> [..., m, ...], m as the dim `dim`: the sum, or the greatest or least, NaN if one of them is."""
    if by == "sum":
        whole = torch.sum(parts, 0, dtype=parts.dtype, out=out)
    else:
        whole = torch.amax(parts, 0, out=out) if by == "max" else torch.amin(parts, 0, out=out)
    return whole.movedim(0, dim) if dim else whole


def _start_all_reduce(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    """Start an AllReduce.

    A maximum is a ReduceScatter of the flattened elements and an AllGather, since gloo's and NCCL's own lose NaNs.
    """
    if op.by == "sum":
        works, total = via.total(x, op, out)
        return works, lambda: total
    flat = padded(x.flatten(), (0, -x.numel() % op.size))
    works, parts = via.exchange(flat.view(op.size, len(flat) // op.size), op)
    for work in works:
        work.wait()
    works, blocks, turned = via.gather(combine_parts(parts, op.by), op, None)

    def whole() -> Tensor:
        flat = (by_block(blocks, op) if turned else blocks).flatten()
        if len(flat) > x.numel():
            flat = flat[: x.numel()].clone()  # forward-mode AD refuses a part of a tensor
        return flat.view(x.shape)

    return works, whole


def _start_all_gather(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    dim, blocks = op.dim, None
    mine = (x.movedim(dim, 0) if dim else x).contiguous()
    if out is not None and (op.backend == "gloo" or not op.order):  # other backends deliver in members' order
        whole = out.movedim(dim, 0) if dim else out
        blocks = whole.view(op.size, *mine.shape) if whole.is_contiguous() else None
    out = None if blocks is None else out
    works, blocks, turned = via.gather(mine, op, blocks)
    return works, partial(_joined, blocks, op, turned, out)


def _joined(blocks: Tensor, op: Op, turned: bool, out: Tensor | None) -> Tensor:
    """[n, m, ...] -> [..., n*m, ...], a view in which the dim stays outermost in memory; `out` if it was made there."""
    if out is not None:
        return out
    whole = (by_block(blocks, op) if turned else blocks).flatten(0, 1)
    return whole.movedim(0, op.dim) if op.dim else whole


def _start_reduce_scatter(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    dim = op.dim
    sent = (x.movedim(dim, 0) if dim else x).contiguous()  # no copy if the dim is outermost in memory
    sent = sent.view(op.size, len(sent) // op.size, *sent.shape[1:])
    if op.backend != "gloo" and op.by == "sum":
        works, mine = via.scatter_sum(sent, op)
        return works, lambda: mine.movedim(0, dim)
    works, received = via.exchange(sent, op)
    out = out if out is not None and dim == 0 and out.is_contiguous() else None
    return works, partial(combine_parts, received, op.by, out, dim)  # faster than transposing first


def _start_all_to_all(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    works, received = via.exchange(split_dim(x, op.size, op.to), op)
    return works, lambda: join(by_block(received, op), op.dim)


def _start_permute(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    """Start sending x from block to block; a rank that receives nothing gets zeros."""
    sends, receives = op.ends
    works, received = via.pass_on(x, op, sends, receives) if op.size > 1 else ((), x.clone())
    return works, lambda: received if receives else torch.zeros_like(x)


def _start_exchange_ragged(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    """Start an exchange of blocks that each have any number of rows."""
    works, received = via.exchange(x.movedim(op.dim, 0), op, op.sends, op.receives)
    return works, lambda: by_block(received, op, op.receives).movedim(0, op.dim)


# Ops with a root. Every other rank has zeros in place of the root's array, so that each op is a linear map.


def _start_broadcast(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    from_root, to_all = _between_root_and_all(op)
    copies = x.expand(op.size if op.at_root else 0, *x.shape)
    works, received = via.exchange(copies.contiguous(), op, to_all, from_root)
    return works, lambda: received[0]


def _start_reduce(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    to_root, from_all = _between_root_and_all(op)
    works, received = via.exchange(x[None], op, to_root, from_all)
    return works, lambda: combine_parts(received, op.by, None, 0) if op.at_root else torch.zeros_like(x)


def _start_scatter(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    from_root, to_all = _between_root_and_all(op)
    blocks = split_dim(x, op.size, op.dim)
    works, received = via.exchange(blocks if op.at_root else blocks[:0], op, to_all, from_root)
    return works, lambda: received[0]


def _start_gather(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    to_root, from_all = _between_root_and_all(op)
    works, blocks = via.exchange(x[None], op, to_root, from_all)
    if op.at_root:
        return works, lambda: join(by_block(blocks, op), op.dim)
    return works, lambda: x.new_zeros(output_shape(op, x.shape))


def _between_root_and_all(op: Op) -> tuple[list[int], list[int]]:
    """Return two counts of blocks by rank: (one for the root; one for each rank on the root, and none elsewhere)."""
    return [int(block == op.root) for block in range(op.size)], [int(op.at_root)] * op.size


def _start_slice(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    return (), lambda: split_dim(x, op.size, op.dim)[op.index].clone()


def _start_pad(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    return (), lambda: among_zeros(x, op.dim, op.index, op.size)


def among_zeros(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Return a block of a dim, number `index` of `count`, among zeros."""
    m, behind = x.shape[dim], [0, 0] * (x.dim() - 1 - dim)
    return padded(x, (*behind, index * m, (count - 1 - index) * m))


MOVES: dict[str, StartMove] = {
    "AllGather": _start_all_gather,
    "ReduceScatter": _start_reduce_scatter,
    "AllReduce": _start_all_reduce,
    "AllToAll": _start_all_to_all,
    "CollectivePermute": _start_permute,
    "Ragged": _start_exchange_ragged,
    "Slice": _start_slice,
    "Pad": _start_pad,
    "Broadcast": _start_broadcast,
    "Reduce": _start_reduce,
    "Scatter": _start_scatter,
    "Gather": _start_gather,
}
