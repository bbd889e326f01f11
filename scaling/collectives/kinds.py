"""How the data of an `Op` moves: each kind once, over either of two transports.

Each function of a kind starts an op of more than one rank and returns (what to wait for, a function that then makes the
result). `out` is a preallocated output; it is returned as the result if that was made there. A ReduceScatter over gloo
is an AllToAll and a local sum: gloo's own is an AllReduce inside, with twice the bytes. Gathered and scattered dims
are outermost in memory: what is copied is then a shard, never the whole array.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from scaling.collectives.op import CARRIED, LOCAL, Op, as_carried, output_shape
from scaling.collectives.transport import IN_GRAPH, TO_NOBODY, OnGroup, Transport
from scaling.common.torch_private import lazy_clone
from scaling.mesh import Group

Started = tuple[Sequence[Any], Callable[[], Tensor]]
StartMove = Callable[[Tensor, Op, Transport, "Tensor | None"], Started]


def split_dim(x: Tensor, n: int, dim: int) -> Tensor:
    """[..., n*m, ...] -> [n, ..., m, ...]: the blocks of a dim, as a leading dim."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join(blocks: Tensor, dim: int) -> Tensor:
    """[n, ..., m, ...] -> [..., n*m, ...]: the inverse of split."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def reorder(blocks: Tensor, order: tuple[int, ...], inverse: bool = False) -> Tensor:
    """Blocks into members' order, or (inverse) members' into blocks' order."""
    if not order:
        return blocks
    index = [order.index(b) for b in range(len(order))] if inverse else list(order)
    return torch.stack([blocks[i] for i in index])


def combine_parts(parts: Tensor, by: str, out: Tensor | None = None) -> Tensor:
    """[n, ...] -> [...]: the sum, or the greatest or least. A maximum with a NaN among its parts is NaN."""
    if by == "sum":
        return torch.sum(parts, 0, dtype=parts.dtype, out=out)
    return torch.amax(parts, 0, out=out) if by == "max" else torch.amin(parts, 0, out=out)


