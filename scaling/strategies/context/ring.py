"""Three ways to bring keys and values to the queries of each rank: round a ring, gathered, or in exchange for heads.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

The lines name the axes of the sequence alone, on the view `mesh.sliced`. Other axes may split B or the heads; the ranks
that share a place along them then run the lines, without the other ranks.

A rank holds its part of the sequence as ranges of positions, which determine how much it computes: in plain order one
chunk, in zig-zag order two, one as early as the other is late.

Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): queries stay. At every hop each rank attends to the
block of keys that it holds, while it sends that block to the next rank and receives one from the rank before. The
results of blocks are merged by the log of the softmax's denominator. In the backward pass the blocks go round again,
followed by their gradients, to which every rank adds its part. In zig-zag order (rank c has the chunks c and 2C-1-c, of
2C) all ranks compute equally much at every hop. On one rank this is plain attention.

Gathered (as Llama 3 was trained, arXiv:2407.21783, section 3.3.2): the same passes with a single hop, in which all keys
are present. The backward pass gathers again, so that nothing longer than T_C is kept, and reduce-scatters dK and dV, in
float32 or wider.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank attends over the whole sequence, for its heads. An
AllToAll moves the axis from the sequence to the heads, and another moves it back. With a second, outer axis the
sequence stays split over that axis, and attention inside is a ring over it (USP: Fang and Zhao 2024, arXiv:2405.07719).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import lcm
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_to_all, ppermute, reduce_scatter, wait
from scaling.common.arguments import flag, one_of, whole
from scaling.mesh import AbstractMesh
from scaling.models.blockwise import KeyBlock
from scaling.models.tiles import Mask, Ranges
from scaling.spec import ShardingError, format_axes, refuse

FORMS = ("ring", "zigzag", "gather", "ulysses", "usp")


def chunks(form: str, t: int, C: int, c: int) -> Ranges:
    """Return the t positions that rank c of C holds: in zig-zag order the chunks c and 2C-1-c, each t/2 long."""
    if form != "zigzag":
        return (range(c * t, (c + 1) * t),)
    half = t // 2
    return tuple(range(i * half, (i + 1) * half) for i in (c, 2 * C - 1 - c))


def positions(form: str, t: int, mesh, axis: str | Sequence[str] = "C") -> Tensor:
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
    one_of("form", form, FORMS)
    parts = 2 * C if form == "zigzag" else C
    if T % parts:
        refuse(
            f"{form}: {line}",
            f"T={T} does not divide into {parts} chunks on {C} ranks",
            "every rank holds as many tokens as the others; in the zig-zag order, in two chunks of one length",
            f"pad T to {-(-T // parts) * parts}, and give the padding a segment of its own and no weight in the loss",
        )


def to_zigzag(x: Tensor, dim: int, mesh, axis: str = "C") -> Tensor:
    """Move x, whose dim is split over the axis, from plain order (rank c has chunks 2c and 2c+1) to zig-zag order.

    Rank c then has the chunks c and 2C-1-c, as attention by zig-zag needs its operands. This takes two
    CollectivePermutes of half a shard, and is differentiable.
    """
    return _exchange(x, dim, mesh, axis, back=False)


def from_zigzag(x: Tensor, dim: int, mesh, axis: str = "C") -> Tensor:
    """Invert `to_zigzag`."""
    return _exchange(x, dim, mesh, axis, back=True)


def _exchange(x: Tensor, dim: int, mesh, axis: str, back: bool) -> Tensor:
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        dims = f"{x.dim()} dims" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ShardingError(f"zig-zag order of dim {dim!r} of {dims}\n  fix: name the dim of a tensor that is T")
    C, c, dim = mesh.group((axis,)).size, mesh.group((axis,)).index, dim % x.dim()
    letters = ["B", "N", "H", *ascii_lowercase][: x.dim() - 1]
    letters.insert(dim, f"T_{format_axes((axis,))}")
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
    moved = [ppermute(line, half, mesh.sliced, axis, perm) for half, perm in zip(halves, (even, odd), strict=True)]
    return torch.cat(moved if back or c % 2 == 0 else moved[::-1], dim)


def _from_whole(x: Tensor, dim: int, C: int, c: int, back: bool) -> Tensor:
    """Return rank c's two of the 2C chunks of the gathered x, for a compiled graph, which cannot hold a ppermute."""
    order = [i for r in range(C) for i in (r, 2 * C - 1 - r)]  # of the chunks, in zig-zag order
    mine = [order.index(2 * c), order.index(2 * c + 1)] if back else [c, 2 * C - 1 - c]
    chunks = x.chunk(2 * C, dim)
    return torch.cat([chunks[i] for i in mine], dim)


