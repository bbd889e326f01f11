"""Attention block by block, with an explicit backward: the computation between two lines of communication.

    Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> O[B, T, N, H], lse[B, T, N]

lse is the log of the softmax's denominator. `keys.around` yields the keys block by block, as a ring passes blocks from
rank to rank (`scaling.strategies.context.ring`). A block is computed tile by tile, so at most TILE^2 scores per head
exist at a time. Positions are known in advance, so tiles that the mask hides altogether are never computed; documents
(segments) are data, and hide more. Results are float32 or wider; `merge_attended` joins them over different keys. On a
GPU in 16 bits, a block without window and documents is one call of torch's flash attention for each pair of chunks.

The passes are one differentiable function, `Attention.apply(keys, Q, K, V, segments)`: autograd and torch.func run them
on plain tensors, and see neither collectives nor tiles. Second derivatives are not defined.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import trace
from scaling.collectives import wait
from scaling.common.torch_private import takes_flash
from scaling.models.tiles import LATER, Kernel, Mask, Ranges, by_mask, fused, in_float32, tangent, written
from scaling.spec import parse

TILE = 1024  # queries, and keys, that are computed at a time
OTHERWISE = """
  fix: differentiate once; on one device models.attention.dot_product_attention has all derivatives"""
Sums = tuple[Any, Any]  # tensors that a block adds to two sums, or None and None


def forward(
    Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, sinks: Tensor | None, keys: Any
) -> tuple[Tensor, Tensor]:
    """Return (O[B, T, N, H], lse[B, T, N]).

    sinks[N] are scores of a key that all queries of a head see, and that has no value.
    """
    seen: Any = None
    for here, KV in keys.around(segments, torch.stack([K, V])):
        seen = merge_attended(seen, block_forward(Q, KV, here))
    if sinks is not None:
        lse = torch.logaddexp(seen.lse, sinks.to(seen.lse.dtype))
        seen = Attended(seen.O * (seen.lse - lse).exp()[..., None], lse)
    return seen.O.to(Q.dtype).contiguous(), seen.lse


def backward(
    dO: Tensor, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, sinks: Any, keys: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dQ, dK, dV), summed in float32 or wider: dQ on this rank, dK and dV as they follow their block."""
    dQ: Any = None
    dKV: Any = None
    for hop, (here, KV) in enumerate(keys.around(segments, torch.stack([K, V]))):
        dq, dkv = block_backward(dO, O, lse, Q, KV, here)
        dQ, dKV = add(dQ, dq), add(wait(dKV), dkv)  # dKV was in flight while dkv was computed
        del dq, dkv  # else they stay alive while the next block is computed
        dKV = keys.follow(dKV, hop)
    dK, dV = wait(dKV).to(K.dtype)
    return dQ.to(Q.dtype), dK, dV


def jvp(
    tQ: Tensor, tK: Tensor, tV: Tensor, t_sinks: Tensor | None, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor,
    segments: Tensor | None, sinks: Tensor | None, keys: Any,
) -> tuple[Tensor]:  # fmt: skip
    """Return (tO,), the tangent of O; each block of keys and values arrives with its tangent."""
    A: Any = None
    m: Any = None
    arriving = (keys.around(segments, torch.stack(pair)) for pair in ([K, V], [tK, tV]))
    for (here, KV), (_, tKV) in zip(*arriving, strict=True):
        a, b = block_jvp(tQ, tKV, lse, Q, KV, here)
        A, m = add(A, a), add(m, b)
    if sinks is not None and t_sinks is not None:
        m = m + (sinks - lse).exp() * t_sinks
    return ((A - m[..., None] * O).to(Q.dtype),)


class KeyBlock(NamedTuple):
    """Queries at the positions `rows` and the block of keys at `columns` that they attend to.

    `segments` is None or (of the queries [B, T], of the keys [B, S]): a query sees only keys of its segment. `queries`
    and `keys` are types for the trace. Scores are capped softly by `cap`.
    """

    rows: Ranges
    columns: Ranges
    mask: Mask
    scale: float
    segments: tuple[Tensor, Tensor] | None = None
    queries: str = "[B, T, N, H]"
    keys: str = "[2, B, S, K, H]"
    cap: float | None = None

    @property
    def pairs(self) -> int:
        """The number of scores per head that the mask lets through."""
        return self.mask.pairs(self.rows, self.columns)

    def kernel(self, Q: Tensor) -> Kernel:
        """Return the kernel for queries Q[B, T, N, H]: flash attention, which the meta device has too, or matmuls."""
        if Q.is_meta or (Q.device.type == "cpu" and self.cap is None):
            return fused
        return by_mask if self.cap is None and takes_flash(Q.transpose(1, 2)) else written(self.cap)

    def parts(self, ranges: Ranges, tile: int) -> list[range]:
        """Split the positions into parts of at most `tile` consecutive ones."""
        return [chunk[start : start + tile] for chunk in ranges for start in range(0, len(chunk), tile)]

    def tiles(self, rows: list[range], columns: list[range], device) -> Iterator[tuple[int, int, Tensor | str | None]]:
        """Yield (part of the queries, part of the keys, `hidden` of `models.tiles`) for each tile with a visible pair.

        On the meta device only the shapes matter, so each part occurs and not each pair of parts.
        """
        if device.type == "meta":
            for i in range(max(len(rows), len(columns))):
                yield min(i, len(rows) - 1), min(i, len(columns) - 1), None
            return
        if self.segments is not None:
            of_queries, of_keys = self.segments[0].split(sizes(rows), 1), self.segments[1].split(sizes(columns), 1)
        for (i, r), (j, c) in product(enumerate(rows), enumerate(columns)):
            if not self.mask.pairs((r,), (c,)):
                continue
            if self.segments is not None:
                other = (of_queries[i][:, :, None] != of_keys[j][:, None, :])[:, None, None]
                hidden = self.mask.hidden(r, c, device)
                yield i, j, other if hidden is None else other | hidden
            elif self.mask == Mask(causal=True, window=None) and r == c:
                yield i, j, LATER
            else:
                yield i, j, self.mask.hidden(r, c, device)


