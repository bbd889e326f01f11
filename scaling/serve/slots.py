"""Where a call's tokens go in the cache, and what they see of it: worked out once, for all layers."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.configs import Config
from scaling.models.attention import visible
from scaling.serve.cache import CacheLayout, capacity
from scaling.serve.int8 import quantized


class Slots:
    """The rows of the batch whose keys and values this rank holds, and their T new tokens, of which new[b] are real.

    `positions`[B_Z, T], or [T] where all rows are alike: the tokens' places in their rows. A padded token has its row's
    last real place: it is computed, and written nowhere. `own`: which of the tokens are this rank's queries, where T is
    split over C.
    """

    def __init__(self, cache: dict, new: Tensor, T: int, at: CacheLayout, own: slice | None = None):
        self.cache, self.T, self.own, self._seen = cache, T, own, {}
        held, KV = cache["lengths"], cache["KV"]
        self.rows = at.rows(len(held))
        held, new = held[self.rows], new[self.rows]
        self.first = KV.shape[3] * at.shard
        self.table = cache["pages"][self.rows] if "pages" in cache else None
        if held.is_meta:  # no values: as if the cache were then full
            self.least, self.most = capacity(cache, at.shards) - T, capacity(cache, at.shards)
            self.alike, self.fresh = True, self.least == 0
        else:
            after = held + new
            self.least, self.most = int(held.min()), int(after.max())
            latest = int(held.max())
            self.alike, self.fresh = self.least == latest and int(new.min()) == T, latest == 0
        t = torch.arange(T, device=held.device)
        if self.alike:
            self.positions = self.least + t
        else:
            self.positions = torch.minimum(held[:, None] + t, after[:, None] - 1).clamp(min=0)
        plain = held.is_meta or (self.alike and self.table is None and at.shards == 1)
        self.into = None if plain else self._into(held, new, t)

    def _into(self, held: Tensor, new: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, times, slots): token `times[i]` of row `rows[i]` goes to `slots[i]` of the rows' places flattened."""
        size, places = self.cache["KV"].shape[3], held[:, None] + t - self.first
        real = t < new[:, None]
        if self.table is None:
            rows, times = (real & (places >= 0) & (places < size)).nonzero(as_tuple=True)
            return rows, times, rows * size + places[rows, times]
        rows, times = real.nonzero(as_tuple=True)
        places = places[rows, times]
        return rows, times, self.table[rows, places // size] * size + places % size

    def append(self, l: int, *new: Tensor) -> None:
        """Write what layer l has of the new tokens, keys and values [B_Z, T, K_Y, H] or latents, to their places."""
        for i, x in enumerate(new):
            if "scale" in self.cache:
                x, scale = quantized(x)
                self._write(self.cache["scale"][i, l], scale[..., 0])
            self._write(self.cache["KV"][i, l], x)

    def _write(self, whole: Tensor, x: Tensor) -> None:
        if whole.is_meta:
            return
        if self.into is None:
            whole[:, self.least : self.most] = x
        else:
            rows, times, slots = self.into
            whole.flatten(0, 1)[slots] = x[rows, times].to(whole.dtype)

    def read(self, l: int, low: int, high: int, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values [B_Z, high - low, K_Y, H] of layer l, or its latents, at places low to high - 1 of this
        rank's part."""
        found = [self._read(x[l], low, high).to(dtype) for x in self.cache["KV"]]
        if "scale" in self.cache:
            scales = (self._read(x[l], low, high).to(dtype) for x in self.cache["scale"])
            found = [x * scale[..., None] for x, scale in zip(found, scales, strict=True)]
        return found

    def _read(self, whole: Tensor, low: int, high: int) -> Tensor:
        if self.table is None:
            return whole[:, low:high]
        page = whole.shape[1]
        start = low // page
        pages = self.table[:, start : -(-high // page)]
        found = whole.index_select(0, pages.flatten()).view(len(pages), -1, *whole.shape[2:])
        return found[:, low - start * page : high - start * page]

    def attend(self, l: int, Q: Tensor, K: Tensor, V: Tensor, window: int | None) -> Tensor:
        """O[B_Z, T, N_Y, H] over what is held and the new K, V[B_Z, T, K_Y, H], which are written."""
        (K, V), mask, causal = self.held(l, window, Q.dtype, K, V)
        return self.over(Q, K, V, mask, causal)

    def held(self, l: int, window: int | None, dtype: torch.dtype, *new: Tensor) -> tuple[list[Tensor], Any, bool]:
        """(what layer l has of all places that a query sees, the new ones written; how they are seen, as in `over`)."""
        self.append(l, *new)
        low, mask, causal = self.seen(window, dtype)
        return self.read(l, low, self.most, dtype), mask, causal

    def over(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """O[B_Z, T, N_Y, H] of the queries over K and V[B_Z, S, K_Y, H], as `seen` says."""
        heads = K.shape[2]
        k, v = K.transpose(1, 2), V.transpose(1, 2)
        if self.T == 1:  # the query heads of a KV head as its rows
            q = Q.unflatten(2, (heads, -1))[:, 0]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2)[:, None]
        q, shared = Q.transpose(1, 2), heads < Q.shape[2]
        O = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        return O.transpose(1, 2)

    def seen(self, window: int | None, dtype: torch.dtype) -> tuple[int, Tensor | None, bool]:
        """(the first place that any query sees, what is added to scores or None, whether they are simply causal)."""
        if window not in self._seen:
            self._seen[window] = self._mask(window, dtype)
        return self._seen[window]

    def _mask(self, window: int | None, dtype: torch.dtype) -> tuple[int, Tensor | None, bool]:
        low = 0 if window is None else max(0, self.least - window + 1)
        if self.own is None and self.fresh and (window is None or window >= self.T):
            return low, None, self.T > 1
        if self.alike and self.T == 1:
            return low, None, False
        keys = torch.arange(low, self.most, device=self.positions.device)
        seen = self.visible(keys, window)[:, None]
        return low, torch.zeros((), dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf), False

    def visible(self, keys: Tensor, window: int | None) -> Tensor:
        """visible[B_Z, T_C, S], or [1, T_C, S] where all rows are alike, of keys at these places of their rows."""
        rows = self.positions if self.positions.dim() == 2 else self.positions[None]
        rows = rows if self.own is None else rows[:, self.own]
        return visible(rows.flatten(), keys, window).view(*rows.shape, -1)


class At(NamedTuple):
    """What all layers of one call share: model, mesh, the slots of its tokens, and (cos, sin) of their positions."""

    config: Config
    mesh: Any
    slots: Slots
    rope: tuple[Tensor, Tensor]
