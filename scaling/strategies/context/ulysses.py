"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank attends over the whole sequence, for its heads.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

An AllToAll moves the axis from the sequence to the heads, and one moves it back. With a second, outer axis the sequence
stays split over that one, and `inside` is a ring over it (USP: Fang and Zhao 2024, arXiv:2405.07719). The backward pass
is the transpose of these lines (notation.md): AllToAlls the other way round.
"""

from collections.abc import Callable, Sequence
from math import lcm

import torch
from torch import Tensor

from scaling.algebra.rules import refuse_rule
from scaling.collectives import all_gather, all_to_all
from scaling.spec import format_axes


def attention(
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
