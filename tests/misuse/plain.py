"""References written out one token, head and expert at a time, in float64: what the rooms are held against."""

import math

import torch

F64 = torch.float64


def norm(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x, place: int, theta: float):
    """x[heads, H] at its place in the sequence."""
    half = x.shape[-1] // 2
    angle = place * theta ** (-torch.arange(half, dtype=F64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attend(Q, K, V, *, causal=True, window=None, scale=None):
    """O[B, T, N, H] of Q[B, T, N, H], K and V[B, T, K, H]."""
    O, G = torch.zeros_like(Q), Q.shape[2] // K.shape[2]
    scale = Q.shape[-1] ** -0.5 if scale is None else scale
    for b in range(Q.shape[0]):
        for t in range(Q.shape[1]):
            seen = [s for s in range(K.shape[1]) if not causal or s <= t]
            seen = [s for s in seen if window is None or abs(t - s) < window]
            for n in range(Q.shape[2]):
                p = (K[b, seen, n // G] @ Q[b, t, n] * scale).softmax(0)
                O[b, t, n] = p @ V[b, seen, n // G]
    return O


def logits(params, tokens, config):
    """[B, T, V] of tokens[B, T]."""
    rows = []
    for row in tokens.tolist():
        x = params["embed"][row]
        for l in range(config.L):
            W = {name: leaf[l] for name, leaf in params["layers"].items()}
            y = norm(x, W["norm_attn"], config.eps)
            Q, K, V = (torch.einsum("td,dnh->tnh", y, W[name]) for name in ("W_Q", "W_K", "W_V"))
            Q, K = (torch.stack([turned(h, t, config.theta) for t, h in enumerate(x)]) for x in (Q, K))
            heads = attend(Q[None], K[None], V[None])[0]
            x = x + torch.einsum("tnh,nhd->td", heads, W["W_O"])
            y = norm(x, W["norm_mlp"], config.eps)
            gate = y @ W["W_gate"]
            x = x + (gate * gate.sigmoid() * (y @ W["W_in"])) @ W["W_out"]
        rows.append(norm(x, params["norm"], config.eps) @ params["unembed"])
    return torch.stack(rows)


def loss(params, inside, targets, config, weights):
    ce = -logits(params, inside, config).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (ce * weights).sum() / weights.sum()


def experts(params, x, config):
    """A layer of experts, routing "softmax", each token's k best with their weights over their sum."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            scores = (x[b, t] @ params["router"]).softmax(-1)
            best = scores.topk(config.k).indices.tolist()
            for e in best:
                gate = x[b, t] @ params["W_gate"][e]
                out = (gate * gate.sigmoid() * (x[b, t] @ params["W_in"][e])) @ params["W_out"][e]
                y[b, t] += scores[e] / scores[best].sum() * out
    return y


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
