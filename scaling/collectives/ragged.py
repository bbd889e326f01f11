"""The ragged AllToAll: its blocks have any number of rows, `Row[G_X, E, R, D] -> Row[G, E_X, R, D]`.

It moves X from one dim to another, as `all_to_all` does (Part 3), in an array with a ragged dim: R, the number of rows,
differs by block (g, e). In memory the dims up to and including R are one, with the blocks' rows in sequence, so that
this rank's shard is [rows, D]. A rank sends the rows of E's first block to the first rank along X, and so on, and gets
rows in the order of the ranks that sent them, G. The ranks first tell each other the numbers of rows by an AllToAll of
the counts, `n[G_X, E] -> n[G, E_X]`, which is the same line without the ragged dim.
"""

from collections.abc import Sequence

import torch

from scaling.algebra.rules import collective_steps
from scaling.collectives.linear import differentiable, who_watches
from scaling.collectives.op import Op
from scaling.common.arguments import whole_numbers
from scaling.spec import ShardingError


def ragged_all_to_all(line: str, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], mesh) -> torch.Tensor:
    """x[rows, ...] -> [rows received, ...]: send `sends[i]` rows to rank i along the axes, and receive `receives[i]`.

    Rows are sent in order, and ranks count in the order of the axes in the line. Cotangent: the reverse, with `sends`
    and `receives` exchanged. The trace counts real bytes: sent is what leaves this rank; V is the size of the group
    times the bytes that this rank holds, whose mean over the ranks is the whole array.

    Raises:
        ShardingError: the line is not an AllToAll, or the counts do not fit x or, on a checked mesh, each other.
    """
    if (watch := who_watches()) is not None:
        return watch.ragged(line, x)
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
    line = f"{step.before} -> {step.after}"
    return differentiable(x, *Op.over(group, "Ragged", line, sends=sends, receives=receives))
