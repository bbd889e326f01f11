"""Causal grouped-query attention on one device: by PyTorch's kernel, and written out.

Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> O[B, T, N, H]; the heads of V and O may have another width. The queries
are the last T of the S positions, so T = S in training and T = 1 in decoding; G = N/K query heads share a KV head. With
`window` a query sees itself and the window - 1 keys before it; with `segments`[B, S], the ids of packed documents, only
its own (Part 4, Appendix A).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.common.torch_private import flash_cpu, in_transform
from scaling.models.pointwise import soft_cap


def _grouped(Q: Tensor, kv_heads: int) -> Tensor:
    """Q[B, T, N, H] -> [B, K, G, T, H]."""
    if Q.shape[2] % kv_heads:
        raise ValueError(f"K={kv_heads} KV heads must divide N={Q.shape[2]} query heads\n  fix: give K a divisor of N")
    return Q.unflatten(2, (kv_heads, -1)).movedim(1, 3)


def _ungrouped(O: Tensor) -> Tensor:
    """O[B, K, G, T, H] -> [B, T, N, H]."""
    return O.movedim(3, 1).flatten(2, 3)


def first_seen(place: Any, window: int, chunked: bool) -> Any:
    """Return the place of the first key that a query at `place` sees; in a window it may be negative."""
    return place - place % window if chunked else place - window + 1


def in_chunks(
    window: int | None, length: int, at: Tensor, places: Tensor, segments: Tensor | None
) -> tuple[None, Tensor | None]:
    """Return the (window, segments) with which attention lets each token see only its own chunk of `window` tokens.

    A window of None sees all. Each document is cut into chunks separately, and each chunk becomes a segment. A token
    has the position at[T_C] in the sequence of `length` tokens, and places[B, T_C] or [T_C] in its document. Scores of
    other chunks are computed and masked. The new segments are [1, T_C] if all rows are alike.
    """
    if window is None or window >= length:
        return None, segments
    return None, torch.atleast_2d(at - places % window)  # each chunk is named by its first token


def within_chunks(
    attend: Callable, length: int, at: Tensor, places: Tensor, Q, K, V, *, window=None, segments=None, **given
) -> Tensor:
    """Attend within chunks, as `in_chunks` says."""
    window, segments = in_chunks(window, length, at, places, segments)
    return attend(Q, K, V, window=window, segments=segments, **given)


def visible(
    queries: Tensor, keys: Tensor, window: int | None = None, query_ids=None, key_ids: Any = None, chunked: bool = False
) -> Tensor:
    """visible[T, S], or [B, T, S] with ids: which keys each query sees.

    queries[T] and keys[S] are positions in the whole sequence, in any order; [B, T] and [B, 1, S] if they differ by
    row. query_ids[B, T] and key_ids[B, S] are the ids of their documents.
    """
    seen = queries[..., None] >= keys
    if window is not None:
        seen = seen & (keys >= first_seen(queries, window, chunked)[..., None])
    return seen if query_ids is None else seen & (query_ids[:, :, None] == key_ids[:, None, :])


def _mask(Q: Tensor, K: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """`visible` of the last T of S positions: [T, S], or [B, 1, T, S] with segments."""
    T, S = Q.shape[1], K.shape[1]
    keys = torch.arange(S, device=Q.device)
    if segments is None:
        return visible(keys[S - T :], keys, window)
    return visible(keys[S - T :], keys, window, segments[:, S - T :], segments)[:, None]


def sdpa(
    Q: Tensor, K: Tensor, V: Tensor, *, window=None, segments=None, scale: float | None = None, cap=None, sinks=None
) -> Tensor:
    """Attend by F.scaled_dot_product_attention, which picks a fused kernel. `scale` is 1/sqrt(H) unless given.

    The kernels have no forward derivative, and neither soft caps nor sinks. There `dot_product_attention` is used.
    """
    _grouped(Q, K.shape[2])
    if cap is not None or sinks is not None:
        return dot_product_attention(Q, K, V, window=window, segments=segments, scale=scale, cap=cap, sinks=sinks)
    T, S = Q.shape[1], K.shape[1]
    plain = segments is None and (window is None or window >= S) and (T == S or T == 1)
    try:
        return _by_kernel(Q, K, V, None if plain else _mask(Q, K, window, segments), scale)
    except NotImplementedError:
        return dot_product_attention(Q, K, V, window=window, segments=segments, scale=scale)


def _by_kernel(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attend by torch's kernel; without a mask a query sees all keys up to its own, and a single query all keys."""
    heads, grouped = (Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2)), K.shape[2] < Q.shape[2]
    causal = mask is None and Q.shape[1] > 1
    given: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    return F.scaled_dot_product_attention(*heads, **given).transpose(1, 2)


class PackedSpans(NamedTuple):
    """Rows of packed documents, cut into spans; no token sees a token of another span.

    Attributes:
        lengths: The number of tokens of each span, one row after the other, or of one row if all rows are alike.
        masks: The mask [t, t] of each span, which is added to scores, or None if it hides only later tokens.
        room: Where the documents are not known, as much memory as masks can take.
    """

    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]
    room: Tensor | None = None


