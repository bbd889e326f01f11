"""The two transports that the kinds of collectives run over (`scaling.collectives.kinds`).

`OnGroup` is the process group itself, at no extra cost, for what nothing differentiates or compiles: what is sent is
waited for later. `InGraph` is torch's functional collectives, which torch.func, torch.compile and make_fx see through.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaling.collectives.op import Op
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

NOWHERE: Any = Nowhere()  # stands for the process group on an AbstractMesh
TAG = 1 << 20  # of the messages of a collective, so that they never meet those of send and recv


class OnGroup:
    """The process group. Each method starts to send and returns what to wait for, and what is then filled."""

    def __init__(self, group: Group):
        self.group, self.pg = group, group.pg or NOWHERE

    def total(self, x: Tensor, op: Op, out: Tensor | None):
        """The sum; in x itself, if that is `out`."""
        total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return [self.pg.allreduce([total])], total

    def gather(self, mine: Tensor, op: Op, into: Tensor | None):
        """[...] -> [n, ...], and in which order the blocks come. Over gloo each rank sends its block to every other,
        straight into its place: 0.75 of the CPU time of gloo's own, which copies from a buffer of its own."""
        blocks = mine.new_empty((op.size, *mine.shape)) if into is None else into
        if op.backend != "gloo":
            return [gather_into(blocks.flatten(0, 1), mine, self.pg)], blocks, op.order
        if self.group.pg is None:  # of thousands of ranks it would be thousands of messages to nobody
            return [NOWHERE.send(mine, blocks)], blocks, ()
        works: list[Any] = []
        for block, member in reversed(self.group.others):
            works.append(self.pg.recv([blocks[block]], member, TAG))
        for _, member in self.group.others:
            works.append(self.pg.send([mine], member, TAG))
        own = blocks[op.index]
        if own.data_ptr() != mine.data_ptr():  # else an AllGather in place: mine is its block of the buffer
            own.copy_(mine)
        return works, blocks, ()

    def scatter_sum(self, blocks: Tensor, op: Op):
        mine = torch.empty_like(blocks[0])
        return [scatter_sum_into(mine, blocks.flatten(0, 1), self.pg)], mine

    def exchange(self, rows: Tensor, op: Op, sends: Sequence[int] = (), receives: Sequence[int] = ()):
        """Rows to members: equal numbers of them, or as `sends` and `receives` say."""
        rows = rows.contiguous()
        received = rows.new_empty((sum(receives), *rows.shape[1:])) if receives else torch.empty_like(rows)
        return [exchange_into(received, rows, self.pg, receives, sends)], received

    def pass_on(self, x: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
        """To a member and from one. Over gloo one message each way: an AllToAll sends empty ones to all others."""
        if op.backend != "gloo":
            return _pass_by_exchange(self, x, op, sends, receives)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        if receives == [op.member(op.index)]:
            return (), received.copy_(x)
        x = x.contiguous()
        works = [self.pg.recv([received], member, TAG) for member in receives]
        return works + [self.pg.send([x], member, TAG) for member in sends], received


class InGraph:
    """The same in a graph: nothing is left to wait for."""

    def total(self, x: Tensor, op: Op, out: Tensor | None):
        return (), sum_over(x, op.group)

    def gather(self, mine: Tensor, op: Op, into: Tensor | None):
        return (), gather_over(mine[None], op.size, op.group), op.order

    def scatter_sum(self, blocks: Tensor, op: Op):
        return (), scatter_sum_over(blocks.flatten(0, 1), op.size, op.group)

    def exchange(self, rows: Tensor, op: Op, sends: Sequence[int] = (), receives: Sequence[int] = ()):
        ones = [1] * op.size
        return (), exchange_over(rows, receives or ones, sends or ones, op.group)

    def pass_on(self, x: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
        return _pass_by_exchange(self, x, op, sends, receives)


IN_GRAPH = InGraph()
TO_NOBODY = OnGroup(Group((), 0, 0, "gloo"))  # on an AbstractMesh that makes gloo's buffers
Transport = OnGroup | InGraph


def _pass_by_exchange(via: Transport, x: Tensor, op: Op, sends: Sequence[int], receives: Sequence[int]):
    """An AllToAll, all splits but one empty."""
    flat = x.flatten()
    sent, received = ([flat.numel() if m in ends else 0 for m in range(op.size)] for ends in (sends, receives))
    works, got = via.exchange(flat if sends else flat[:0], op, sent, received)
    return works, got.view(x.shape) if receives else got