class Ring(NamedTuple):
    """The ring that keys and values go round, and the mask of its queries.

    Attributes:
        mesh: The mesh.
        axes: The axes that the sequence is split over, or none.
        t: The number of tokens on each rank.
        mask: The mask.
        scale: The factor of the scores.
        order: The order of tokens, "ring" (plain) or "zigzag".
        heads: The dims of query heads and KV heads in the types; for Ulysses they are N_Y and R_Y.
        cap: The soft cap of the scores, or None.
    """

    mesh: AbstractMesh
    axes: tuple[str, ...]
    t: int
    mask: Mask
    scale: float
    order: str = "ring"
    heads: tuple[str, str] = ("N", "K")
    cap: float | None = None

    @property
    def types(self) -> tuple[str, str]:
        """The types of queries and of keys, without a name."""
        over = f"_{format_axes(self.axes)}" if self.axes else ""
        return f"[B, T{over}, {self.heads[0]}, H]", f"[2, B, S{over}, {self.heads[1]}, H]"

    def around(self, segments: Tensor | None, KV: Any) -> Iterator[tuple]:
        """Yield (block, KV) at each hop, first with this rank's keys; the next ones are in flight meanwhile."""
        of_keys: Any = segments
        (C, c), (queries, keys) = self.place, self.types
        for hop in range(self.hops + 1):
            rows, columns = chunks(self.order, self.t, C, c), chunks(self.order, self.t, C, (c - hop) % C)
            both = None if segments is None else (segments, of_keys)
            here = KeyBlock(rows, columns, self.mask, self.scale, both, queries, keys, self.cap), KV
            if hop < self.hops:
                KV, of_keys = self.send("KV", KV), self.send("segments", of_keys)
            yield here
            KV, of_keys = wait(KV), wait(of_keys)

    def follow(self, dKV: Tensor, hop: int) -> Any:
        """Start to send a block's gradients to the next rank, where the block is; after the last hop, to its owner."""
        return self.send("dKV", dKV, 1 if hop < self.hops else -self.hops)

    def send(self, name: str, x: Tensor | None, hops: int = 1):
        """Start to pass x on by `hops` ranks along the ring."""
        C, _ = self.place
        if x is None or hops % C == 0:
            return x
        line = f"segments[B, S_{format_axes(self.axes)}]" if name == "segments" else name + self.types[1]
        return ppermute(line, x, self.mesh, self.axes, [(c, (c + hops) % C) for c in range(C)], async_op=True)

    @property
    def place(self) -> tuple[int, int]:
        """The number of ranks that the sequence is split over, and this rank's index among them."""
        group = self.mesh.group(self.axes)
        return group.size, group.index

    @property
    def hops(self) -> int:
        """The number of hops until no rank sees further blocks: C - 1, or fewer with a window."""
        return hops_needed(self.order, self.t, self.place[0], self.mask)


@lru_cache(maxsize=256)
def hops_needed(order: str, t: int, C: int, mask: Mask) -> int:
    """Return the number of hops after which no rank's queries see any further block."""
    held = [chunks(order, t, C, c) for c in range(C)]
    return next(h for h in reversed(range(C)) if any(mask.pairs(held[c], held[c - h]) for c in reversed(range(C))))


class Gathered(Ring):
    """Attention in one hop, for which all keys are gathered."""

    def around(self, segments: Tensor | None, KV: Tensor) -> Iterator[tuple]:
        """Yield (block, KV) once: this rank's queries, and all keys."""
        over, (C, c), both = format_axes(self.axes), self.place, None
        held = [chunks(self.order, self.t, C, i) for i in range(C)]
        if segments is not None:
            both = segments, all_gather(f"segments[B, S_{over}] -> segments[B, S]", segments, self.mesh)
        KV = all_gather(f"KV[2, B, S_{over}, K, H] -> KV[2, B, S, K, H]", KV, self.mesh)
        yield KeyBlock(held[c], sum(held, ()), self.mask, self.scale, both, self.types[0], cap=self.cap), KV

    def follow(self, dKV: Tensor, hop: int) -> Tensor:
        """Return this rank's part of the sum over all ranks' queries."""
        over = format_axes(self.axes)
        return reduce_scatter(f"dKV[2, B, S, K, H] {{U_{over}}} -> dKV[2, B, S_{over}, K, H]", dKV, self.mesh)


def exchanged(
    Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, mesh, axes: Sequence[str], inside: Callable[..., Tensor]
) -> Tensor:
    """O[B, T_CY, N, H]: each rank attends over the whole sequence, for its heads.

    If the ranks do not divide K, each KV head is copied until the copies divide over the ranks (`copied_heads`).

    Args:
        Q: The queries, Q[B, T_CY, N, H].
        K: The keys, K[B, T_CY, K, H].
        V: The values.
        segments: The documents, segments[B, T_CY], or None.
        mesh: The mesh.
        axes: The axes of the sequence. The last, which is the minor one, moves to the heads.
        inside: `inside(Q, K, V, segments)` is attention over the other axes.
    """
    *outer, Y = axes
    R = copied_heads(Q.shape[2], K.shape[2], mesh.size((Y,)))
    KV = torch.stack([K, V])
    if K.shape[2] < R:  # the gradients of copies are summed, in float32 or wider
        KV = KV.to(torch.promote_types(KV.dtype, torch.float32)).repeat_interleave(R // K.shape[2], dim=3)
    T_CY, T_C, Y = format_axes(axes), f"_{format_axes(outer)}" if outer else "", format_axes((Y,))
    Q = all_to_all(f"Q[B, T_{T_CY}, N, H] -> Q[B, T{T_C}, N_{Y}, H]", Q, mesh)
    KV = all_to_all(f"KV[2, B, S_{T_CY}, R, H] -> KV[2, B, S{T_C}, R_{Y}, H]", KV, mesh)
    if segments is not None:
        segments = all_gather(f"segments[B, T_{T_CY}] -> segments[B, T{T_C}]", segments, mesh)
    O = inside(Q, *KV, segments)
    return all_to_all(f"O[B, T{T_C}, N_{Y}, H] -> O[B, T_{T_CY}, N, H]", O, mesh)


def copied_heads(N: int, K: int, ranks: int) -> int:
    """Return R = lcm(K, ranks), the number of KV heads once each is copied R/K times, so that every rank has as many.

    R divides N, because K and the number of ranks do.

    Raises:
        ShardingError: The number of ranks does not divide N.
    """
    if N % ranks:
        what, rule = f"N={N} query heads do not divide over {ranks} ranks", "Ulysses gives every rank as many heads"
        refuse("ulysses: Q[B, T_C, N, H] -> Q[B, T, N_C, H]", what, rule, "form='ring' or 'zigzag', or fewer ranks")
    return lcm(K, ranks)