def all_reduce(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    """A maximum is a ReduceScatter of the elements in a row and an AllGather: gloo's and NCCL's own lose NaNs."""
    if op.by == "sum":
        works, total = via.total(x, op, out)
        return works, lambda: total
    flat = padded(x.flatten(), (0, -x.numel() % op.size))
    _, parts = via.exchange(flat.view(op.size, len(flat) // op.size), op)  # which is there at once
    whole = via.gather(combine_parts(parts, op.by), op, None)[1].flatten()
    whole = (
        whole if len(whole) == x.numel() else whole[: x.numel()].clone()
    )  # forward-mode AD wants no part of a tensor
    return (), lambda: whole.view(x.shape)


def all_gather(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    dim, blocks = op.dim, None
    mine = (x.movedim(dim, 0) if dim else x).contiguous()
    if out is not None and (op.backend == "gloo" or not op.order):  # others deliver in members' order
        whole = out.movedim(dim, 0) if dim else out
        blocks = whole.view(op.size, *mine.shape) if whole.is_contiguous() else None
    out = None if blocks is None else out
    works, blocks, order = via.gather(mine, op, blocks)
    return works, partial(_joined, blocks, dim, order, out)


def _joined(blocks: Tensor, dim: int, order: tuple[int, ...], out: Tensor | None) -> Tensor:
    """[n, m, ...] -> [..., n*m, ...], a view: the dim stays outermost in memory. `out`, if it was made there."""
    if out is not None:
        return out
    whole = (reorder(blocks, order, inverse=True) if order else blocks).flatten(0, 1)
    return whole.movedim(0, dim) if dim else whole


def reduce_scatter(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    dim = op.dim
    sent = (x.movedim(dim, 0) if dim else x).contiguous()  # no copy if the dim is the outermost in memory already
    sent = sent.view(op.size, len(sent) // op.size, *sent.shape[1:])
    sent = reorder(sent, op.order) if op.order else sent
    if op.backend != "gloo" and op.by == "sum":
        works, mine = via.scatter_sum(sent, op)
        return works, lambda: mine.movedim(0, dim)
    works, received = via.exchange(sent, op)
    if out is not None and dim == 0 and out.is_contiguous():
        return works, partial(combine_parts, received, op.by, out)
    return works, lambda: combine_parts(received, op.by).movedim(0, dim)  # quicker than to transpose first


def all_to_all(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    works, received = via.exchange(reorder(split_dim(x, op.size, op.to), op.order), op)
    return works, lambda: join(reorder(received, op.order, inverse=True), op.dim)


def permute(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    """Send x from block to block; a rank that receives nothing gets zeros."""
    sends, receives = op.ends
    works, received = via.pass_on(x, op, sends, receives) if op.size > 1 else ((), x.clone())
    return works, lambda: received if receives else torch.zeros_like(x)


def exchange_ragged(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    """Blocks of as many rows as each has. The group lists its members in the mesh's order, not in the line's."""
    rows, sends, receives = x.movedim(op.dim, 0), op.sends, op.receives
    if op.order:
        blocks = rows.split(sends)
        rows = torch.cat([blocks[block] for block in op.order])
        sends, receives = (tuple(counts[block] for block in op.order) for counts in (sends, receives))
    works, received = via.exchange(rows, op, sends, receives)

    def finish() -> Tensor:
        parts = received.split(receives) if op.order else ()
        rows = torch.cat([parts[op.member(block)] for block in range(op.size)]) if op.order else received
        return rows.movedim(0, op.dim)

    return works, finish


# Ops with a root. What only the root has is, elsewhere, zeros: so each is a linear map.


def broadcast(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    works, total = via.total(x if op.at_root else torch.zeros_like(x), op, None)
    return works, lambda: total


def reduce(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    works, finish = all_reduce(x, op, via, None)
    return works, lambda: finish() if op.at_root else torch.zeros_like(finish())


def scatter(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    from_root, to_all = _between_root_and_all(op)
    blocks = reorder(split_dim(x, op.size, op.dim), op.order)
    works, received = via.exchange(blocks if op.at_root else blocks[:0], op, to_all, from_root)
    return works, lambda: received[0]


def gather(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    to_root, from_all = _between_root_and_all(op)
    works, blocks = via.exchange(x[None], op, to_root, from_all)
    if op.at_root:
        return works, lambda: join(reorder(blocks, op.order, inverse=True), op.dim)
    return works, lambda: x.new_zeros(output_shape(op, x.shape))


def _between_root_and_all(op: Op) -> tuple[list[int], list[int]]:
    """How many blocks this member has with each one if all have one with the root, and if the root has one with each
    of them."""
    root = op.member(op.root or 0)
    return [int(member == root) for member in range(op.size)], [int(op.at_root)] * op.size


def slice_(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    return (), lambda: split_dim(x, op.size, op.dim)[op.index].clone()


def pad(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    """This rank's block in its place among zeros."""
    m, behind = x.shape[op.dim], [0, 0] * (x.dim() - 1 - op.dim)
    return (), lambda: padded(x, (*behind, op.index * m, (op.size - 1 - op.index) * m))


MOVES: dict[str, StartMove] = {
    "AllGather": all_gather,
    "ReduceScatter": reduce_scatter,
    "AllReduce": all_reduce,
    "AllToAll": all_to_all,
    "CollectivePermute": permute,
    "Ragged": exchange_ragged,
    "Slice": slice_,
    "Pad": pad,
    "Broadcast": broadcast,
    "Reduce": reduce,
    "Scatter": scatter,
    "Gather": gather,
}


def starter(op: Op, group: Group, dtype: torch.dtype) -> tuple[StartMove, Transport]:
    """What starts an op that nothing differentiates, on operands of this dtype, and over what."""
    if op.size == 1 and op.kind != "CollectivePermute":
        return _alone, IN_GRAPH
    if op.kind in LOCAL or op.by != "sum" or (group.pg is None and op.backend != "gloo"):
        return _at_once, IN_GRAPH
    return MOVES[op.kind] if dtype in CARRIED else _carried, OnGroup(group)


def _alone(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    return (), lambda: lazy_clone(x) if out is None else x


def _at_once(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    result = out if out is not None and op.backend == "abstract" else traceable(x, op)
    return (), lambda: result


def _carried(x: Tensor, op: Op, via: Transport, out: Tensor | None) -> Started:
    """Of a dtype that transports do not carry as it is."""
    carried, back = as_carried(x)
    works, make = MOVES[op.kind](carried, op, via, None)
    return works, lambda: back(make())


def traceable(x: Tensor, op: Op) -> Tensor:
    """An op as torch.func, torch.compile and make_fx see through it; of an AbstractMesh, its result's shape."""
    if op.size == 1 and op.kind != "CollectivePermute":
        return x.clone()
    if op.kind in LOCAL:
        return MOVES[op.kind](x, op, IN_GRAPH, None)[1]()
    if op.backend == "abstract":
        return x.new_empty(output_shape(op, x.shape))
    carried, back = as_carried(x)
    _, make = MOVES[op.kind](carried, op, IN_GRAPH if op.group else TO_NOBODY, None)
    return back(make())
