"""How data moves when nothing is differentiated or compiled: on the process group, at no extra cost.

Each function starts a collective of more than one rank and returns (what to wait for, a function that then makes the
result). `out` is the preallocated output; it is returned as the result if that was made there. Over gloo an
AllGather sends each block straight into its place, and a ReduceScatter is an AllToAll and a local sum: gloo's own
copies everything once more, and is an AllReduce inside, with twice the bytes. Gathered and scattered dims are outermost
in memory: what is copied is then a shard, never the whole array.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaling._torch import Nowhere, exchange_into, gather_into, scatter_sum_into
from scaling.collectives.op import Op
from scaling.collectives.traced import combine_parts, ends, join, reorder, split_dim, split_major
from scaling.mesh import Group

NOWHERE: Any = Nowhere()  # stands for the process group on an AbstractMesh
TAG = 1 << 20  # of the messages of a collective, so that they never meet those of send and recv
Started = tuple[Sequence[Any], Callable[[], Tensor]]
Start = Callable[[Tensor, Op, Group, "Tensor | None"], Started]


def all_reduce(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return [(group.pg or NOWHERE).allreduce([total])], lambda: total


def all_gather(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    n, dim = op.size, op.dim
    mine = (x.movedim(dim, 0) if dim else x).contiguous()
    blocks = None
    if out is not None and (op.backend == "gloo" or not op.order):  # others deliver in members' order
        whole = out.movedim(dim, 0) if dim else out
        blocks = whole.view(n, *mine.shape) if whole.is_contiguous() else None
    if blocks is None:
        out, blocks = None, mine.new_empty((n, *mine.shape))
    if op.backend == "gloo":
        return _to_everyone(mine, blocks, group), partial(_joined, blocks, dim, (), out)
    work = gather_into(blocks.flatten(0, 1), mine, group.pg)
    return [work], partial(_joined, blocks, dim, op.order, out)


def reduce_scatter(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    dim = op.dim
    sent = reorder(split_major(x, op), op.order)
    if op.backend != "gloo":
        mine = torch.empty_like(sent[0])
        return [scatter_sum_into(mine, sent.flatten(0, 1), group.pg)], lambda: mine.movedim(0, dim)
    received = torch.empty_like(sent)
    works = [exchange_into(received, sent, group.pg or NOWHERE)]
    into = None if out is None else out.movedim(dim, 0) if dim else out
    if into is None or not into.is_contiguous():  # to add first and transpose after is the quicker way
        return works, lambda: combine_parts(received, op.by).movedim(0, dim)

    def add() -> Any:
        combine_parts(received, op.by, into)
        return out

    return works, add


def all_to_all(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    sent = reorder(split_dim(x, op.size, op.to), op.order).contiguous()
    received = torch.empty_like(sent)
    works = [exchange_into(received, sent, group.pg or NOWHERE)]
    return works, lambda: join(reorder(received, op.order, inverse=True), op.dim)


def permute(x: Tensor, op: Op, group: Group, out: Tensor | None) -> Started:
    """Over gloo one message each way: an AllToAll sends empty ones to all others."""
    sends, receives = ends(op)
    received = torch.empty_like(x, memory_format=torch.contiguous_format) if receives else torch.zeros_like(x)
    if op.backend != "gloo":
        sent, into = (y.view(-1) if to else y.new_empty(0) for y, to in ((x.contiguous(), sends), (received, receives)))
        splits = [[x.numel() if m in members else 0 for m in range(op.size)] for members in (receives, sends)]
        return [exchange_into(into, sent, group.pg, *splits)], lambda: received
    if receives and receives == [group.member_of(op.index)]:
        return (), lambda: received.copy_(x)
    sent, pg = x.contiguous(), group.pg or NOWHERE
    works = [pg.recv([received], m, TAG) for m in receives] + [pg.send([sent], m, TAG) for m in sends]
    return works, lambda: received


def _to_everyone(mine: Tensor, blocks: Tensor, group: Group) -> list[Any]:
    """AllGather over gloo: each rank sends its block to every other, straight into its place.

    Takes 0.75 of the CPU time of gloo's own, which receives into a buffer of its own and copies from there.
    """
    pg, works = group.pg, list[Any]()
    if pg is None:  # of thousands of ranks it would be thousands of messages to nobody
        return [NOWHERE.send(mine, blocks)]
    for block, member in reversed(group.others):
        works.append(pg.recv([blocks[block]], member, TAG))
    for _, member in group.others:
        works.append(pg.send([mine], member, TAG))
    own = blocks[group.index]
    if own.data_ptr() != mine.data_ptr():  # else an AllGather in place: mine is its block of the buffer
        own.copy_(mine)
    return works


def _joined(blocks: Tensor, dim: int, order: tuple[int, ...], out: Tensor | None) -> Tensor:
    """[n, m, ...] -> [..., n*m, ...], a view: the dim stays outermost in memory. `out`, if it was made there."""
    if out is not None:
        return out
    whole = (reorder(blocks, order, inverse=True) if order else blocks).flatten(0, 1)
    return whole.movedim(0, dim) if dim else whole
