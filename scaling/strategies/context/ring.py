"""Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): queries stay, keys and values go round.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

At every hop each rank attends to the block of keys that it has, while that block is on its way to the next rank and the
one before it arrives. What has been seen is merged by the log of the softmax's denominator. In the backward pass the
blocks go round again, followed by their gradients, to which every rank adds its part. In zig-zag order (rank c has the
chunks c and 2C-1-c, of 2C) all ranks have the same to compute at every hop. On one rank this is plain attention.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from scaling.collectives import ppermute, wait
from scaling.spec import format_axes
from scaling.strategies.context import block
from scaling.strategies.context.block import Block, merge
from scaling.strategies.context.layout import Mask, chunks


def forward(Q, K, V, segments, ring: "Ring"):
    """(O[B, T_C, N, H], lse[B, T_C, N]) of Q[B, T_C, N, H], K and V[B, S_C, K, H], segments[B, T_C] or None."""
    seen = None
    for here, (K, V) in ring.around(segments, KV=torch.stack([K, V])):
        seen = merge(seen, block.forward(Q, K, V, here))
    return seen.O.to(Q.dtype), seen.lse


def backward(dO, O, lse, Q, K, V, segments, ring: "Ring"):
    """(dQ, dK, dV). dQ is added up where it stays, dK and dV as they follow their block, in float32 or wider."""
    dQ, dKV, hops = 0, torch.zeros((), device=Q.device), ring.hops
    for here, (K, V) in ring.around(segments, KV=torch.stack([K, V])):
        grads = block.backward(dO, O, lse, Q, K, V, here)
        dKV = wait(dKV)  # was on its way meanwhile
        if grads is not None:
            dQ, dKV = dQ + grads[0], dKV + torch.stack(grads[1:])
        dKV = ring.send("dKV", dKV, 1 if hops else -ring.hops)  # after the last hop: home
        hops -= 1
    return dQ.to(Q.dtype), *wait(dKV).to(K.dtype)


def jvp(tQ, tK, tV, O, lse, Q, K, V, segments, ring: "Ring"):
    """The tangent of O: keys and values go round, each with its tangent."""
    A = m = 0
    for here, (K, V), (tK, tV) in ring.around(segments, KV=torch.stack([K, V]), tKV=torch.stack([tK, tV])):
        if (part := block.jvp(tQ, tK, tV, lse, Q, K, V, here)) is not None:
            A, m = A + part[0], m + part[1]
    return (A - m[..., None] * O).to(Q.dtype)


class Ring(NamedTuple):
    """Where the ring runs, over `axes` (one mesh axis, or none), and what its queries see. `t`: tokens on each rank."""

    mesh: object
    axes: tuple[str, ...]
    t: int
    mask: Mask
    scale: float
    order: str = "ring"  # or "zigzag"

    def around(self, segments, **arrays) -> Iterator[tuple]:
        """(block, *arrays) at each hop, the first with this rank's own keys; the next are on their way meanwhile."""
        C, c = self.mesh.size(self.axes), self.mesh.group(self.axes).index
        T, of_keys = f"T_{format_axes(self.axes)}" if self.axes else "T", segments
        line = f"Q[B, {T}, N, H] * KV[2, B, S', K, H] -> O[B, {T}, N, H]"  # S': the keys of one block
        for hop in range(self.hops + 1):
            rows, columns = chunks(self.order, self.t, C, c), chunks(self.order, self.t, C, (c - hop) % C)
            both = None if segments is None else (segments, of_keys)
            here = Block(rows, columns, self.mask, self.scale, both, line), *arrays.values()
            if hop < self.hops:
                arrays = {name: self.send(name, x) for name, x in arrays.items()}
                of_keys = self.send("segments", of_keys)
            yield here
            arrays, of_keys = {name: wait(x) for name, x in arrays.items()}, wait(of_keys)

    def send(self, name: str, x: torch.Tensor | None, hops: int = 1):
        """Start to pass x on by so many ranks along the ring."""
        C, axis = self.mesh.size(self.axes), format_axes(self.axes)
        if x is None or hops % C == 0:
            return x
        line = f"{name}[B, S_{axis}]" if x.dim() == 2 else f"{name}[2, B, S_{axis}, K, H]"
        return ppermute(line, x, self.mesh, self.axes, [(c, (c + hops) % C) for c in range(C)], async_op=True)

    @property
    def hops(self) -> int:
        """How often blocks are passed on until nobody sees more: C - 1 times, or fewer with a window."""
        return _hops(self.order, self.t, self.mesh.size(self.axes), self.mask)


@lru_cache(maxsize=256)
def _hops(order: str, t: int, C: int, mask: Mask) -> int:
    held = [chunks(order, t, C, c) for c in range(C)]
    return next(h for h in reversed(range(C)) if any(mask.pairs(held[c], held[c - h]) for c in reversed(range(C))))
