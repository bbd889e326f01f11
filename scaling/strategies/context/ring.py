"""How keys and values come to the queries of each rank: round a ring, gathered, or in exchange for heads.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): queries stay. At every hop each rank attends to the
block of keys that it has, while that block is on its way to the next rank and the one before it arrives. What has been
seen is merged by the log of the softmax's denominator. In the backward pass the blocks go round again, followed by
their gradients, to which every rank adds its part. In zig-zag order (rank c has the chunks c and 2C-1-c, of 2C) all
ranks have the same to compute at every hop. On one rank this is plain attention.

Gathered (as Llama 3 was trained, arXiv:2407.21783, section 3.3.2): the same passes with a single hop at which all keys
are there. The backward pass gathers again, so that nothing longer than T_C is kept, and reduce-scatters dK and dV, in
float32 or wider.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank attends over the whole sequence, for its heads. An
AllToAll moves the axis from the sequence to the heads, and one moves it back. With a second, outer axis the sequence
stays split over that one, and inside is a ring over it (USP: Fang and Zhao 2024, arXiv:2405.07719).
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
    """Where the ring runs, and what its queries see. `t`: tokens on each rank; `order`: "ring" (plain) or "zigzag"."""

    mesh: AbstractMesh
    axes: tuple[str, ...]  # the mesh axis that the sequence is split over, or none
    t: int
    mask: Mask
    scale: float
    order: str = "ring"
    heads: tuple[str, str] = ("N", "K")  # as the types have them: of Ulysses N_Y, R_Y

    @property
    def types(self) -> tuple[str, str]:
        """Of queries and of keys, without a name."""
        over = f"_{format_axes(self.axes)}" if self.axes else ""
        return f"[B, T{over}, {self.heads[0]}, H]", f"[2, B, S{over}, {self.heads[1]}, H]"

    def around(self, segments: Tensor | None, **arrays: Any) -> Iterator[tuple]:
        """(block, *arrays) at each hop, the first with this rank's own keys; the next are on their way meanwhile."""
        of_keys: Any = segments
        (C, c), (queries, keys) = self.place, self.types
        for hop in range(self.hops + 1):
            rows, columns = chunks(self.order, self.t, C, c), chunks(self.order, self.t, C, (c - hop) % C)
            both = None if segments is None else (segments, of_keys)
            here = KeyBlock(rows, columns, self.mask, self.scale, both, queries, keys), *arrays.values()
            if hop < self.hops:
                arrays = {name: self.send(name, x) for name, x in arrays.items()}
                of_keys = self.send("segments", of_keys)
            yield here
            arrays, of_keys = {name: wait(x) for name, x in arrays.items()}, wait(of_keys)

    def follow(self, dKV: Tensor, hop: int) -> Any:
        """Start to pass the gradients of a block on as the block itself; after the last hop home."""
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
        """How many ranks the sequence is split over, and which of them this is."""
        group = self.mesh.group(self.axes)
        return group.size, group.index

    @property
    def hops(self) -> int:
        """How often blocks are passed on until nobody sees more: C - 1 times, or fewer with a window."""
        return hops_needed(self.order, self.t, self.place[0], self.mask)


@lru_cache(maxsize=256)
def hops_needed(order: str, t: int, C: int, mask: Mask) -> int:
    held = [chunks(order, t, C, c) for c in range(C)]
    return next(h for h in reversed(range(C)) if any(mask.pairs(held[c], held[c - h]) for c in reversed(range(C))))


class Gathered(Ring):
    """The same in one hop."""

    def around(self, segments: Tensor | None, **arrays: Any) -> Iterator[tuple]:
        """(block, *arrays): this rank's queries meet all keys."""
        over, (C, c), both = format_axes(self.axes), self.place, None
        held = [chunks(self.order, self.t, C, i) for i in range(C)]
        if segments is not None:
            both = segments, all_gather(f"segments[B, S_{over}] -> segments[B, S]", segments, self.mesh)
        whole = [
            all_gather(f"{name}[2, B, S_{over}, K, H] -> {name}[2, B, S, K, H]", x, self.mesh)
            for name, x in arrays.items()
        ]
        yield KeyBlock(held[c], sum(held, ()), self.mask, self.scale, both, self.types[0], "[2, B, S, K, H]"), *whole

    def follow(self, dKV: Tensor, hop: int) -> Tensor:
        """The sum over all ranks' queries, each rank's part of it."""
        over = format_axes(self.axes)
        return reduce_scatter(f"dKV[2, B, S, K, H] {{U_{over}}} -> dKV[2, B, S_{over}, K, H]", dKV, self.mesh)


def exchanged(
    Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, mesh, axes: Sequence[str], inside: Callable[..., Tensor]
) -> Tensor:
    """O[B, T_C, N, H]. `axes`: those of the sequence, of which the last, the minor one, moves to the heads.

    `inside(Q, K, V, segments)` is attention over the other axes. With fewer KV heads than ranks, or K that does not
    divide, each KV head is copied until they do (`copied_heads`).
    """
    *outer, Y = axes
    R = copied_heads(Q.shape[2], K.shape[2], mesh.size((Y,)))
    KV = torch.stack([K, V])
    if K.shape[2] < R:  # the gradients of copies are summed: in float32 or wider
        KV = KV.to(torch.promote_types(KV.dtype, torch.float32)).repeat_interleave(R // K.shape[2], dim=3)
    T_CY, T_C, Y = format_axes(axes), f"_{format_axes(outer)}" if outer else "", format_axes((Y,))
    Q = all_to_all(f"Q[B, T_{T_CY}, N, H] -> Q[B, T{T_C}, N_{Y}, H]", Q, mesh)
    KV = all_to_all(f"KV[2, B, S_{T_CY}, R, H] -> KV[2, B, S{T_C}, R_{Y}, H]", KV, mesh)
    if segments is not None:
        segments = all_gather(f"segments[B, T_{T_CY}] -> segments[B, T{T_C}]", segments, mesh)
    O = inside(Q, *KV, segments)
    return all_to_all(f"O[B, T{T_C}, N_{Y}, H] -> O[B, T_{T_CY}, N, H]", O, mesh)


def copied_heads(N: int, K: int, ranks: int) -> int:
    """R = lcm(K, ranks): how many KV heads there are once each is copied R/K times, so that every rank has as many.

    R divides N, as K and the number of ranks do. ShardingError if that does not divide N.
    """
    if N % ranks:
        what, rule = f"N={N} query heads do not divide over {ranks} ranks", "Ulysses gives every rank as many heads"
        refuse_rule(
            "Q[B, T_C, N, H] -> Q[B, T, N_C, H]", "ulysses", what, rule, "form='ring' or 'zigzag', or fewer ranks"
        )
    return lcm(K, ranks)
