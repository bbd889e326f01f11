"""Move an array from one mesh to another, whose ranks may differ: `transfer("A[I_X] -> A[I_Y]", x, a, b)`.

The first type applies to the source mesh, the second to the target. The plan is data: each target rank receives its
block in pieces, one from each block of the source that overlaps it. Among the ranks that hold a replica of that block,
the one with least to send so far sends it. So every rank receives each element that it needs once, and no others.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaling import trace
from scaling.collectives.checked import alike
from scaling.collectives.linear import differentiated, who_watches
from scaling.collectives.lines import check_operand
from scaling.collectives.op import as_carried
from scaling.mesh.lost import naming
from scaling.spec import Line, ShardingError, Spec, parse_line, refuse

TAG = 1 << 22  # the tag of these messages

Region = tuple[tuple[int, int], ...]  # (start, stop) of each dim, in the whole array


class Message(NamedTuple):
    """A piece of the array from one rank of the run to another, or a copy if both are the same rank."""

    source: int
    target: int
    region: Region

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(stop - start for start, stop in self.region)


def plan_transfer(line: "str | Line", shape, source_mesh, target_mesh, *, into=None, below=None) -> list[Message]:
    """Return who sends what to whom for an array of this whole shape. Meshes need sizes, ranks and coord_of.

    `into` and `below` are as in `transfer`.
    """
    parsed = parse_line(line)
    before, after = _types(parsed, source_mesh, target_mesh)
    holders: dict[Region, list[int]] = {}
    for rank, region in _blocks(before, shape, source_mesh):
        holders.setdefault(region, []).append(rank)
    load = dict.fromkeys(source_mesh.ranks, 0)
    messages = []
    below = tuple(shape) if below is None else tuple(below)
    for target, wanted in _blocks(after, into or shape, target_mesh):
        for held, ranks in holders.items():
            piece = tuple((max(a, c), min(b, d, e)) for (a, b), (c, d), e in zip(held, wanted, below, strict=True))
            if any(start >= stop for start, stop in piece):
                continue
            source = target if target in ranks else min(ranks, key=lambda rank: (load[rank], rank))
            messages.append(Message(source, target, piece))
            if source != target:
                load[source] += messages[-1].numel
    return messages


def transfer(
    line: "str | Line",
    x: Tensor | None,
    source_mesh,
    target_mesh,
    *,
    into: Sequence[int] | None = None,
    below: Sequence[int] | None = None,
) -> Tensor | None:
    """Return the target's shard of x: `"A[I_X, J] -> A[I, J_Y]"`, with types on the source mesh and on the target.

    All ranks of both meshes call it; ranks outside the source pass None, and ranks outside the target get None. Shape
    and dtype come with the array. It is traced as "Transfer", with the bytes that a rank sends, and is not
    differentiable.

    Args:
        line: the types before and after.
        x: this rank's shard on the source mesh, or None.
        source_mesh: the mesh that has the array.
        target_mesh: the mesh that gets it.
        into: the whole shape of the target's array, if its sizes differ.
        below: for each dim, only indices below this are sent. Elements that are not sent are zero.

    Raises:
        ShardingError: the types do not go together, there are partial sums, or a rank gives x where it should not.
    """
    parsed = parse_line(line)
    before, after = _types(parsed, source_mesh, target_mesh)
    if (watch := who_watches()) is not None:
        return watch.transferred(parsed, x, source_mesh, target_mesh, into)
    me = dist.get_rank() if dist.is_initialized() else 0
    gives, takes = me in source_mesh.ranks, me in target_mesh.ranks
    if gives is (x is None):
        who = "is one" if gives else "is none"
        rule = "the ranks of the source mesh give their shard, all others None"
        what = f"rank {me} {who} of the source's ranks {list(source_mesh.ranks)}"
        refuse(f"transfer: {parsed}", what, rule, "x if rank in source_mesh.ranks else None")
    if x is not None:
        check_operand("transfer", Line((before,), before), source_mesh.group(()), x, source_mesh)
        if differentiated(x):
            raise ShardingError(f"transfer: {parsed} is not differentiable\n  fix: give x.detach()")
        alike(source_mesh, f"transfer {parsed}", to=target_mesh, x=x, into=into, below=below)
    if not gives and not takes:
        return None
    shape, dtype = _announced(parsed, x, before, source_mesh, target_mesh, me)
    into = tuple(shape if into is None else _wholes(parsed, "into", into, shape))
    below = None if below is None else _wholes(parsed, "below", below, shape)
    messages = plan_transfer(parsed, shape, source_mesh, target_mesh, into=into, below=below)
    sent = sum(m.numel for m in messages if m.source == me != m.target) * dtype.itemsize
    came = sum(m.numel for m in messages if m.target == me != m.source) * dtype.itemsize
    event = trace.Event("Transfer", (), before, after, sent + came, sent, start=trace.now())
    if trace.open_logs:
        trace.record(event)
    own = _region(before, shape, source_mesh, source_mesh.ranks.index(me)) if gives else ()
    place = _region(after, into, target_mesh, target_mesh.ranks.index(me)) if takes else ()
    result = torch.zeros([b - a for a, b in place], dtype=dtype, device=target_mesh.device) if takes else None
    with naming(f"transfer {parsed}", dist.group.WORLD):
        _exchange(messages, x, own, result, place, me)
    trace.done(event)
    return result


def _wholes(line: Line, name: str, sizes: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Raise a ShardingError unless `sizes` has a whole number for each dim."""
    found = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
    if len(found) != len(shape) or not all(type(n) is int and n >= 0 for n in found):
        rule = f"{name} has a size of at least 0 for each of the {len(shape)} dims"
        refuse(f"transfer: {line}", f"{name}={sizes!r:.60}", rule, "give a tuple of ints, or leave it out")
    return found


