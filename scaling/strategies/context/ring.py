"""Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889): queries stay, keys and values go round.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

At every hop each rank attends to the block of keys that it has, while that block is on its way to the next rank and the
one before it arrives. What has been seen is merged by the log of the softmax's denominator. In the backward pass the
blocks go round again, followed by their gradients, to which every rank adds its part. In zig-zag order (rank c has the
chunks c and 2C-1-c, of 2C) all ranks have the same to compute at every hop. On one rank this is plain attention.

The passes are written out, and are one differentiable function, `Attention.apply(ring, Q, K, V, segments)`: autograd
and torch.func run them on plain tensors, and see neither collectives nor tiles. Second derivatives are not defined.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import ppermute, wait
from scaling.mesh import AbstractMesh
from scaling.spec import format_axes
from scaling.strategies.context import block
from scaling.strategies.context.block import KeyBlock, add, merge_attended
from scaling.strategies.context.layout import Mask, chunks


def forward(Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, ring: "Ring") -> tuple[Tensor, Tensor]:
    """(O[B, T_C, N, H], lse[B, T_C, N]) of Q[B, T_C, N, H], K and V[B, S_C, K, H], segments[B, S_C] or None."""
    seen: Any = None
    for here, KV in ring.around(segments, KV=torch.stack([K, V])):
        seen = merge_attended(seen, block.forward(Q, KV, here))
    return seen.O.to(Q.dtype), seen.lse


def backward(
    dO: Tensor, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, ring: "Ring"
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV). dQ is added up where it stays, dK and dV as they follow their block, in float32 or wider."""
    dQ: Any = None
    dKV: Any = None
    for hop, (here, KV) in enumerate(ring.around(segments, KV=torch.stack([K, V]))):
        dq, dkv = block.backward(dO, O, lse, Q, KV, here)
        dQ, dKV = add(dQ, dq), add(wait(dKV), dkv)  # dKV was on its way meanwhile
        dKV = ring.follow(dKV, hop)
    dK, dV = wait(dKV).to(K.dtype)
    return dQ.to(Q.dtype), dK, dV


def jvp(
    tQ: Tensor, tK: Tensor, tV: Tensor, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor, segments, ring: "Ring"
) -> Tensor:
    """The tangent of O: keys and values go round, each with its tangent."""
    A: Any = None
    m: Any = None
    for here, KV, tKV in ring.around(segments, KV=torch.stack([K, V]), tKV=torch.stack([tK, tV])):
        a, b = block.jvp(tQ, tKV, lse, Q, KV, here)
        A, m = add(A, a), add(m, b)
    return (A - m[..., None] * O).to(Q.dtype)


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


class Attention(torch.autograd.Function):
    """(O, lse) of `forward(Q, K, V, segments, ring)`; lse has no derivative."""

    @staticmethod
    def forward(ring, Q, K, V, segments):
        return forward(Q, K, V, segments, ring)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.ring, *operands = inputs
        ctx.save_for_backward(*output, *operands)
        ctx.save_for_forward(*output, *operands)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dO, _):
        return None, *Once.apply(backward, ctx.ring, dO, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx, _ring, tQ, tK, tV, _segments):
        return Once.apply(jvp, ctx.ring, tQ, tK, tV, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info, in_dims, ring, *operands):
        return _batched(info, in_dims[1:], lambda *folded: Attention.apply(ring, *folded), operands)


class Once(torch.autograd.Function):
    """`fn(*operands, ring)`, all of them typed B first, which autograd does not look into."""

    @staticmethod
    def forward(fn, ring, *operands):
        return fn(*operands, ring)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "the second derivative of context-parallel attention is not defined\n"
            "  fix: differentiate once; on one rank models.attention.dot_product_attention has all derivatives"
        )

    @staticmethod
    def vmap(info, in_dims, fn, ring, *operands):
        return _batched(info, in_dims[2:], lambda *folded: Once.apply(fn, ring, *folded), operands)


def _batched(info, in_dims, apply, operands):
    """The mapped dim as part of B."""
    n = info.batch_size

    def folded(x, dim):
        if x is None:
            return None
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    results = apply(*map(folded, operands, in_dims))
    if isinstance(results, Tensor):
        return results.unflatten(0, (n, -1)), 0
    return tuple(x.unflatten(0, (n, -1)) for x in results), (0,) * len(results)
