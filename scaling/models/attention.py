"""Causal grouped-query attention: by PyTorch's kernel, written out, and blockwise with an explicit backward.

Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> O[B, T, N, H]; the heads of V and O may have another width. The queries
are the last T of the S positions, so T = S in training and T = 1 in decoding; G = N/K query heads share a KV head. With
`window` a query sees itself and the window - 1 keys before it; with `segments`[B, S], the ids of packed documents, only
its own (Part 4, Appendix A).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.common.torch_private import flash_cpu


def _grouped(Q: Tensor, kv_heads: int) -> Tensor:
    """Q[B, T, N, H] -> [B, K, G, T, H]."""
    if Q.shape[2] % kv_heads:
        raise ValueError(f"K={kv_heads} KV heads must divide N={Q.shape[2]} query heads\n  fix: give K a divisor of N")
    return Q.unflatten(2, (kv_heads, -1)).movedim(1, 3)


def _ungrouped(O: Tensor) -> Tensor:
    """O[B, K, G, T, H] -> [B, T, N, H]."""
    return O.movedim(3, 1).flatten(2, 3)


def visible(queries: Tensor, keys: Tensor, window: int | None = None, query_ids=None, key_ids: Any = None) -> Tensor:
    """visible[T, S], or [B, T, S] with ids: which keys each query sees.

    queries[T] and keys[S] are places in the whole sequence, in any order; query_ids[B, T] and key_ids[B, S] documents.
    """
    seen = queries[:, None] >= keys
    if window is not None:
        seen = seen & (queries[:, None] - keys < window)
    return seen if query_ids is None else seen & (query_ids[:, :, None] == key_ids[:, None, :])


def _mask(Q: Tensor, K: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """`visible` of the last T of S positions: [T, S], or [B, 1, T, S] with segments."""
    T, S = Q.shape[1], K.shape[1]
    keys = torch.arange(S, device=Q.device)
    if segments is None:
        return visible(keys[S - T :], keys, window)
    return visible(keys[S - T :], keys, window, segments[:, S - T :], segments)[:, None]


def sdpa(Q: Tensor, K: Tensor, V: Tensor, *, window=None, segments=None, scale: float | None = None) -> Tensor:
    """By F.scaled_dot_product_attention, which picks a fused kernel. `scale` is 1/sqrt(H) unless given.

    The kernels have no forward derivative, so that under jvp the written-out form takes over.
    """
    _grouped(Q, K.shape[2])
    T, S = Q.shape[1], K.shape[1]
    plain = segments is None and (window is None or window >= S) and (T == S or T == 1)
    mask = None if plain else _mask(Q, K, window, segments)
    heads = [x.transpose(1, 2) for x in (Q, K, V)]
    try:
        O = F.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=plain and T > 1, scale=scale, enable_gqa=K.shape[2] < Q.shape[2]
        )
    except NotImplementedError:
        return dot_product_attention(Q, K, V, window=window, segments=segments, scale=scale)
    return O.transpose(1, 2)


def fused(Q: Tensor, K: Tensor, V: Tensor, *, window=None, segments=None) -> Tensor:
    """`sdpa`; of meta tensors too by a kernel that holds no scores, where torch would choose the form that does."""
    if not Q.is_meta:
        return sdpa(Q, K, V, window=window, segments=segments)
    mask = None if window is None and segments is None else _mask(Q, K, window, segments).to(Q.dtype)
    heads = (x.transpose(1, 2) for x in (Q, K, V))
    return flash_cpu(*heads, 0.0, mask is None, attn_mask=mask)[0].transpose(1, 2)


def dot_product_attention(Q, K, V, *, window=None, segments=None, scale: float | None = None) -> Tensor:
    """The book's einsums: all T x S scores are computed and held, masked or not."""
    q = _grouped(Q, K.shape[2])
    scores = torch.einsum("bkgth,bskh->bkgts", q, K) * (1 / math.sqrt(Q.shape[-1]) if scale is None else scale)
    seen = _mask(Q, K, window, segments)
    scores = scores.masked_fill(~(seen if segments is None else seen[:, None]), -math.inf)
    return _ungrouped(torch.einsum("bkgts,bskh->bkgth", scores.softmax(-1), V))