def sizes(parts: Sequence[range]) -> list[int]:
    """Return the length of each part."""
    return [len(part) for part in parts]


class Attended(NamedTuple):
    """Attention to some of the keys: O[B, T, N, H], and lse[B, T, N], the log of the softmax's denominator."""

    O: Tensor
    lse: Tensor


def merge_attended(a: Attended | None, b: Attended | None) -> Any:
    """Return the attention to the keys of both, given in any order.

    Each O is weighted by a sigmoid of the difference in lse. So nothing overflows, and the weights always add up to 1.
    """
    if a is None or b is None:
        return a if b is None else b
    ahead = torch.where(b.lse.isneginf(), -math.inf, b.lse - a.lse)  # -inf - -inf: neither has seen a key yet
    share = ahead.sigmoid()[..., None].to(a.O.dtype)  # torch 2.11's compiler takes every lse for a float32
    return Attended(torch.lerp(a.O, b.O, share), torch.logaddexp(a.lse, b.lse))


def add(a: Tensor | None, b: Tensor | None) -> Any:
    """Return a + b, where None is an empty sum."""
    return b if a is None else a if b is None else a + b


def over_tiles(
    line: str, matmuls: int, block: KeyBlock, rows: Sequence[Tensor], columns: Sequence[Tensor], tile: Callable,
    join: Callable = add, by_query: int = 1, narrow: bool = False,
) -> "tuple[list[list], list, list] | None":  # fmt: skip
    """Run tile(*rows, *columns, hidden, scale) for each tile of a block; None if the mask hides all of it.

    Args:
        line: The event that is traced, such as "O = Q * KV".
        matmuls: The number of its matmuls over the visible scores.
        block: The block.
        rows: Arrays of the queries' positions. The last is Q.
        columns: Arrays of the keys' positions.
        tile: Computes one tile, called as above, and returns a tuple of results.
        join: Adds a tile's results to the results of earlier tiles with the same queries, or keys.
        by_query: The number of the results that belong to queries; the others belong to keys.
        narrow: As in `Kernel`.

    Returns:
        For each result a list of its parts, None where no tile computed the part; and the parts of rows and columns.
    """
    if not block.pairs:
        return None
    Q, K, event = rows[-1], columns[-1], None
    if trace.open_logs:
        after, *before = (
            parse(name + (block.keys if "KV" in name else block.queries)) for name in re.findall(r"\w+", line)
        )
        flops = 2 * matmuls * Q.shape[0] * Q.shape[2] * Q.shape[3] * block.pairs
        pairs = block.pairs, block.mask.window or 0
        event = trace.record(trace.Event("Einsum", (), tuple(before), after, flops=flops, dtype=Q.dtype, pairs=pairs))
    whole = Q.is_meta or (narrow and block.mask.window is None and block.segments is None)
    size = max(Q.shape[1], K.shape[1]) if whole else TILE
    queries, keys = block.parts(block.rows, size), block.parts(block.columns, size)
    rows, columns = (
        _in_parts(parts, K.shape[2], narrow, *arrays) for parts, arrays in ((queries, rows), (keys, columns))
    )
    found: list[list] = []
    for i, j, hidden in block.tiles(queries, keys, Q.device):
        results = tile(*(x[i] for x in rows), *(x[j] for x in columns), hidden, block.scale)
        found = found or [[None] * len((rows if n < by_query else columns)[0]) for n in range(len(results))]
        for n, x in enumerate(results):
            at = i if n < by_query else j
            found[n][at] = join(found[n][at], x)
    if event is not None:
        trace.done(event)
    return found, rows, columns


def block_forward(Q: Tensor, KV: Tensor, block: KeyBlock) -> Attended | None:
    """Return the attention of the queries to these keys; None if the mask hides them all."""
    kernel = block.kernel(Q)

    def tile(*given) -> tuple[Attended]:
        return (Attended(*kernel.forward(*given)),)

    attended = over_tiles("O = Q * KV", 2, block, [Q], [*KV], tile, merge_attended, narrow=kernel.narrow)
    if attended is None:
        return None
    (seen,), (q,), _ = attended
    O = _joined([each and each.O for each in seen], q)
    return Attended(O, _joined([each and each.lse for each in seen], [each[..., 0] for each in q], -math.inf))


