"""Three ways to bring keys and values to the queries of each rank: round a ring, gathered, or in exchange for heads.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.rules import refuse_rule
from scaling.collectives import all_gather, all_to_all, ppermute, reduce_scatter, wait
from scaling.mesh import AbstractMesh
from scaling.models.blockwise import KeyBlock
from scaling.models.tiles import Mask
from scaling.spec import format_axes
from scaling.strategies.context.layout import chunks


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
        """Start to send the gradients of a block after the block itself, and after the last hop home."""
        return self.send("dKV", dKV, 1 if hop < self.hops else -self.hops)

    def send(self, name: str, x: Tensor | None, hops: int = 1):
        """Start to pass x on by so many ranks along the ring."""
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
    """O[B, T_C, N, H]: each rank attends over the whole sequence, for its heads.

    With fewer KV heads than ranks, or K that does not divide, each KV head is copied until they do (`copied_heads`).

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
        refuse_rule(
            "Q[B, T_C, N, H] -> Q[B, T, N_C, H]", "ulysses", what, rule, "form='ring' or 'zigzag', or fewer ranks"
        )
    return lcm(K, ranks)
