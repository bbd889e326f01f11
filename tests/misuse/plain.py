"""References written out a token, head or expert at a time, in float64: what the rooms are held against."""

import itertools
import math

import torch

F64 = torch.float64


def norm(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x, theta: float):
    """x[T, heads, H], each at its place in the sequence."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half, dtype=F64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attend(Q, K, V, *, causal=True, window=None, scale=None, segments=None):
    """O[B, T, N, H] of the last T queries Q[B, T, N, H], and K and V[B, S, K, H]; documents by their ids[B, S]."""
    (B, T, N, H), (_, S, heads, _) = Q.shape, K.shape
    O, ids, scale = torch.zeros_like(Q), torch.zeros(B, S) if segments is None else segments, scale or H**-0.5
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        at, k = S - T + t, n * heads // N
        seen = [s for s in range(S) if (s <= at or not causal) and abs(at - s) < (window or math.inf)]
        seen = [s for s in seen if ids[b, s] == ids[b, at]]
        O[b, t, n] = (K[b, seen, k] @ Q[b, t, n] * scale).softmax(0) @ V[b, seen, k]
    return O


def gated(x, W_gate, W_in, W_out):
    gate = x @ W_gate
    return (gate * gate.sigmoid() * (x @ W_in)) @ W_out


def logits(params, tokens, config):
    """[B, T, V] of tokens[B, T]."""
    rows = []
    for row in tokens.tolist():
        x = params["embed"][row]
        for l in range(config.L):
            W = {name: leaf[l] for name, leaf in params["layers"].items()}
            y = norm(x, W["norm_attn"], config.eps)
            Q, K, V = (torch.einsum("td,dnh->tnh", y, W[name]) for name in ("W_Q", "W_K", "W_V"))
            Q, K = turned(Q, config.theta), turned(K, config.theta)
            x = x + torch.einsum("tnh,nhd->td", attend(Q[None], K[None], V[None])[0], W["W_O"])
            x = x + gated(norm(x, W["norm_mlp"], config.eps), W["W_gate"], W["W_in"], W["W_out"])
        rows.append(norm(x, params["norm"], config.eps) @ params["unembed"])
    return torch.stack(rows)


def loss(params, inside, targets, config, weights):
    ce = -logits(params, inside, config).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (ce * weights).sum() / weights.sum()


def experts(params, x, config):
    """A layer of experts, routing "softmax", each token's k best with their weights over their sum."""
    rows = []
    for token in x.flatten(0, 1):
        scores = (token @ params["router"]).softmax(-1)
        best = scores.topk(config.k).indices.tolist()
        of = {e: gated(token, *(params[name][e] for name in ("W_gate", "W_in", "W_out"))) for e in best}
        rows.append(sum(scores[e] / scores[best].sum() * out for e, out in of.items()))
    return torch.stack(rows).view_as(x)


def drawn_from(row, how):
    """The distribution that a token is drawn from, of logits[V]: softmax, then top-k, top-p and min-p in turn."""
    p = (row.double() / how.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if how.top_k is not None:
        p = scaled([x if order.index(i) < how.top_k else 0.0 for i, x in enumerate(p)])
    if how.top_p is not None:
        kept, total = set(), 0.0
        for i in order:
            if total < how.top_p:
                kept.add(i)
            total += p[i]
        p = scaled([x if i in kept else 0.0 for i, x in enumerate(p)])
    if how.min_p is not None:
        p = scaled([x if x >= how.min_p * max(p) else 0.0 for x in p])
    return torch.tensor(p, dtype=F64)


def scaled(p):
    return [x / math.fsum(p) for x in p]


def clip(grads, most, eps=0.0):
    norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    return {name: g * min(1.0, most / (norm + eps)) for name, g in grads.items()}


def adamw(params, grads, lr, decay):
    """The first update: m over its correction is g, v over its own g squared."""
    return {name: p - lr * decay * p - lr * grads[name] / (grads[name].abs() + 1e-8) for name, p in params.items()}