def _types(line: Line, source_mesh, target_mesh) -> tuple[Spec, Spec]:
    if len(line.operands) != 1 or line.operands[0].dim_names != line.result.dim_names:
        rule = "one array, of the same dims in the same order on both meshes"
        raise ShardingError(f"transfer: {line}\n  rule: {rule}\n  fix: rename or permute it before or after")
    before, after = line.operands[0], line.result
    if before.unreduced or after.unreduced:
        raise ShardingError(f"transfer: {line}\n  rule: partial sums stay on their mesh\n  fix: all_reduce first")
    before.check_axes(source_mesh)
    after.check_axes(target_mesh)
    return before, after


def _blocks(spec: Spec, shape, mesh) -> Iterable[tuple[int, Region]]:
    """Yield (rank of the run, the region that it holds) for every rank of the mesh."""
    for i, rank in enumerate(mesh.ranks):
        yield rank, _region(spec, shape, mesh, i)


def _region(spec: Spec, shape, mesh, i: int) -> Region:
    return tuple((part.start, part.stop) for part in spec.slices(tuple(shape), mesh, mesh.coord_of(i)))


def _announced(line: Line, x, before: Spec, source_mesh, target_mesh, me: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the whole shape and the dtype, which a source rank tells each target rank that has no shard."""
    learners = [rank for rank in target_mesh.ranks if rank not in source_mesh.ranks]
    teachers = {rank: source_mesh.ranks[i % len(source_mesh.ranks)] for i, rank in enumerate(learners)}
    if x is None:
        theirs: list[Any] = [None, None, None]
        dist.recv_object_list(theirs, teachers[me])
        if theirs[0] != str(line):
            what, rule = (
                f"rank {teachers[me]} calls transfer: {theirs[0]}",
                "the ranks of both meshes make the same call",
            )
            refuse(f"transfer: {line}", what, rule, "write one line for all of them")
        return theirs[1], theirs[2]
    shape = tuple(n * source_mesh.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True))
    for rank in (rank for rank, teacher in teachers.items() if teacher == me):
        dist.send_object_list([str(line), shape, x.dtype], rank)
    return shape, x.dtype


def _exchange(messages: list[Message], x, own: Region, result, place: Region, me: int) -> None:
    """Send this rank's pieces of x, its block `own`, and write the arriving pieces to `result`, its block `place`."""
    ops, arriving = [], []
    for message in messages:
        if message.source == me:
            piece = x[_within(message.region, own)].contiguous()
            if message.target == me:
                result[_within(message.region, place)] = piece
            else:
                ops.append(dist.P2POp(dist.isend, as_carried(piece)[0], message.target, tag=TAG))
        elif message.target == me:
            piece = result.new_empty([b - a for a, b in message.region])
            ops.append(dist.P2POp(dist.irecv, as_carried(piece)[0], message.source, tag=TAG))
            arriving.append((message.region, piece))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for region, piece in arriving:
        result[_within(region, place)] = piece


def _within(region: Region, block: Region) -> tuple[slice, ...]:
    """Return the region's place in a block that contains it."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(region, block, strict=True))
