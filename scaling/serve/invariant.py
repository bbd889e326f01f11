"""Batch-invariant prefill and decode: a request's logits are the same bits for any batch, slot, page table or chunking.

A product's bits can change with its number of rows, since that chooses the kernel and so the order of its sums. Here
every product has a fixed shape. Rows (tokens of all requests together) are filled up and cut into tiles of a few sizes;
sizes are used beside each other only after `agreeing` has found, on this machine and for the model's own matrices,
that a row has the same bits in each. Attention is of tiles of few tokens against blocks of `BLOCK` keys that stand at
fixed places of the sequence, whose softmax statistics are combined in order; a block of which nothing is seen changes
nothing. Chunks, prefix hits and preemptions then only say which call computes a row. One device, dense models.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.attention import combine, visible
from scaling.models.pointwise import rms_norm
from scaling.models.rope import tables
from scaling.models.transformer import attention_block, unstacked
from scaling.serve.cache import writable
from scaling.serve.step import check_tokens
from scaling.serve.types import ONE

LEAST = 8  # rows of the smallest tile
SIZES = (64, 32, 16, LEAST)
BLOCK = 64  # keys
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # torch's silu and gelu round the end of an array differently
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: 0.5 * x * (1 + (x * 0.5**0.5).erf()),
    "gelu_tanh": lambda x: 0.5 * x * (1 + ((x + 0.044715 * x * x * x) * (2 / math.pi) ** 0.5).tanh()),
    "relu": torch.relu,
}


def product(x: Tensor, W: Tensor, sizes: Sequence[int] = SIZES) -> Tensor:
    """x[R, D] times W[D, ...], R a multiple of `LEAST`, in tiles of these sizes, the largest first."""
    W = W.flatten(1)
    parts, at = [], 0
    for size in sizes:
        while len(x) - at >= size:
            parts.append(x[at : at + size] @ W)
            at += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def agreeing(params: dict) -> tuple[int, ...]:
    """The sizes of tiles in which a row has the same bits, `LEAST` among them: tried with each shape of matrix."""
    seen, sizes = {}, list(SIZES)
    layers = unstacked(params["layers"])[0]
    for W in [*tree.leaves(layers), params.get("unembed", params["embed"].T)]:
        if W.dim() > 1:
            W = W.flatten(0, 1) if W.shape[-1] == params["norm"].shape[0] and W.dim() == 3 else W.flatten(1)
            seen[W.shape, W.stride()] = W
    for W in seen.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SIZES[0], len(W), generator=generator).to(W)
        small = product(x, W, (LEAST,))
        sizes = [size for size in sizes if product(x, W, (size,)).equal(small)]
    return tuple(sizes)


def prefill(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    *,
    lengths: Tensor | None = None,
    donate: bool = False,
    sizes: Sequence[int] = (LEAST,),
) -> tuple[Tensor, dict]:
    """(logits[B, V] at each row's last token, cache), as `serve.prefill`; decode is the same with one token a row.

    `sizes`: what `agreeing(params)` has found. ValueError for experts and int8 caches, which have no such mode.
    """
    return _run(params, tokens, cache, config, lengths, donate, sizes, False)


def extend(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    *,
    lengths: Tensor | None = None,
    donate: bool = False,
    sizes: Sequence[int] = (LEAST,),
) -> tuple[Tensor, dict]:
    """(logits[B, T, V] at every token, cache), as `serve.extend`: what checks a draft. The rest as in `prefill`."""
    return _run(params, tokens, cache, config, lengths, donate, sizes, True)


@torch.no_grad()
def _run(params, tokens, cache, config, lengths, donate, sizes, every) -> tuple[Tensor, dict]:
    if config.moe or "scale" in cache:
        raise ValueError("the batch-invariant mode is of dense models with caches of floating point")
    B, T = tokens.shape
    if lengths is None:
        lengths = torch.full((B,), T, device=tokens.device)
    check_tokens(params, tokens, lengths, cache, config, ONE, "heads", 1)
    cache = writable(cache, params["norm"], donate)
    at = _Rows(cache, lengths, T, config.N // config.K)
    rope = tables(at.positions, config.H, config.theta, config.rope_scaling, params["norm"].dtype)
    matmul = functools.partial(_matmul, sizes=sizes)
    x = params["embed"][tokens[at.row, at.column]][None]
    for l, W in enumerate(unstacked(params["layers"])):
        attend = functools.partial(at.attend, cache["KV"][:, l], config.windows[l])
        x = x + attention_block(W, x, attend, rope, config.eps, matmul)
        x = x + _mlp(W, x, ACTIVATIONS[config.nonlinearity], config.eps, matmul)
    if not every:
        x = x[:, torch.cat([at.last, at.last[:1].expand(-B % LEAST)])]
    x = rms_norm(x, gain=params["norm"], eps=config.eps)
    logits = matmul(x, params["unembed"] if "unembed" in params else params["embed"].T)[0]
    cache["lengths"] = cache["lengths"] + lengths
    if not every:
        return logits[:B], cache
    whole = logits.new_zeros(B, T, config.V)
    whole[at.row, at.column] = logits  # rows that fill a tile up are copies of the first
    return whole, cache


def _matmul(x: Tensor, W: Tensor, sizes: Sequence[int]) -> Tensor:
    """x[1, R, D] times W[D, ...]."""
    return product(x[0], W, sizes).unflatten(-1, W.shape[1:])[None] if W.dim() > 2 else product(x[0], W, sizes)[None]


def _mlp(layer: dict, x: Tensor, act: Callable, eps: float, matmul: Callable) -> Tensor:
    """Out[1, R, D], as `transformer.mlp_block`."""
    y = rms_norm(x, gain=layer["norm_mlp"], eps=eps)
    Tmp = matmul(y, layer["W_in"])
    Tmp = act(matmul(y, layer["W_gate"])) * Tmp if "W_gate" in layer else act(Tmp)
    return matmul(Tmp, layer["W_out"])


class _Rows:
    """The tokens of a call as rows, all requests together, filled up to a multiple of `LEAST` with copies of the first.

    `row`, `column`: where each stands in tokens[B, T]; `positions`: in its sequence; `last`[B]: the row of each
    request's last token. A tile has `t` tokens of one request, which with their G query heads are a product's rows.
    """

    def __init__(self, cache: dict, new: Tensor, T: int, G: int):
        held, KV, self.G = cache["lengths"], cache["KV"], G
        device, B = held.device, len(held)
        row, column = (torch.arange(T, device=device) < new[:, None]).nonzero(as_tuple=True)
        self.real = len(row)
        self.last = new.cumsum(0) - 1
        fill = torch.zeros(-self.real % LEAST, dtype=torch.int64, device=device)
        self.row, self.column = torch.cat([row, row[fill]]), torch.cat([column, column[fill]])
        self.positions = held[self.row] + self.column
        page = KV.shape[3]
        table = cache["pages"] if "pages" in cache else torch.arange(B, device=device)[:, None]
        self.most = int((held + new).max())
        places = torch.arange(-(-self.most // BLOCK) * BLOCK, device=device)
        column_of = (places // page).clamp(max=table.shape[1] - 1)  # beyond the last page nothing is seen
        self.slots = table[:, column_of].clamp(min=0) * page + places % page  # [B, S]: of each place
        self.into = self.slots[row, self.positions[: self.real]]

        self.t = max(1, LEAST // G)
        counts = -(-new // self.t)
        of = torch.arange(B, device=device).repeat_interleave(counts)  # each tile's request
        number = torch.arange(len(of), device=device) - (counts.cumsum(0) - counts)[of]
        within = number[:, None] * self.t + torch.arange(self.t, device=device)
        within = torch.minimum(within, new[of][:, None] - 1)  # filled up with the last token
        self.tiles = (new.cumsum(0) - new)[of][:, None] + within  # [n, t]: rows
        self.of, self.blocks = of, {}
        self.back: Any = torch.zeros(self.real, dtype=torch.int64, device=device)
        self.back[self.tiles.flatten()] = torch.arange(self.tiles.numel(), device=device)
        self.back = torch.cat([self.back, self.back[fill]])

    def attend(self, KV: Tensor, window: int | None, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """O[1, R, N, H] of Q[1, R, N, H], over the cache KV[2, P, page, K, H], in which K and V are written."""
        pool = KV.flatten(1, 2)
        pool[0, self.into], pool[1, self.into] = K[0, : self.real], V[0, : self.real]
        heads, H = K.shape[2:]
        rows = pool.flatten(1, 2)  # [2, places K, H]
        q = Q[0][self.tiles] * H**-0.5  # [n, t, N, H]
        q = q.unflatten(2, (heads, -1)).movedim(2, 1).flatten(2, 3)  # [n, K, t G, H]
        total: Any = None
        for start in range(0, self.most, BLOCK):
            at, hidden = self.block(start, window, heads)
            k, v = (rows[i].index_select(0, at).view(*q.shape[:2], BLOCK, H) for i in range(2))
            scores = (q @ k.mT).masked_fill_(hidden, -torch.inf)
            m = scores.amax(-1).clamp_(min=torch.finfo(q.dtype).min)
            p = scores.sub_(m[..., None]).exp_()
            here = m, p.sum(-1), p @ v
            total = here if total is None else combine(*total, *here)
        O = total[2] / total[1][..., None]  # [n, K, t G, H]
        O = O.unflatten(2, (self.t, self.G)).movedim(1, 2).flatten(0, 1).flatten(1, 2)  # [n t, N, H]
        return O[self.back][None]

    def block(self, start: int, window: int | None, heads: int) -> tuple[Tensor, Tensor]:
        """(where a tile's heads find the keys of a block, [n K BLOCK]; hidden[n, 1, t G, BLOCK]), for all layers."""
        if (start, window) not in self.blocks:
            slots = self.slots[self.of, start : start + BLOCK]  # [n, BLOCK]
            head = torch.arange(heads, device=slots.device)[:, None]
            keys = torch.arange(start, start + BLOCK, device=slots.device)
            places = self.positions[self.tiles]
            hidden = ~visible(places.flatten(), keys, window).view(*places.shape, 1, BLOCK)
            hidden = hidden.expand(-1, -1, self.G, -1).flatten(1, 2)[:, None]
            self.blocks[start, window] = (slots[:, None] * heads + head).flatten(), hidden
        return self.blocks[start, window]
