"""Which queries meet which keys, cut into tiles: what the mask hides altogether is in none of them.

Positions are known, so the mask is known without looking at data; documents (segments) are data, and hide more.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from scaling.strategies.context.kernels import LATER
from scaling.strategies.context.layout import Mask, Ranges

TILE = 1024  # queries, and keys, that are computed at a time: no more than TILE^2 scores a head exist
Piece = tuple[slice, Ranges]  # a part of a rank's tokens: its place among them, its positions


class Tile(NamedTuple):
    """Queries at the positions `rows` meet keys at `columns`. `segments`: None, or (of the queries [B, T], of the keys
    [B, S]): a query sees keys of its own segment alone. `queries`, `keys`: their types, for the trace."""

    rows: Ranges
    columns: Ranges
    mask: Mask
    scale: float
    segments: tuple[torch.Tensor, torch.Tensor] | None = None
    queries: str = "[B, T, N, H]"
    keys: str = "[2, B, S, K, H]"

    @property
    def pairs(self) -> int:
        """The scores, a head, that the mask lets through."""
        return self.mask.pairs(self.rows, self.columns)

    @property
    def plain(self) -> bool:
        """Whether all that is hidden is what comes later."""
        return self.mask == Mask(causal=True, window=None) and self.segments is None

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """The queries and the keys, cut for the tiles."""
        if self.plain and self.rows == self.columns and sum(map(len, self.rows)) <= TILE:
            whole = [(slice(0, sum(map(len, self.rows))), self.rows)]  # one triangle, also of two chunks
            return whole, whole
        columns = cut(self.columns, lambda part: None)
        rows = cut(self.rows, lambda part: self._seen([(part, c) for _, c in columns]))
        return rows, cut(self.columns, lambda part: self._seen([(r, part) for _, r in rows]))

    def _seen(self, met: list[tuple[Ranges, Ranges]]) -> tuple[bool, ...] | None:
        """Of each pair (queries, keys) whether all is seen or nothing; None if of one it is some."""
        counts = [(self.mask.pairs(r, c), sum(map(len, r)) * sum(map(len, c))) for r, c in met]
        return None if any(0 < n < full for n, full in counts) else tuple(n > 0 for n, _ in counts)

    def tiles(self, device) -> Iterator[tuple[slice, slice, torch.Tensor | str | None]]:
        """(place of the queries, of the keys, what is hidden: see kernels) of each tile of which something is seen."""
        rows, columns = self.pieces()
        for i, r in rows:
            for j, c in columns:
                if not (seen := self.mask.pairs(r, c)):
                    continue
                if self.plain and r == c:
                    yield i, j, LATER
                    continue
                hidden = None if seen == sum(map(len, r)) * sum(map(len, c)) else self.mask.hidden(r[0], c[0], device)
                if self.segments is not None:
                    other = (self.segments[0][:, i, None] != self.segments[1][:, None, j])[:, None, None]
                    hidden = other if hidden is None else other | hidden
                yield i, j, hidden


def cut(ranges: Ranges, alike: Callable[[Ranges], object]) -> list[Piece]:
    """Pieces of at most TILE tokens; neighbours of which `alike` says the same, if that is not None, are one."""
    pieces: list[Piece] = []
    at, before = 0, None
    for part in (chunk[start : start + TILE] for chunk in ranges for start in range(0, len(chunk), TILE)):
        said, place, at = alike((part,)), slice(at, at + len(part)), at + len(part)
        if pieces and said is not None and said == before and at - pieces[-1][0].start <= TILE:
            pieces[-1] = (slice(pieces[-1][0].start, at), (*pieces[-1][1], part))
        else:
            pieces.append((place, (part,)))
        before = said
    return pieces
