"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank attends over the whole sequence, for its heads.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

An AllToAll moves the axis from the sequence to the heads, and one moves it back. With a second, outer axis the sequence
stays split over that one, and `inside` is a ring over it (USP: Fang and Zhao 2024, arXiv:2405.07719). The backward pass
is the transpose of these lines (notation.md): AllToAlls the other way round.
"""

from math import lcm

import torch

from scaling.algebra.rules import refuse
from scaling.collectives import all_gather, all_to_all
from scaling.spec import format_axes


def attention(Q, K, V, segments, mesh, axes, inside):
    """O[B, T_C, N, H]. `axes`: those of the sequence, of which the last, the minor one, moves to the heads.

    `inside(Q, K, V, segments)` is attention over the other axes. With fewer KV heads than ranks, or K that does not
    divide, each is repeated until they do: R = lcm(K, |C|), which divides N as K and |C| do.
    """
    Y, n, N, K_heads = axes[-1:], mesh.size(axes[-1:]), Q.shape[2], K.shape[2]
    all_axes, outer, Y = format_axes(axes), f"_{format_axes(axes[:-1])}" if axes[:-1] else "", format_axes(Y)
    if N % n:
        what, rule = f"N={N} query heads do not divide over {n} ranks", "Ulysses gives every rank as many heads"
        refuse(f"Q[B, T_{all_axes}, N, H]", "ulysses", what, rule, "form='ring' or 'zigzag', or an axis that divides N")
    R = lcm(K_heads, n)
    KV = torch.stack([K, V])
    if K_heads < R:  # copies, whose gradients are summed: in float32 or wider
        KV = KV.to(torch.promote_types(KV.dtype, torch.float32)).repeat_interleave(R // K_heads, dim=3)
    Q = all_to_all(f"Q[B, T_{all_axes}, N, H] -> Q[B, T{outer}, N_{Y}, H]", Q, mesh)
    KV = all_to_all(f"KV[2, B, S_{all_axes}, R, H] -> KV[2, B, S{outer}, R_{Y}, H]", KV, mesh)
    if segments is not None:
        segments = all_gather(f"segments[B, T_{all_axes}] -> segments[B, T{outer}]", segments, mesh)
    O = inside(Q, *KV, segments)
    return all_to_all(f"O[B, T{outer}, N_{Y}, H] -> O[B, T_{all_axes}, N, H]", O, mesh)
