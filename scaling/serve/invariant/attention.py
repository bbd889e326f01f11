"""Attention of tiles of few tokens against blocks of keys at fixed places, over pages or a contiguous cache."""

from typing import Any

import torch
from torch import Tensor

from scaling.models.attention import combine, visible
from scaling.serve.int8 import quantized
from scaling.serve.invariant.tiles import BLOCK, TILE


class TokenRows:
    """The tokens of a call as rows, all requests together, filled up to a multiple of `least` with copies of the first.

    `row`, `column`: where each stands in tokens[B, T]; `positions`: in its sequence; `last`[B]: the row of each
    request's last token. A tile has `t` tokens of one request, which with their G query heads are a product's rows:
    `TILE` of them, or `least` where that is enough.
    """

    def __init__(self, cache: dict, new: Tensor, T: int, G: int, least: int):
        held, KV, self.G = cache["lengths"], cache["KV"], G
        device, B = held.device, len(held)
        row, column = (torch.arange(T, device=device) < new[:, None]).nonzero(as_tuple=True)
        self.real = len(row)
        self.last = new.cumsum(0) - 1
        fill = torch.zeros(-self.real % least, dtype=torch.int64, device=device)
        self.row, self.column = torch.cat([row, row[fill]]), torch.cat([column, column[fill]])
        self.positions = held[self.row] + self.column
        page = KV.shape[3]
        table = cache["pages"] if "pages" in cache else torch.arange(B, device=device)[:, None]
        self.most = int((held + new).max())
        places = torch.arange(-(-self.most // BLOCK) * BLOCK, device=device)
        column_of = (places // page).clamp(max=table.shape[1] - 1)  # beyond the last page nothing is seen
        self.slots = table[:, column_of].clamp(min=0) * page + places % page  # [B, S]: of each place
        self.into = self.slots[row, self.positions[: self.real]]

        enough = least % G == 0 and int(new.max()) * G <= least
        self.t = max(1, (least if enough else TILE) // G)
        counts = -(-new // self.t)
        of = torch.arange(B, device=device).repeat_interleave(counts)  # each tile's request
        number = torch.arange(len(of), device=device) - (counts.cumsum(0) - counts)[of]
        within = number[:, None] * self.t + torch.arange(self.t, device=device)
        within = torch.minimum(within, new[of][:, None] - 1)  # filled up with the last token
        self.tiles = (new.cumsum(0) - new)[of][:, None] + within  # [n, t]: rows
        self.of, self.blocks, self.buffers = of, {}, {}
        self.back: Any = torch.zeros(self.real, dtype=torch.int64, device=device)
        self.back[self.tiles.flatten()] = torch.arange(self.tiles.numel(), device=device)
        self.back = torch.cat([self.back, self.back[fill]])

    def attend(self, cache: dict, l: int, window: int | None, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """O[1, R, N, H] of Q[1, R, N, H], over layer l of the cache, in which K and V[1, R, K, H] are written."""
        heads, H = K.shape[2:]
        for i, x in enumerate((K, V)):
            new = x[0, : self.real]
            if "scale" in cache:
                new, scale = quantized(new)
                cache["scale"][i, l].flatten(0, 1)[self.into] = scale[..., 0]
            cache["KV"][i, l].flatten(0, 1)[self.into] = new
        q = Q[0][self.tiles] * H**-0.5  # [n, t, N, H]
        q = q.unflatten(2, (heads, -1)).movedim(2, 1).flatten(2, 3)  # [n, K, t G, H]
        total: Any = None
        for start in range(0, self.most, BLOCK):
            at, hidden = self.block(start, window, heads)
            k, v = (self.read(cache, i, l, at, q.dtype).view(*q.shape[:2], BLOCK, H) for i in range(2))
            scores = q @ k.mT
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            m = scores.amax(-1).clamp_(min=torch.finfo(q.dtype).min)
            p = scores.sub_(m[..., None]).exp_()
            here = m, p.sum(-1), p @ v
            total = here if total is None else combine(*total, *here)
        O = total[2] / total[1][..., None]  # [n, K, t G, H]
        O = O.unflatten(2, (self.t, self.G)).movedim(1, 2).flatten(0, 1).flatten(1, 2)  # [n t, N, H]
        return O[self.back][None]

    def block(self, start: int, window: int | None, heads: int) -> tuple[Tensor, Tensor | None]:
        """(where a tile's heads find the keys of a block, [n K BLOCK]; hidden[n, 1, t G, BLOCK], or None if none is),
        for all layers."""
        if (start, window) not in self.blocks:
            slots = self.slots[self.of, start : start + BLOCK]  # [n, BLOCK]
            head = torch.arange(heads, device=slots.device)[:, None]
            keys = torch.arange(start, start + BLOCK, device=slots.device)
            places = self.positions[self.tiles]
            hidden = ~visible(places.flatten(), keys, window).view(*places.shape, 1, BLOCK)
            hidden = hidden.expand(-1, -1, self.G, -1).flatten(1, 2)[:, None]
            self.blocks[start, window] = (slots[:, None] * heads + head).flatten(), hidden if hidden.any() else None
        return self.blocks[start, window]

    def read(self, cache: dict, i: int, l: int, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys (i = 0) or values of layer l at [place and head]: [n, H], overwritten by the next call for i."""
        whole = cache["KV"][i, l].flatten(0, 2)
        if i not in self.buffers:  # memory that is new each time would be filled with zeros first
            self.buffers[i] = whole.new_empty(len(at), whole.shape[1])
        found = torch.index_select(whole, 0, at, out=self.buffers[i]).to(dtype)
        if "scale" in cache:
            found = found * cache["scale"][i, l].flatten().index_select(0, at).to(dtype)[:, None]
        return found
