"""The ragged AllToAll: blocks of as many rows as each happens to have, `Row[G_X, E, R, D] -> Row[G, E_X, R, D]`.

It moves X from one dim to another, as `all_to_all` does (Part 3), of an array that has a ragged dim: R, the number of
rows, differs by block (g, e). In memory the dims up to and with R are one, the blocks' rows one after another: this
rank's shard is [rows, D]. A rank sends the rows of E's first block to the first rank along X, and so on, and has what
it gets in the order of the ranks that sent it, G. How many rows those are, the ranks tell each other first: an AllToAll
of the counts, `n[G_X, E] -> n[G, E_X]`, is the same line without the ragged dim.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from scaling import trace
from scaling._torch import exchange_over, modes, process_group
from scaling.algebra.rules import collective_steps
from scaling.arguments import whole_numbers
from scaling.collectives.checked import agree_on
from scaling.collectives.linear import differentiated
from scaling.collectives.op import Op
from scaling.collectives.watch import who_watches
from scaling.spec import ShardingError, parse_line


def ragged_all_to_all(line: str, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], mesh) -> torch.Tensor:
    """x[rows, ...] -> [rows received, ...]: `sends[i]` rows, in order, go to rank i along the axes, which sends back
    nothing but its own: `receives[i]` rows come from it. Cotangent: the way back, with the two exchanged.

    Rows are counted in the order of the axes in the line. ShardingError if the line is no AllToAll, or the counts do
    not fit x or, on a checked mesh, each other. The trace counts real bytes: sent is what leaves this rank, V is the
    size of the group times what this rank holds, whose mean over the ranks is the whole array.
    """
    if (watch := who_watches()) is not None:
        return watch("ragged", line, x)
    (step,) = collective_steps("AllToAll", line)
    step.before.check_axes(mesh)
    step.after.check_axes(mesh)
    group = mesh.group(step.axes)
    sends, receives = (tuple(whole_numbers(name, n)) for name, n in (("sends", sends), ("receives", receives)))
    dims = len(step.before.dims) - 1 - max(step.dim, step.to)  # R, and what comes after it
    if not isinstance(x, torch.Tensor) or x.dim() != dims:
        found = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ShardingError(
            f"{line}\n  the rows are {found}\n  rule: dims up to R are one: {dims} in all\n  fix: flatten"
        )
    wrong = len(sends) != group.size or len(receives) != group.size or sum(sends) != len(x)
    if wrong or min(sends + receives) < 0 or sends[group.index] != receives[group.index]:
        raise ShardingError(
            f"{line}\n  {len(x)} rows cannot be sent as {sends} and received as {receives}\n"
            f"  rule: a count for each of the {group.size} ranks along {', '.join(step.axes)}; x has the rows "
            "sent, and what a rank keeps it receives\n  fix: exchange the counts by an AllToAll first"
        )
    op = Op.over(group, "AllToAll", f"{step.before} -> {step.after}")
    return exchange_blocks(x, sends, receives, *op) if differentiated(x) else _move(x, sends, receives, op)


def _move(x: torch.Tensor, sends: tuple, receives: tuple, op: Op) -> torch.Tensor:
    event = None
    if type(x) in (torch.Tensor, torch.nn.Parameter):  # not a tracer's, for which nothing runs
        _agree(x, sends, receives, op)
        event = trace.record(_event(x, sends, op)) if trace.open_logs else None
    result = _alltoall(x, sends, receives, op)
    if event is not None:
        trace.done(event)
    return result


def _event(x: torch.Tensor, sends: tuple, op: Op) -> trace.Event:
    line, row = parse_line(op.line), x.shape[1:].numel() * x.element_size()
    whole, sent = len(x) * row * op.size, (len(x) - sends[op.index]) * row
    return trace.Event("AllToAll", op.axes, line.operands[0], line.result, whole, sent, group=op.group)


def _alltoall(x: torch.Tensor, sends: tuple, receives: tuple, op: Op) -> torch.Tensor:
    if op.backend == "abstract":
        return x.new_empty((sum(receives), *x.shape[1:]))
    if op.size == 1:
        return x.clone()
    if not op.order:
        return exchange_over(x, receives, sends, op.group)
    # the process group lists its members in the mesh's order, not in the line's
    blocks = x.split(sends)
    x = torch.cat([blocks[block] for block in op.order])
    sends, receives = (tuple(counts[block] for block in op.order) for counts in (sends, receives))
    received = exchange_over(x, receives, sends, op.group).split(receives)
    return torch.cat([received[op.order.index(block)] for block in range(op.size)])


def _agree(x: torch.Tensor, sends: tuple, receives: tuple, op: Op) -> None:
    """On a checked mesh: all ranks make this call on rows of one shape, and expect what the others send."""
    agree_on(op, x[:0])
    if not op.checked or op.size == 1 or modes() > 0:
        return  # a tracer records the call, it does not make it
    pg = process_group(op.group)
    mine = torch.tensor([sends, receives], device=x.device)
    counts = [torch.empty_like(mine) for _ in range(op.size)]
    dist.all_gather(counts, mine, group=pg)
    blocks = [op.order.index(b) if op.order else b for b in range(op.size)]
    table = torch.stack([counts[member] for member in blocks])
    if not torch.equal(table[:, 0].T, table[:, 1]):
        raise ShardingError(
            f"{op.line}\n  the ranks send {table[:, 0].tolist()}, but expect {table[:, 1].tolist()}\n"
            f"  rule: what rank i sends to j is what j receives from i\n"
            f"  fix: exchange the counts by an AllToAll first"
        )


class _Exchange(torch.autograd.Function):
    """The ragged AllToAll under differentiation: linear, its transpose the way back."""

    @staticmethod
    def forward(x, sends, receives, *op):
        return _move(x, sends, receives, Op(*op))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.sends, ctx.receives, ctx.op = inputs[1], inputs[2], Op(*inputs[3:])

    @staticmethod
    def backward(ctx, cotangent):
        back = exchange_blocks(cotangent, ctx.receives, ctx.sends, *ctx.op._replace(line=_back(ctx.op.line)))
        return back, *(None,) * (2 + len(ctx.op))

    @staticmethod
    def jvp(ctx, tangent, *_):
        return exchange_blocks(tangent, ctx.sends, ctx.receives, *ctx.op)

    @staticmethod
    def vmap(info, in_dims, x, *args):
        return exchange_blocks(x.movedim(in_dims[0], -1), *args), x.dim() - 1


def exchange_blocks(x: torch.Tensor, *args) -> torch.Tensor:
    return _Exchange.apply(x, *args)


@lru_cache(maxsize=1024)
def _back(line: str) -> str:
    """The types of the transpose; the cotangent of an unreduced array is replicated."""
    parsed = parse_line(line)
    return f"{parsed.result.cotangent()} -> {parsed.operands[0].cotangent()}"
