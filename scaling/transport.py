"""How data moves when nothing is differentiated or compiled: each `Op` on the process group, at no extra cost.

Over gloo an AllGather sends each block straight into its place, and a ReduceScatter is an AllToAll and a local sum:
gloo's own copies everything once more, and is an AllReduce inside, with twice the bytes.
"""

import torch
import torch.distributed as dist

from scaling.mesh import Group
from scaling.op import Op
from scaling.traceable import add, join, reorder, split, split_major, traceable

TAG = 1 << 20  # of the messages of a collective, so that they never meet those of send and recv


def to_everyone(mine: torch.Tensor, blocks: torch.Tensor, group: Group) -> list:
    """AllGather over gloo: each rank sends its block to every other, straight into its place.

    Takes 0.75 of the CPU time of gloo's own, which receives into a buffer of its own and copies from there.
    """
    n, me = group.size, group.index
    others = [(me + k) % n for k in range(1, n)]
    works = [dist.irecv(blocks[b], group.ranks[group.member_of(b)], group.pg, TAG) for b in reversed(others)]
    works += [dist.isend(mine, group.ranks[group.member_of(b)], group.pg, TAG) for b in others]
    blocks[me] = mine
    return works


class Works:
    """Several pieces of work, waited for as one; at once unless `async_op`."""

    def __init__(self, works: list, async_op: bool):
        self.works = works
        if not async_op:
            self.wait()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def start(x: torch.Tensor, op: Op, group: Group, async_op: bool, out: torch.Tensor | None = None):
    """Start an op on the process group: (work to wait for or None, a function that then makes the result).

    `out` is a buffer that the result may be made in, where that saves a copy: of an AllReduce, the operand itself.
    Gathered and scattered dims are outermost in memory: what is copied is then a shard, never the whole array.
    """
    pg, n = group.pg, op.size
    if n == 1 and op.kind not in ("CollectivePermute", "Slice"):
        return None, lambda: x
    if pg is None or op.kind not in ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"):
        result = traceable(x, op)
        return None, lambda: result
    if op.kind == "AllReduce":
        total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return dist.all_reduce(total, group=pg, async_op=async_op), lambda: total
    if op.kind == "AllGather":
        mine = x.movedim(op.dim, 0).contiguous()
        if out is not None and out.movedim(op.dim, 0).is_contiguous():
            blocks = out.movedim(op.dim, 0).unflatten(0, (n, len(mine)))
        else:
            blocks = mine.new_empty((n, *mine.shape))
        if op.backend == "gloo":
            return Works(to_everyone(mine, blocks, group), async_op), lambda: blocks.flatten(0, 1).movedim(0, op.dim)
        work = pg._allgather_base(blocks, mine)
        return work, lambda: reorder(blocks, op.order, inverse=True).flatten(0, 1).movedim(0, op.dim)
    if op.kind == "AllToAll":
        sent = reorder(split(x, n, op.to), op.order).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=pg, async_op=async_op)
        return work, lambda: join(reorder(received, op.order, inverse=True), op.dim)
    sent = reorder(split_major(x, op), op.order)
    if op.backend == "gloo":
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=pg, async_op=async_op)
        into = None if out is None else out.movedim(op.dim, 0)
        return work, lambda: add(received, into).movedim(0, op.dim)
    mine = torch.empty_like(sent[0])
    work = pg._reduce_scatter_base(mine, sent)
    return work, lambda: mine.movedim(0, op.dim)