def shared_mask(
    window: int | None, T: int, segments: Tensor | None, dtype: torch.dtype, device, scored: bool, span: int
) -> Tensor | PackedSpans | None:
    """Return what hides scores from `fused` in all layers with this window, or None if it hides only later tokens.

    Where rows of more than `span` tokens have several documents, these are `PackedSpans`, so that attention takes the
    time and memory of each document alone. Otherwise it is a mask, [T, T] or [B, 1, T, T], which is 0 or -inf and is
    added to the scores. From bools the kernel would make such an array in each layer, and save it. Where the scores are
    stored (`scored`), the mask is the bool `hidden` of `attend_scores`. The lengths of documents are read from
    `segments`, so a GPU's queue runs on if these are on the host.
    """
    if not scored and segments is None and (window is None or window >= T):
        return None
    fixed = torch.compiler.is_compiling() or in_transform() is not None  # documents may end anywhere
    in_spans = span < T and not scored and not fixed
    if segments is not None and in_spans and (spans := spans_of(segments, window, dtype, device, span)):
        return spans
    keys, segments = torch.arange(T, device=device), None if segments is None else segments.to(device)
    hidden = ~visible(keys, keys, window, segments, segments)
    if segments is not None:
        hidden = hidden[:, None]
    if scored:
        return hidden if segments is None else hidden[:, None]
    return _added(hidden, dtype)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores: -inf where they are hidden, else 0."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)


def spans_of(segments: Tensor, window: int | None, dtype: torch.dtype, device, span: int) -> PackedSpans | None:
    """Return the spans of segments[B, T]: long documents, and short ones that have at most `span` tokens together.

    On the meta device documents are not known. There are no spans if a document is in several pieces, or if one that is
    not known might be longer than the window.
    """
    B, T = segments.shape
    if segments.is_meta:
        room = torch.empty((B * T, span), dtype=dtype, device="meta")
        return PackedSpans((T,), (None,), room) if window is None or window >= T else None
    lengths: list[int] = []
    masks: list[Tensor | None] = []
    keys = torch.arange(T, device=device)
    for row in segments.cpu():
        documents, counts = row.unique_consecutive(return_counts=True)
        if len(documents.unique()) < len(documents):
            return None
        groups: list[list[int]] = [[]]
        for n in counts.tolist():
            if groups[-1] and sum(groups[-1]) + n > span:
                groups.append([])
            groups[-1].append(n)
        for ids, group in zip(row.to(device).split([*map(sum, groups)]), groups, strict=True):
            t = len(ids)
            plain = len(group) == 1 and (window is None or window >= t)
            seen = None if plain else visible(keys[:t], keys[:t], window, ids[None], ids[None])[0]
            masks.append(None if seen is None else _added(~seen, dtype))
            lengths.append(t)
    return PackedSpans(tuple(lengths), tuple(masks))


def fused(Q: Tensor, K: Tensor, V: Tensor, *, mask: Tensor | PackedSpans | None = None, cap=None, sinks=None) -> Tensor:
    """Attend by a kernel, with a `shared_mask`; scores with a cap or sinks are computed and stored.

    On the meta device torch would choose the form that stores all scores, and a count of memory would include them.
    """
    if cap is not None or sinks is not None:
        return attend_scores(Q, K, V, mask, None, cap, sinks)
    if isinstance(mask, PackedSpans):
        rows = (x.reshape(-1, sum(mask.lengths), *x.shape[2:]).split(mask.lengths, 1) for x in (Q, K, V))
        O = torch.cat([fused(*span, mask=hidden) for *span, hidden in zip(*rows, mask.masks, strict=True)], 1)
        return O.reshape(*Q.shape[:3], -1)
    if not Q.is_meta:
        return _by_kernel(Q, K, V, mask)
    heads = (x.transpose(1, 2) for x in (Q, K, V))
    return flash_cpu(*heads, 0.0, mask is None, attn_mask=mask)[0].transpose(1, 2)


def dot_product_attention(
    Q, K, V, *, window=None, segments=None, scale: float | None = None, cap: float | None = None, sinks=None
) -> Tensor:
    """Attend by the book's einsums, which compute and store all T x S scores, masked or not.

    Scores are capped softly by `cap`. sinks[N] are scores of a key that every query of a head sees, without a value.
    """
    seen = _mask(Q, K, window, segments)
    return attend_scores(Q, K, V, ~(seen if segments is None else seen[:, None]), scale, cap, sinks)


def attend_scores(
    Q: Tensor, K: Tensor, V: Tensor, hidden: Any, scale: float | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend where `hidden`, of a shape that broadcasts to scores[B, K, G, T, S], is False."""
    q = _grouped(Q, K.shape[2])
    scores = torch.einsum("bkgth,bskh->bkgts", q, K) * (1 / math.sqrt(Q.shape[-1]) if scale is None else scale)
    scores = soft_cap(scores, cap).masked_fill(hidden, -math.inf)
    if sinks is not None:
        each = sinks.to(scores.dtype).view(1, K.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, each], -1)
    weights = scores.softmax(-1)[..., : K.shape[1]]
    return _ungrouped(torch.einsum("bkgts,bskh->bkgth", weights, V))
