"""Attention to gathered keys and values (as Llama 3 was trained, arXiv:2407.21783, section 3.3.2): one AllGather.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

The passes are the ring's, with a single hop at which all keys are there. The backward pass gathers again, so that
nothing longer than T_C is kept, and reduce-scatters dK and dV, in float32 or wider.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from scaling.collectives import all_gather, reduce_scatter
from scaling.spec import format_axes
from scaling.strategies.context.block import KeyBlock
from scaling.strategies.context.layout import chunks
from scaling.strategies.context.ring import Ring


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
