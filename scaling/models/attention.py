"""Causal grouped-query attention: written out, and blockwise with an explicit backward (Part 4, Appendix A).

Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> O[B, T, N, H]. The queries are the last T of the S positions, so T = S in
training and T = 1 in decoding; G = N/K query heads share a KV head.
"""

import math

import torch


def _grouped(Q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Q[B, T, N, H] -> [B, K, G, T, H]."""
    if Q.shape[2] % kv_heads:
        raise ValueError(f"K={kv_heads} KV heads must divide N={Q.shape[2]} query heads")
    return Q.unflatten(2, (kv_heads, -1)).movedim(1, 3)


def _ungrouped(O: torch.Tensor) -> torch.Tensor:
    """O[B, K, G, T, H] -> [B, T, N, H]."""
    return O.movedim(3, 1).flatten(2, 3)


def _hidden(queries: range, keys: range, device) -> torch.Tensor:
    """hidden[T, S]: True where a key lies after the query."""
    T = torch.arange(queries.start, queries.stop, device=device)
    S = torch.arange(keys.start, keys.stop, device=device)
    return T[:, None] < S


def dot_product_attention(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """The book's einsums: all T x S scores are computed and held, masked or not."""
    T, S = Q.shape[1], K.shape[1]
    q = _grouped(Q, K.shape[2])
    scores = torch.einsum("bkgth,bskh->bkgts", q, K) / math.sqrt(Q.shape[-1])
    scores = scores.masked_fill(_hidden(range(S - T, S), range(S), Q.device), -math.inf)
    return _ungrouped(torch.einsum("bkgts,bskh->bkgth", scores.softmax(-1), V))


def combine(M1, L1, O1, M2, L2, O2):
    """Two chunks' softmax statistics as one: running max M, denominator L, output O (unnormalised), all [..., T(, H)].

    L = exp(M1 - M) L1 + exp(M2 - M) L2 with M = max(M1, M2), and O alike. Associative, so chunks may come in any order.
    """
    M = torch.maximum(M1, M2)
    a, b = (M1 - M).exp(), (M2 - M).exp()
    return M, a * L1 + b * L2, a[..., None] * O1 + b[..., None] * O2


def _blocks(T: int, S: int, block: int):
    """The pairs of query rows and key columns, block by block; pairs hidden altogether are left out."""
    for rows in (range(t, min(t + block, T)) for t in range(0, T, block)):
        last = S - T + rows.stop - 1
        yield rows, [range(s, min(s + block, S)) for s in range(0, last + 1, block)]


def _scores(q, k, rows: range, columns: range, past: int):
    """scores[B, K, G, rows, columns], -inf where hidden. q is scaled already."""
    scores = q @ k.mT
    if columns.stop - 1 > past + rows.start:
        hidden = _hidden(range(past + rows.start, past + rows.stop), columns, q.device)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, block):
        T, S = q.shape[-2], k.shape[-2]
        O, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows, columns in _blocks(T, S, block):
            qi = q[..., rows.start : rows.stop, :]
            M, L, acc = None, None, None
            for js in columns:
                scores = _scores(qi, k[..., js.start : js.stop, :], rows, js, S - T)
                m = scores.amax(-1)
                p = (scores - m[..., None]).exp()
                here = m, p.sum(-1), p @ v[..., js.start : js.stop, :]
                M, L, acc = here if M is None else combine(M, L, acc, *here)
            O[..., rows.start : rows.stop, :] = acc / L[..., None]
            lse[..., rows.start : rows.stop] = M + L.log()
        return O, lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.block = inputs[3]

    @staticmethod
    def backward(ctx, dO, _):
        q, k, v, O, lse = ctx.saved_tensors
        T, S = q.shape[-2], k.shape[-2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dO * O).sum(-1)  # sum_j P_ij dP_ij = sum_d dO_id O_id: local to the query (Appendix A)
        for rows, columns in _blocks(T, S, ctx.block):
            i = slice(rows.start, rows.stop)
            qi, dOi = q[..., i, :], dO[..., i, :]
            for js in columns:
                j = slice(js.start, js.stop)
                P = (_scores(qi, k[..., j, :], rows, js, S - T) - lse[..., i, None]).exp()
                dS = P * (dOi @ v[..., j, :].mT - delta[..., i, None])
                dq[..., i, :] += dS @ k[..., j, :]
                dk[..., j, :] += (dS.mT @ qi).sum(2, keepdim=True)  # over the G heads that share this key
                dv[..., j, :] += (P.mT @ dOi).sum(2, keepdim=True)
        return dq, dk, dv, None


def flash_attention(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, block: int = 128) -> torch.Tensor:
    """The same attention over blocks of `block` queries and keys with a running softmax.

    Never more than block^2 scores a head exist, and blocks in the future are skipped; saved for the backward pass are
    Q, K, V, O and one statistic (the log of the softmax's denominator) a query and head.
    """
    q = _grouped(Q, K.shape[2]) / math.sqrt(Q.shape[-1])
    k, v = K.movedim(1, 2)[:, :, None], V.movedim(1, 2)[:, :, None]
    return _ungrouped(_Flash.apply(q, k, v, block)[0])