def block_backward(dO: Tensor, O: Tensor, lse: Tensor, Q: Tensor, KV: Tensor, block: KeyBlock) -> Sums:
    """Return (dQ, dKV) through this block, or Nones if it is hidden. O and lse are sums over the keys of all blocks."""
    kernel = block.kernel(Q)
    found = over_tiles("dQ = dO * KV", 5, block, [dO, O, lse, Q], [*KV], kernel.backward, narrow=kernel.narrow)
    if found is None:
        return None, None
    (dq, dk, dv), (*_, q), (k, v) = found
    return _joined(dq, q), torch.stack([_joined(dk, k), _joined(dv, v)])


def block_jvp(tQ: Tensor, tKV: Tensor, lse: Tensor, Q: Tensor, KV: Tensor, block: KeyBlock) -> Sums:
    """Return (A[B, T, N, H], m[B, T, N]) of this block, or Nones. With both summed over all blocks, tO = A - m O."""
    tile = partial(tangent, cap=block.cap)
    found = over_tiles("tO = tQ * KV", 5, block, [tQ, lse, Q], [*tKV, *KV], tile, by_query=2)
    if found is None:
        return None, None
    (A, m), (_, denominators, q), _ = found
    return _joined(A, q), _joined(m, denominators)


def _in_parts(parts: Sequence[range], heads: int, narrow: bool, *arrays: Tensor) -> list[Any]:
    """[B, T, N(, H)] -> [B, K, G, T(, H)] of K `heads` for each part of the positions; float32 or wider unless narrow.

    A KV head has G = N/K heads of queries, or G = 1 of keys.
    """
    wide = arrays if narrow else map(in_float32, arrays)
    whole = (x.unflatten(2, (heads, -1)).movedim(1, 3).contiguous() for x in wide)
    return [x.split(sizes(parts), 3) for x in whole]


def _joined(parts: Sequence[Tensor | None], like: Sequence[Tensor], empty: float = 0.0) -> Tensor:
    """Parts [B, K, G, T(, H)] -> [B, T, N(, H)]; a part that no tile computed is filled with `empty`."""
    there = [torch.full_like(x, empty) if part is None else part for part, x in zip(parts, like, strict=True)]
    whole = there[0] if len(there) == 1 else torch.cat(there, 3)  # written to a buffer, linearize would lose them
    return whole.movedim(3, 1).flatten(2, 3)


class Attention(torch.autograd.Function):
    """The differentiable (O, lse) of `forward(Q, K, V, segments, sinks, keys)`; lse has no derivative."""

    @staticmethod
    def forward(keys, Q, K, V, segments, sinks):
        """Return (O, lse)."""
        return forward(Q, K, V, segments, sinks, keys)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the operands and results."""
        ctx.keys, *operands = inputs
        ctx.save_for_backward(*output, *operands)
        ctx.save_for_forward(*output, *operands)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dO, _):
        """Return the gradients of Q, K, V and the sinks; a sink takes a share of its head's softmax."""
        O, lse, *_, sinks = ctx.saved_tensors
        dsinks = None
        if sinks is not None:
            delta = (dO * O).to(lse.dtype).sum(-1)
            dsinks = -((sinks.to(lse.dtype) - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)
        return None, *Once.apply(backward, ctx.keys, dO, *ctx.saved_tensors), None, dsinks

    @staticmethod
    def jvp(ctx, _keys, tQ, tK, tV, _segments, t_sinks):
        """Return the tangent of O."""
        return *Once.apply(jvp, ctx.keys, tQ, tK, tV, t_sinks, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info, in_dims, keys, *operands):
        """Fold the mapped dim into B, which sinks do not have."""
        if operands[-1] is not None:
            raise NotImplementedError("attention block by block with sinks has no vmap" + OTHERWISE)
        return _batched(info, in_dims[1:], lambda *folded: Attention.apply(keys, *folded), operands)


class Once(torch.autograd.Function):
    """`fn(*operands, keys=keys)`, with B as the first dim of all operands, opaque to autograd."""

    @staticmethod
    def forward(fn, keys, *operands):
        """Return fn's derivatives."""
        return fn(*operands, keys=keys)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save nothing, since there is no derivative."""
        pass

    @staticmethod
    def backward(ctx, *_):
        """Refuse a second derivative."""
        raise NotImplementedError("the second derivative of attention block by block is not defined" + OTHERWISE)

    @staticmethod
    def vmap(info, in_dims, fn, keys, *operands):
        """Fold the mapped dim into B."""
        return _batched(info, in_dims[2:], lambda *folded: Once.apply(fn, keys, *folded), operands)


def _batched(info, in_dims, apply, operands):
    """Call `apply` with the mapped dim folded into B, and unfold its results."""
    n = info.batch_size

    def folded(x, dim):
        if x is None:
            return None
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    results = apply(*map(folded, operands, in_dims))
    return tuple(x.unflatten(0, (n, -1)) for x in results), (0,) * len(results)
