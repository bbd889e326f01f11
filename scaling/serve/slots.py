"""Slots of a call's new tokens in the cache: where their keys and values are written, and which places they see.

No value is read on the host: it knows an `Extent` of the lengths, and the rest is computed on the device. So one graph
of these operations serves every step of the same shapes and extent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.configs import Config
from scaling.models.attention import attend_scores, first_seen, visible
from scaling.serve.cache import Share, with_scale

Keys = slice | tuple[Tensor, Tensor]  # places of all rows, or two indices of a layer's KV


class Extent(NamedTuple):
    """Bounds that the host knows for the lengths of a call's rows, so that no length is read on the device.

    Attributes:
        least: The fewest tokens that a row may hold before the call.
        latest: The most tokens that a row may hold before the call.
        most: The most tokens that a row may hold after the call, which is the number of places that attention reads.
        full: Whether each row gets T new tokens.
        idle: Whether no row gets any.
        fixed: Whether shapes may depend on no value, so that an expert computes all tokens, whatever they choose.
    """

    least: int
    latest: int
    most: int
    full: bool = False
    idle: bool = False
    fixed: bool = False

    @classmethod
    def of(cls, held: Sequence[int], new: Sequence[int], T: int) -> "Extent":
        """Return the extent of rows that hold held[b] tokens and get new[b] further ones, at most T."""
        most = max(a + b for a, b in zip(held, new, strict=True))
        return cls(min(held), max(held), most, min(new) == T, not any(new))

    @property
    def alike(self) -> bool:
        """Whether all rows have one length before the call, and one after it."""
        return self.full and self.least == self.latest


class Slots:
    """The rows of the batch whose keys and values this rank holds, and their T new tokens; the first new[b] are real.

    No value is read on the host, so a graph of these operations serves every step of the same shapes and `Extent`. A
    cache may come as its layers, KV[i][l]: a compiler writes to these in place, where it would copy a stacked cache.
    If there is a second table, cache["window_pages"], layers with a window read their pages from it.

    Attributes:
        positions: The tokens' places in their rows, [B_Z, T], or [T] if all rows are alike. A padded token has the
            place of its row's last real one.
        chunked: Whether layers' windows are chunks.
        own: Which of the tokens are this rank's queries, if T is split over C.
        begun: begun[B_Z], the tokens that each row has before the call.
        new: new[B_Z].
        states: Each row's slot among the states of linear layers; by default rows and states are in one order.
    """

    def __init__(
        self, cache: dict, new: Tensor, T: int, share: Share, extent: Extent, own: slice | None = None, chunked=False
    ):
        self.chunked = chunked
        self.cache, self.T, self.extent, self.own, self._seen = cache, T, extent, own, {}
        self.windowed = None
        if "window_pages" in cache:
            rest = {name: x for name, x in cache.items() if name != "window_pages"}
            self.windowed = Slots(rest | {"pages": cache["window_pages"]}, new, T, share, extent, own, chunked)
        self.rows = share.rows(len(cache["lengths"]))
        self.begun, self.new = held, new = cache["lengths"][self.rows], new[self.rows]
        self.size = cache["KV"][0][0].shape[1]  # places of a row on this rank, or of a page
        self.first = self.size * share.shard
        self.table = cache["pages"][self.rows] if "pages" in cache else None
        self.states = cache["states"][self.rows] if "states" in cache else slice(None)
        t = torch.arange(T, device=held.device)
        if extent.alike:
            self.positions = extent.least + t
        else:
            self.positions = (held[:, None] + torch.minimum(t, new[:, None] - 1)).clamp(min=0)
        self.into = self.source = self.any = None
        if not (extent.alike and self.table is None and share.shards == 1):
            self._place(held, new, t, share.shards > 1, extent.idle or share.groups * share.shards > 1)

    def _place(self, held: Tensor, new: Tensor, t: Tensor, split: bool, idle: bool) -> None:
        """Find where each token is written: `into`, two indices of a layer's KV.

        Every token writes, so that shapes do not depend on values. A padded token, or one whose place is on another
        rank, repeats the write of the nearest token of its row that this rank holds, which `source` gives. A row
        without such a token repeats another row's. If no row has one, the places get the values that they have.
        """
        rows = torch.arange(len(held), device=held.device)
        if split or not self.extent.full:
            begin, end = torch.zeros_like(held), new
            if split:
                begin, end = (self.first - held).clamp(min=0), torch.minimum(new, self.first + self.size - held)
            works = end > begin
            rows = torch.where(works, rows, works.long().argmax())
            t = torch.minimum(torch.maximum(t, begin[rows, None]), end[rows, None] - 1).clamp(min=0)
            self.source = rows[:, None].expand_as(t), t
            self.any = works.any() if idle else None
        places = held[rows, None] + t - self.first
        places = places.clamp(0, self.size - 1) if self.any is not None and self.table is None else places
        self.into = self._indices(rows, places)

    def _indices(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two indices of a layer's KV at places[B, n] of rows[B]."""
        rows = rows[:, None].expand_as(places)
        if self.table is None:
            return rows, places
        page = (places // self.size).clamp(max=self.table.shape[1] - 1)
        return self.table[rows, page].clamp(min=0), places % self.size

    def append(self, l: int, *new: Tensor) -> None:
        """Write layer l's keys and values [B_Z, T, K_Y, H] of the new tokens, or their latents, to the cache."""
        for i, x in enumerate(new):
            if "scale" in self.cache:
                x, scale = with_scale(x, self.cache["KV"][i][l].dtype)
                self._write(self.cache["scale"][i][l], scale)
            self._write(self.cache["KV"][i][l], x)

    def _write(self, whole: Tensor, x: Tensor) -> None:
        if self.into is None:
            if not whole.is_meta:
                whole[:, self.extent.least : self.extent.most] = x
            return
        x = (x if self.source is None else x[self.source]).to(whole.dtype)
        whole.index_put_(self.into, x if self.any is None else torch.where(self.any, x, whole[self.into]))

    def read(self, l: int, keys: Keys, dtype: torch.dtype) -> list[Tensor]:
        """Return layer l's keys and values [B_Z, S, K_Y, H], or latents, at the places `keys` of this rank's cache."""
        found = [self._read(x[l], keys) for x in self.cache["KV"]]
        if "scale" in self.cache:  # of float32, in which the numbers are multiplied before they are rounded
            wide, scales = (
                torch.promote_types(dtype, torch.float32),
                (self._read(x[l], keys) for x in self.cache["scale"]),
            )
            found = [x.to(wide) * scale[..., None] for x, scale in zip(found, scales, strict=True)]
        return [x.to(dtype) for x in found]

    def _read(self, whole: Tensor, keys: Keys) -> Tensor:
        if self.table is None or isinstance(keys, tuple):
            return whole[:, keys] if isinstance(keys, slice) else whole[keys]
        start = keys.start // self.size
        pages = self.table[:, start : -(-keys.stop // self.size)]
        found = whole.index_select(0, pages.flatten()).view(len(pages), -1, *whole.shape[2:])
        return found[:, keys.start - start * self.size : keys.stop - start * self.size]

    def attend(self, l: int, Q: Tensor, K: Tensor, V: Tensor, config: Config, sinks: Tensor | None = None) -> Tensor:
        """Write the new K, V[B_Z, T, K_Y, H], and return O[B_Z, T, N_Y, H] of the queries over the cache."""
        (K, V), mask, causal = self.held(l, config.windows[l], Q.dtype, K, V)
        if config.score_cap is None and sinks is None:
            return self.over(Q, K, V, mask, causal)
        hidden = torch.ones(Q.shape[1], K.shape[1], dtype=torch.bool, device=Q.device).triu(1) if causal else None
        hidden = hidden if mask is None else (mask != 0)[:, :, None]
        hidden = torch.zeros((), dtype=torch.bool, device=Q.device) if hidden is None else hidden
        return attend_scores(Q, K, V, hidden, None, config.score_cap, sinks)

    def held(self, l: int, window: int | None, dtype: torch.dtype, *new: Tensor) -> tuple[list[Tensor], Any, bool]:
        """Write the new keys and values, or latents, and return layer l's at all places that any query sees.

        The mask and causal in the result say which of these places each query sees; `over` takes them.
        """
        if window is not None and self.windowed is not None:
            return self.windowed.held(l, window, dtype, *new)
        self.append(l, *new)
        keys, mask, causal = self.seen(window, dtype)
        return self.read(l, keys, dtype), mask, causal

    def over(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Return O[B_Z, T, N_Y, H] of the queries over K and V[B_Z, S, K_Y, H], with the mask and causal of `seen`."""
        heads = K.shape[2]
        k, v = K.transpose(1, 2), V.transpose(1, 2)
        if self.T == 1:  # the query heads that share a KV head become its rows
            q = Q.unflatten(2, (heads, -1))[:, 0]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2)[:, None]
        q, shared = Q.transpose(1, 2), heads < Q.shape[2]
        O = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        return O.transpose(1, 2)

    def seen(self, window: int | None, dtype: torch.dtype) -> tuple[Keys, Tensor | None, bool]:
        """Return (the places to read, the mask to add to the scores or None, whether attention is simply causal)."""
        if window not in self._seen:
            self._seen[window] = self._mask(window, dtype)
        return self._seen[window]

    def _mask(self, window: int | None, dtype: torch.dtype) -> tuple[Keys, Tensor | None, bool]:
        least, latest, most, *_ = self.extent
        low = 0 if window is None else max(0, first_seen(least, window, self.chunked))
        if self.own is None and not latest and (window is None or window >= self.T):
            return slice(low, most), None, self.T > 1
        if self.extent.alike and self.T == 1:
            return slice(low, most), None, False
        keys: Keys = slice(low, most)
        places = torch.arange(low, most, device=self.positions.device)
        if window is not None and window + self.T - 1 < most - low and self.own is None:  # each row's own window
            places = self.positions[:, :1] + torch.arange(1 - window, self.T, device=self.positions.device)
            rows = torch.arange(len(places), device=places.device)
            keys = self._indices(rows, places.clamp(0, most - 1))
        seen = self.visible(places, window)[:, None]
        return keys, torch.zeros((), dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf), False

    def visible(self, places: Tensor, window: int | None) -> Tensor:
        """Return which keys each query sees, visible[B_Z, T_C, S], with B_Z = 1 if all rows are alike.

        The keys are at positions places[S] of every row, or places[B_Z, S] if rows differ; below 0 there is no key.
        """
        rows = self.positions if self.positions.dim() == 2 else self.positions[None]
        places = places if places.dim() == 1 else places[:, None]
        rows = rows if self.own is None else rows[:, self.own]
        return visible(rows, places, window, chunked=self.chunked) & (places >= 0)