def combine(M1, L1, O1, M2, L2, O2):
    """Two chunks' softmax statistics as one: running max M, denominator L, output O (unnormalised), all [..., T(, H)].

    L = exp(M1 - M) L1 + exp(M2 - M) L2 with M = max(M1, M2), and O alike. Associative, so chunks may come in any order.
    """
    M = torch.maximum(M1, M2)
    a, b = (M1 - M).exp(), (M2 - M).exp()
    return M, a * L1 + b * L2, a[..., None] * O1 + b[..., None] * O2


def _blocks(T: int, S: int, block: int, window: int | None):
    """The pairs of query rows and key columns, block by block; pairs hidden altogether are left out."""
    for rows in (range(t, min(t + block, T)) for t in range(0, T, block)):
        first = 0 if window is None else max(0, S - T + rows.start - window + 1) // block * block
        yield rows, [range(s, min(s + block, S)) for s in range(first, S - T + rows.stop, block)]


def _scores(q, k, rows: range, columns: range, window: int | None, segments: Tensor | None):
    """scores[B, K, G, rows, columns], -inf where hidden; rows are places in the sequence. q is scaled already."""
    scores = q @ k.mT
    partly = columns.stop - 1 > rows.start or (window is not None and rows.stop - 1 - columns.start >= window)
    if partly or segments is not None:
        t, s = (torch.arange(r.start, r.stop, device=q.device) for r in (rows, columns))
        ids = () if segments is None else (segments[:, t], segments[:, s])
        seen = visible(t, s, window, *ids)
        scores = scores.masked_fill(~(seen[:, None, None] if ids else seen), -math.inf)
    return scores


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, segments, block, window):
        T, S = q.shape[-2], k.shape[-2]
        same = q.shape[-1] == v.shape[-1]  # then O lies as Q does, and is handed on without a copy
        O = torch.empty_like(q) if same else q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1])
        lowest = torch.finfo(q.dtype).min  # in place of the maximum of a row that is hidden altogether
        for rows, columns in _blocks(T, S, block, window):
            i, places = slice(rows.start, rows.stop), range(S - T + rows.start, S - T + rows.stop)
            M: Any = None  # nothing seen yet
            L: Any = None
            acc: Any = None
            for js in columns:
                scores = _scores(q[..., i, :], k[..., js.start : js.stop, :], places, js, window, segments)
                m = scores.amax(-1).clamp(min=lowest)
                p = (scores - m[..., None]).exp()
                here = m, p.sum(-1), p @ v[..., js.start : js.stop, :]
                M, L, acc = here if M is None else combine(M, L, acc, *here)
            O[..., i, :] = acc / L[..., None]
            lse[..., i] = M + L.log()
        return O, lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.block, ctx.window = inputs[4:]

    @staticmethod
    def backward(ctx, dO, _):
        q, k, v, segments, O, lse = ctx.saved_tensors
        T, S = q.shape[-2], k.shape[-2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dO * O).sum(-1)  # sum_j P_ij dP_ij = sum_d dO_id O_id: local to the query (Appendix A)
        for rows, columns in _blocks(T, S, ctx.block, ctx.window):
            i, places = slice(rows.start, rows.stop), range(S - T + rows.start, S - T + rows.stop)
            qi, dOi = q[..., i, :], dO[..., i, :]
            for js in columns:
                j = slice(js.start, js.stop)
                P = (_scores(qi, k[..., j, :], places, js, ctx.window, segments) - lse[..., i, None]).exp()
                dS = P * (dOi @ v[..., j, :].mT - delta[..., i, None])
                dq[..., i, :] += dS @ k[..., j, :]
                dk[..., j, :] += (dS.mT @ qi).sum(2, keepdim=True)  # over the G heads that share this key
                dv[..., j, :] += (P.mT @ dOi).sum(2, keepdim=True)
        return dq, dk, dv, None, None, None


def flash_attention(Q, K, V, block: int = 128, *, window=None, segments=None, scale: float | None = None) -> Tensor:
    """The same attention over blocks of `block` queries and keys with a running softmax.

    Never more than block^2 scores a head exist, and blocks that are hidden (in the future, before the window) are
    skipped; saved for the backward pass are Q, K, V, O and one statistic (the log of the softmax's denominator) a query
    and head.
    """
    q = _grouped(Q, K.shape[2]) * (1 / math.sqrt(Q.shape[-1]) if scale is None else scale)
    k, v = K.movedim(1, 2)[:, :, None], V.movedim(1, 2)[:, :, None]
    return _ungrouped(_Flash.apply(q, k, v, segments, block, window)[0])
