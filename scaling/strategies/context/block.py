"""Attention of this rank's queries to a block of keys: what is computed between two lines of communication.

    Q[B, T, N, H], KV[2, B, S, K, H] -> O[B, T, N, H], lse[B, T, N]

lse is the log of the softmax's denominator. Positions are known, so tiles that the mask hides altogether are never
computed. Results are float32 or wider; `merge` joins those of different keys, whether of two tiles or of two ranks.
"""

import math
import re
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import trace
from scaling.spec import parse
from scaling.strategies.context.kernels import fused, tangent, written
from scaling.strategies.context.tiles import Piece, Tile

Sums = tuple[Any, Any]  # tensors that a block adds to two sums, or None and None


class Attended(NamedTuple):
    """What queries have seen of some keys: O[B, T, N, H], and lse[B, T, N], the log of the softmax's denominator."""

    O: Tensor
    lse: Tensor


def merge_attended(a: Attended | None, b: Attended | None) -> Any:
    """What is seen of the keys of both, in any order: each O by its share of the weight, which is a sigmoid of the
    difference in lse. So nothing overflows, and the shares add up to 1 however often they are merged."""
    if a is None or b is None or b.O.is_meta:
        return a if b is None else b
    ahead = torch.where(b.lse.isneginf(), -math.inf, b.lse - a.lse)  # -inf - -inf: neither has seen a key yet
    share = ahead.sigmoid()[..., None].to(a.O.dtype)  # torch 2.11's compiler takes every lse for a float32
    return Attended(torch.lerp(a.O, b.O, share), torch.logaddexp(a.lse, b.lse))


def add(a: Tensor | None, b: Tensor | None) -> Any:
    """a + b, where None is a sum of nothing."""
    return b if a is None else a if b is None else a + b


@contextmanager
def _traced(line: str, Q: Tensor, block: Tile, matmuls: int):
    """One event, "O = Q * KV": the FLOPs of the scores that are seen, in so many matmuls."""
    if not trace.open_logs:
        yield
        return
    names = re.findall(r"\w+", line)
    after, *before = (parse(name + (block.keys if "KV" in name else block.queries)) for name in names)
    flops = 2 * matmuls * Q.shape[0] * Q.shape[2] * Q.shape[3] * block.pairs
    event = trace.record(trace.Event("Einsum", (), tuple(before), after, flops=flops, dtype=Q.dtype))
    yield
    trace.done(event)


def forward(Q: Tensor, KV: Tensor, block: Tile) -> Attended | None:
    """What the queries see of these keys; None if the mask hides them all."""
    if not block.pairs:
        return None
    with _traced("O = Q * KV", Q, block, matmuls=2):
        if Q.is_meta:
            O = torch.empty_like(Q, dtype=_wide(Q.dtype))
            return Attended(O, O.new_empty(O.shape[:-1]))
        q, k, v = _heads_of_keys(KV, Q, *KV)
        (rows, _), seen = block.pieces(), {}
        for i, j, hidden in block.tiles(Q.device):
            tile = kernel(Q.device).forward(_at(i, q), _at(j, k), _at(j, v), hidden, block.scale)
            seen[i.start] = merge_attended(seen.get(i.start), Attended(*tile))
        O = _joined({i: each.O for i, each in seen.items()}, q, rows)
        lse = _joined({i: each.lse for i, each in seen.items()}, q[..., 0], rows, empty=-math.inf)
        return Attended(*_heads(O, lse))


def backward(dO: Tensor, O: Tensor, lse: Tensor, Q: Tensor, KV: Tensor, block: Tile) -> Sums:
    """(dQ, dKV) through this block, or Nones. O and lse are those of all the keys, of this block and the others."""
    if not block.pairs:
        return None, None
    with _traced("dQ = dO * KV", Q, block, matmuls=5):
        if Q.is_meta:
            return torch.empty_like(Q, dtype=_wide(Q.dtype)), torch.empty_like(KV, dtype=_wide(KV.dtype))
        dO, O, lse, q, k, v = _heads_of_keys(KV, dO, O, lse, Q, *KV)
        rows, columns = block.pieces()
        dq, dk, dv = sums = {}, {}, {}
        for i, j, hidden in block.tiles(Q.device):
            operands = _at(i, dO), _at(i, q), _at(j, k), _at(j, v), _at(i, O), _at(i, lse)
            tile = kernel(Q.device).backward(*operands, hidden, block.scale)
            for each, at, part in zip(sums, (i, j, j), tile, strict=True):
                each[at.start] = add(each.get(at.start), part)
        dq = _joined(dq, q, rows)
        dk, dv = (_joined(each, k, columns) for each in (dk, dv))
        dQ, dK, dV = _heads(dq, dk, dv)
        return dQ, torch.stack([dK, dV])


def jvp(tQ: Tensor, tKV: Tensor, lse: Tensor, Q: Tensor, KV: Tensor, block: Tile) -> Sums:
    """(A[B, T, N, H], m[B, T, N]) of this block, or Nones: summed over the blocks of all keys, tO = A - m O."""
    if not block.pairs:
        return None, None
    with _traced("tO = tQ * KV", Q, block, matmuls=5):
        if Q.is_meta:
            A = torch.empty_like(Q, dtype=_wide(Q.dtype))
            return A, A[..., 0]
        tq, lse, q, tk, tv, k, v = _heads_of_keys(KV, tQ, lse, Q, *tKV, *KV)
        rows, _ = block.pieces()
        A, m = sums = {}, {}
        for i, j, hidden in block.tiles(Q.device):
            of_queries, of_keys = [_at(i, x) for x in (tq, q, lse)], [_at(j, x) for x in (tk, tv, k, v)]
            tile = tangent(*of_queries, *of_keys, hidden=hidden, scale=block.scale)
            for each, part in zip(sums, tile, strict=True):
                each[i.start] = add(each.get(i.start), part)
        return _heads(_joined(A, q, rows), _joined(m, lse, rows))


def _at(places: slice, x: Tensor) -> Tensor:
    """Those of x[B, K, G, T(, H)] along T."""
    return x[:, :, :, places]


def _joined(parts: dict[int, Tensor], like: Tensor, pieces: list[Piece], empty: float = 0.0):
    """The parts in a row along T, `empty` where no tile made one. (Written to a buffer, linearize would lose them.)"""
    if len(pieces) == len(parts) == 1:
        return parts[0]
    gaps = {at.start: torch.full_like(_at(at, like), empty) for at, _ in pieces if at.start not in parts}
    return torch.cat([(parts | gaps)[at.start] for at, _ in pieces], 3)


def kernel(device: torch.device):
    """The CPU's flash attention, or matmuls."""
    return fused if device.type == "cpu" else written


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _heads_of_keys(KV: Tensor, *arrays: Tensor):
    """[B, T, N(, H)] -> [B, K, G, T(, H)], float32 or wider: G = N/K heads of queries, or one of keys, a KV head."""
    return [x.to(_wide(x.dtype)).unflatten(2, (KV.shape[3], -1)).movedim(1, 3).contiguous() for x in arrays]


def _heads(*arrays):
    """[B, K, G, T(, H)] -> [B, T, N(, H)]."""
    return tuple(x.movedim(3, 1).flatten(2, 3) for x in arrays)
