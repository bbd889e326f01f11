"""How data moves when nothing is differentiated or compiled: each `Op` on the process group, at no extra cost.

Over gloo an AllGather sends each block straight into its place, and a ReduceScatter is an AllToAll and a local sum:
gloo's own copies everything once more, and is an AllReduce inside, with twice the bytes.
"""

import torch

from scaling.collectives.op import Op
from scaling.collectives.traced import add, ends, join, reorder, split, split_major, traceable
from scaling.mesh import Group

TAG = 1 << 20  # of the messages of a collective, so that they never meet those of send and recv


class Works:
    """Several pieces of work, waited for as one."""

    def __init__(self, works: list):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def to_everyone(mine: torch.Tensor, blocks: torch.Tensor, group: Group) -> Works:
    """AllGather over gloo: each rank sends its block to every other, straight into its place.

    Takes 0.75 of the CPU time of gloo's own, which receives into a buffer of its own and copies from there.
    """
    n, me, pg = group.size, group.index, group.pg
    members = [group.member_of((me + k) % n) for k in range(1, n)]
    works = [pg.recv([blocks[group.block_of(m)]], m, TAG) for m in reversed(members)]
    works += [pg.send([mine], m, TAG) for m in members]
    if blocks[me].data_ptr() != mine.data_ptr():
        blocks[me] = mine
    return Works(works)


def to_neighbour(x: torch.Tensor, op: Op, group: Group):
    """CollectivePermute, as `start`. Over gloo one message each way: an AllToAll sends empty ones to all others."""
    sends, receives = ends(op)
    received = torch.empty_like(x, memory_format=torch.contiguous_format) if receives else torch.zeros_like(x)
    if op.backend != "gloo":
        sent, into = (y.view(-1) if to else y.new_empty(0) for y, to in ((x.contiguous(), sends), (received, receives)))
        splits = [[x.numel() if m in members else 0 for m in range(op.size)] for members in (receives, sends)]
        return group.pg.alltoall_base(into, sent, *splits), lambda: received
    if receives and receives == [group.member_of(op.index)]:
        return None, lambda: received.copy_(x)
    sent, pg = x.contiguous(), group.pg
    works = [pg.recv([received], m, TAG) for m in receives] + [pg.send([sent], m, TAG) for m in sends]
    return Works(works), lambda: received


def start(x: torch.Tensor, op: Op, group: Group, out: torch.Tensor | None = None):
    """Start an op on the process group: (work to wait for or None, a function that then makes the result).

    `out` is a buffer that the result may be made in, where that saves a copy: of an AllReduce, the operand itself.
    Gathered and scattered dims are outermost in memory: what is copied is then a shard, never the whole array. The
    process group is called directly: `torch.distributed`'s functions around it cost as much as a small collective.
    """
    pg, n, dim = group.pg, op.size, op.dim
    if n == 1 and op.kind not in ("CollectivePermute", "Slice"):
        return None, lambda: x
    if pg is not None and op.kind == "CollectivePermute":
        return to_neighbour(x, op, group)
    if pg is None or op.kind not in ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"):
        result = traceable(x, op)
        return None, lambda: result
    if op.kind == "AllReduce":
        total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return pg.allreduce([total]), lambda: total
    if op.kind == "AllGather":
        mine = (x.movedim(dim, 0) if dim else x).contiguous()
        in_place = op.backend == "gloo" or not op.order  # other backends' blocks arrive in members' order
        if out is not None and in_place and out.movedim(dim, 0).is_contiguous():
            blocks = out.movedim(dim, 0).unflatten(0, (n, len(mine)))
        else:
            blocks = mine.new_empty((n, *mine.shape))
        if op.backend == "gloo":
            return to_everyone(mine, blocks, group), lambda: joined(blocks, dim)
        return pg._allgather_base(blocks.flatten(0, 1), mine), lambda: joined(
            reorder(blocks, op.order, inverse=True), dim
        )
    if op.kind == "AllToAll":
        sent = reorder(split(x, n, op.to), op.order).contiguous()
        received = torch.empty_like(sent)
        work = pg.alltoall_base(received, sent, [], [])
        return work, lambda: join(reorder(received, op.order, inverse=True), dim)
    sent = reorder(split_major(x, op), op.order)
    if op.backend != "gloo":
        mine = torch.empty_like(sent[0])
        return pg._reduce_scatter_base(mine, sent.flatten(0, 1)), lambda: mine.movedim(0, dim)
    received = torch.empty_like(sent)
    into = out.movedim(dim, 0) if out is not None else None
    if into is not None and not into.is_contiguous():
        into = None  # to add first and transpose after is the quicker way
    return pg.alltoall_base(received, sent, [], []), lambda: add(received, into).movedim(0, dim)


def joined(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, m, ...] -> [..., n*m, ...], a view: the dim stays outermost in memory."""
    whole = blocks.flatten(0, 1)
    return whole.movedim(0, dim) if dim else whole
