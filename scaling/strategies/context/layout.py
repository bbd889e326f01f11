"""The positions of each rank's tokens along the sequence, which determine how much each rank computes.

A rank holds its part of the sequence as ranges of positions: in plain order one chunk, in zig-zag order two, one as
early as the other is late.
"""

from collections.abc import Sequence

import torch

from scaling.algebra.rules import refuse_rule
from scaling.collectives import all_gather, ppermute
from scaling.common.arguments import flag, whole
from scaling.models.tiles import Mask, Ranges
from scaling.spec import ShardingError, format_axes

FORMS = ("ring", "zigzag", "gather", "ulysses", "usp")


def chunks(form: str, t: int, C: int, c: int) -> Ranges:
    """Return the t positions that rank c of C holds: in zig-zag order the chunks c and 2C-1-c, each t/2 long."""
    if form != "zigzag":
        return (range(c * t, (c + 1) * t),)
    half = t // 2
    return tuple(range(i * half, (i + 1) * half) for i in (c, 2 * C - 1 - c))


def positions(form: str, t: int, mesh, axis: str | Sequence[str] = "C") -> torch.Tensor:
    """int64[T_C]: the positions of this rank's t tokens, for a rotary embedding. `axis` as in `attention`."""
    group = mesh.group((axis,) if axis in mesh.sizes else tuple(axis))
    whole(t=t)
    check_length(form, t * group.size, group.size)
    parts = [torch.arange(r.start, r.stop, device=mesh.device) for r in chunks(form, t, group.size, group.index)]
    return torch.cat(parts)


def work(form: str, T: int, C: int, *, causal: bool = True, window: int | None = None) -> list[float]:
    """Return the scores per head, pairs of a query and a key, that each rank computes of a sequence of T.

    For ulysses, whose ranks have all T positions of N/C heads, this is the mean over the N heads. For usp, C is the
    ring. Scores that segments hide are still computed, and counted. T must divide as the form needs (ShardingError).
    """
    whole(T=T, C=C, window=1 if window is None else window)
    flag(causal=causal)
    check_length(form, T, C)
    mask, every = Mask(causal, window), (range(T),)
    if form == "ulysses":
        return [mask.pairs(every, every) / C] * C
    return [float(mask.pairs(chunks(form, T // C, C, c), every)) for c in range(C)]


def check_length(form: str, T: int, C: int, line: str = "Q[B, T_C, N, H]") -> None:
    """Raise a ShardingError unless T divides over C ranks, and for zig-zag into two chunks per rank."""
    if form not in FORMS:
        raise ValueError(f"context parallelism has no form {form!r}\n  fix: choose one of {', '.join(FORMS)}")
    parts = 2 * C if form == "zigzag" else C
    if T % parts:
        refuse_rule(
            line,
            form,
            f"T={T} does not divide into {parts} chunks on {C} ranks",
            "every rank holds as many tokens as the others; in the zig-zag order, in two chunks of one length",
            f"pad T to {-(-T // parts) * parts}, and give the padding a segment of its own and no weight in the loss",
        )


def to_zigzag(x: torch.Tensor, dim: int, mesh, axis: str = "C") -> torch.Tensor:
    """Move x, whose dim is split over the axis, from plain order (rank c has chunks 2c and 2c+1) to zig-zag order.

    Rank c then has the chunks c and 2C-1-c, as attention by zig-zag needs its operands. This takes two
    CollectivePermutes of half a shard, and is differentiable.
    """
    return _exchange(x, dim, mesh, axis, back=False)


def from_zigzag(x: torch.Tensor, dim: int, mesh, axis: str = "C") -> torch.Tensor:
    """Invert `to_zigzag`."""
    return _exchange(x, dim, mesh, axis, back=True)


def _exchange(x: torch.Tensor, dim: int, mesh, axis: str, back: bool) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        dims = f"{x.dim()} dims" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ShardingError(f"zig-zag order of dim {dim!r} of {dims}\n  fix: name the dim of a tensor that is T")
    C, c, dim = mesh.group((axis,)).size, mesh.group((axis,)).index, dim % x.dim()
    letters = [f"T_{format_axes((axis,))}" if i == dim else chr(ord("A") + i) for i in range(x.dim())]
    line = f"x[{', '.join(letters)}]"
    check_length("zigzag", C * x.shape[dim], C, line)
    if torch.compiler.is_compiling():
        return _from_whole(all_gather(f"{line} -> {line.replace(letters[dim], 'T')}", x, mesh), dim, C, c, back)
    halves = x.chunk(2, dim)
    # Either c or 2C-1-c is even. In zig-zag order rank c has the even chunk first or second, in plain order always
    # first. So each rank sends one half among the ranks of even chunks, and one among the ranks of odd chunks.
    even = [(i, min(2 * i, 2 * C - 1 - 2 * i)) for i in range(C)]
    odd = [(i, min(2 * i + 1, 2 * C - 2 - 2 * i)) for i in range(C)]
    if back:
        halves = halves if c % 2 == 0 else halves[::-1]
        even, odd = ([(target, source) for source, target in perm] for perm in (even, odd))
    moved = [ppermute(line, half, mesh, axis, perm) for half, perm in zip(halves, (even, odd), strict=True)]
    return torch.cat(moved if back or c % 2 == 0 else moved[::-1], dim)


def _from_whole(x: torch.Tensor, dim: int, C: int, c: int, back: bool) -> torch.Tensor:
    """Return rank c's two of the 2C chunks of the gathered x, for a compiled graph, which cannot hold a ppermute."""
    order = [i for r in range(C) for i in (r, 2 * C - 1 - r)]  # of the chunks, in zig-zag order
    mine = [order.index(2 * c), order.index(2 * c + 1)] if back else [c, 2 * C - 1 - c]
    chunks = x.chunk(2 * C, dim)
    return torch.cat([chunks[i] for i in mine], dim)
