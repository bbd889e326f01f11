"""Prefill and decode: tokens through the model, onto a cache (Part 7, "The Basics of Transformer Inference").

Both are `extend`: each row gets T more tokens, which see the cached tokens and each other. Prefill returns the logits
of each row's last token, and decode has one token a row. All three are pure and return a new cache. With `donate=True`
they change the given cache in place, which saves a copy, and the caller must not use it again.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scaling import tree
from scaling.collectives import all_gather
from scaling.common.arguments import flag
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.inputs import IDS, check_ids, check_range
from scaling.models.layer import Context, read_norms, scale_by, seen_heads, undifferentiated, used_gains
from scaling.models.leaves import STACKS
from scaling.models.pointwise import soft_cap
from scaling.models.rope import layer_tables
from scaling.models.transformer import all_layers
from scaling.scaled import Scaled
from scaling.serve.cache import capacity, check_cache, share_of, writable
from scaling.serve.forms import experts, heads, heads_batch, latent, sequence, weights_2d
from scaling.serve.requests import check_served_text, longest_text
from scaling.serve.slots import Extent, Slots
from scaling.serve.types import ONE, SPLIT_ROWS, check_dtypes, floats, plain_leaf, specs
from scaling.spec import Format

LISTINGS: dict[str, tuple[Any, Any]] = {  # (the module with embed, mlp and head, the module with attention)
    "heads": (heads, heads),
    "heads_batch": (heads_batch, heads_batch),
    "sequence": (heads_batch, sequence),
    "2d": (weights_2d, weights_2d),
    "experts": (experts, experts),
}


def prefill(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    mesh=None,
    *,
    lengths: Tensor | None = None,
    form: str = "heads",
    donate: bool = False,
) -> tuple[Tensor, dict]:
    """Return (logits[B, V] at each row's last token, cache) of right-padded tokens[B, T]; row b has lengths[b].

    The cache may hold tokens already: a prompt that comes in chunks has the logits of the whole prompt. Tokens, lengths
    and logits are whole on every rank.

    Args:
        params: This rank's params, typed as in `specs`.
        tokens: The ids, tokens[B, T].
        cache: A cache of `init_cache`.
        config: The model.
        mesh: The mesh, or None for one device.
        lengths: lengths[B] of the prompts; None means that all have T tokens.
        form: How params and cache are sharded, one of `serve.types.FORMS`.
        donate: Whether to change the cache in place.

    Raises:
        ValueError: An empty prompt, one that the cache has no room for, or ids outside the vocabulary.
    """
    return _checked(params, tokens, cache, config, mesh, lengths, form, donate, True)


def decode(
    params: dict, tokens: Tensor, cache: dict, config: Config, mesh=None, *, form: str = "heads", donate: bool = False
) -> tuple[Tensor, dict]:
    """Return (logits[B, V], cache) after one more token of each row, tokens[B]. Arguments are as in `prefill`."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        found = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"decode takes one token a row, tokens[B]; got {found}\n  fix: give an int64 for each row")
    return _checked(params, tokens[:, None], cache, config, mesh, None, form, donate, True)


def extend(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    mesh=None,
    *,
    lengths: Tensor | None = None,
    form: str = "heads",
    donate: bool = False,
) -> tuple[Tensor, dict]:
    """Return (logits[B, T, V] at every token, cache), to score a text or verify a draft. A row may have no tokens.

    The logits at padded tokens mean nothing. To take tokens back, go on with cache | {"lengths": smaller}. The
    arguments are as in `prefill`.
    """
    return _checked(params, tokens, cache, config, mesh, lengths, form, donate, False)


@torch.no_grad()
def _checked(params, tokens, cache, config, mesh, lengths, form, donate, last) -> tuple[Tensor, dict]:
    mesh = ONE if mesh is None else mesh
    check_served(params, config, mesh, form)
    lengths, extent, cache = prepare_call(params, tokens, cache, config, mesh, lengths, form, donate, int(last))
    if not tokens.is_meta:
        check_served_text(config, int((cache["lengths"] + lengths).max()))
    logits = logits_of(params, tokens, cache, lengths, extent, config, mesh, form=form, last=last)
    held = cache["lengths"] + lengths
    return logits, cache | {"lengths": held} | ({"read": held} if "S" in cache else {})


def warn_beyond(config: Config, length: int) -> None:
    """Warn, once in a process as Python's warnings do, where a text is longer than the model was made for."""
    if (longest := longest_text(config)) and length > longest:
        what = f"{config.name} is made for texts of at most {longest:,} tokens, and goes on with a longer one"
        fix = "give a shorter prompt, or ask for fewer tokens"
        warnings.warn(f"{what}: expect no sense in it\n  fix: {fix}", RuntimeWarning, stacklevel=2)


def logits_of(
    params: dict,
    tokens: Tensor,
    cache: dict,
    lengths: Tensor,
    extent: Extent,
    config: Config,
    mesh,
    *,
    form: str = "heads",
    last: bool = True,
    places: dict | None = None,
) -> Tensor:
    """Return the logits of tokens[B, T], and write the keys and values of row b's lengths[b] real tokens to the cache.

    Nothing is checked. The host reads values only for experts, and none if the extent is `fixed`: such a call can be
    compiled or captured.

    Args:
        params: This rank's params, typed as in `specs`.
        tokens: The ids, tokens[B, T].
        cache: The cache, which is written to.
        lengths: lengths[B], the number of real tokens of each row.
        extent: The bounds of the rows' lengths. They decide how much of the cache attention reads.
        config: The model.
        mesh: The mesh.
        form: How params and cache are sharded.
        last: Whether to return the logits[B, V] of each row's last token, or else logits[B, T, V] of all tokens.
        places: The `rope.table_kinds` of all places that a row may have. None computes the angles here.
    """
    share, dtype, T = share_of(mesh, form), plain_leaf(params).dtype, tokens.shape[1]
    scale = config.residual_scale
    (listing, attending), own = LISTINGS[form], None
    attention = latent.ATTENTION[form] if config.latent else attending.attention
    if T > 1 and mesh.sizes.get("C", 1) > 1:
        mesh = mesh.optional
        tokens, own = split_over_C(tokens, mesh)
        extent = extent._replace(full=extent.full and tokens.shape[1] == T)  # no row has a padded token
    else:
        mesh = mesh.without("C")  # each row has one token, which is not split
    slots = Slots(cache, lengths, tokens.shape[1], share, extent, own, config.chunked)
    positions = slots.positions if own is None else slots.positions[..., own]
    params, ropes = used_gains(params, config), layer_tables(config, positions, dtype, places)
    at = Context(config, mesh, ropes, slots.attend, slots=slots, vjp=undifferentiated)
    params = params | {stack: seen_heads(params[stack], at) for stack in STACKS if stack in params}
    stored = isinstance(params["embed"], Scaled)
    ends = {name: floats(params[name], dtype) for name in params if name not in STACKS} if stored else params
    tokens = tokens[slots.rows] if form in SPLIT_ROWS else tokens
    x = listing.embed(*look_up(ends["embed"], tokens if own is None else tokens[:, own], share.block), at)
    x = scale_by(x, config.embed_scale)
    if "positions" in ends:
        at_tokens = cache["lengths"][:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        at_tokens = (at_tokens[slots.rows] if form in SPLIT_ROWS else at_tokens).clamp(max=config.learned_positions - 1)
        x = x + torch.nn.functional.embedding(at_tokens if own is None else at_tokens[:, own], ends["positions"])
    with kernels(x.device):
        for l, W in enumerate(all_layers(params, config)):
            W = floats(W, dtype) if stored else W
            layer, kind = at._replace(rope=ropes[l]), heads.linear_attention if "W_QKVZ" in W else attention
            Attn = listing.normed_result(W, "norm_attn_out", kind(W, x, layer, config.slots[l]), at)
            mid = x + scale_by(Attn, scale)
            Out = listing.mlp(read_norms(W), x, at) if config.parallel else listing.mlp(W, mid, at)
            x = mid + scale_by(listing.normed_result(W, "norm_mlp_out", Out, at), scale)
    if own is not None:
        x = all_gather("x[B_ZE, T_C, D] -> x[B_ZE, T, D]", x, mesh)[:, :T]
    if last:
        x = last_of(x, lengths[slots.rows] if form in SPLIT_ROWS else lengths)
    logits = soft_cap(listing.head(ends, x, at), config.logit_cap)
    return logits[:, 0] if last else logits


def kernels(device: torch.device) -> AbstractContextManager:
    """Return a context with the attention kernels that take any length without a new plan.

    cuDNN's kernel makes a plan for each new length, and a cache has another length at each step: with it a decode step
    of 16 layers on an H200 takes 50 ms, and without it 10.
    """
    alike = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(alike) if device.type == "cuda" else nullcontext()


def split_over_C(tokens: Tensor, mesh) -> tuple[Tensor, slice]:
    """Return (tokens[B, T], padded so that T divides over C, and the slice of them that is this rank's)."""
    tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % mesh.sizes["C"]))
    each = tokens.shape[1] // mesh.sizes["C"]
    return tokens, slice(mesh.coord["C"] * each, (mesh.coord["C"] + 1) * each)


def look_up(E: Tensor, tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (x[B, T, D] of tokens[B, T], which of the tokens are in this block of the vocabulary's rows)."""
    local = tokens - block * len(E)
    here = (local >= 0) & (local < len(E))
    return torch.nn.functional.embedding(torch.where(here, local, 0), E), here


def last_of(x: Tensor, lengths: Tensor) -> Tensor:
    """x[B, 1, D], at each row's last token, of x[B, T, D]."""
    return x if x.shape[1] == 1 else x[torch.arange(len(x), device=x.device), lengths - 1][:, None]


def prepare_call(params, tokens, cache, config, mesh, lengths, form, donate, least) -> tuple[Tensor, Extent, dict]:
    """Return the lengths and their extent, and the cache to write to, on the tokens' device.

    Raises:
        ValueError: The mesh, the model or the cache cannot take the call. All ranks raise alike, before any works.
    """
    flag(donate=donate)
    check_ids("tokens", tokens)
    check_cache(cache, config, mesh, form, len(tokens))
    B, T = tokens.shape
    if lengths is None:
        lengths = torch.full((B,), T, device=tokens.device)
    elif not isinstance(lengths, Tensor) or lengths.dtype not in IDS or lengths.shape != (B,):
        found = f"{lengths.dtype} {list(lengths.shape)}" if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"lengths must be int64[{B}], one for each row; got {found}\n  fix: give torch.tensor([...])")
    if not B or not T:
        raise ValueError(f"tokens[{B}, {T}]: there are no tokens\n  fix: give each row at least one token")
    lengths = lengths.to(tokens.device)
    cache = cache | {name: cache[name].to(tokens.device) for name in ("lengths", "pages") if name in cache}
    room = capacity(cache, share_of(mesh, form).shards)
    if tokens.is_meta:  # lengths without values: the most that the cache can hold
        extent = Extent(room - T, room - T, room, full=True)
    else:
        check_range("tokens", tokens, config.V)
        new, held = lengths.tolist(), cache["lengths"].tolist()  # on a GPU each of these reads waits for the device
        check_room(held, new, T, room, least)
        if "S" in cache and any(a not in (0, b) for a, b in zip(held, cache["read"].tolist(), strict=True)):
            raise ValueError(
                f"the cache's lengths are {held}, but its states have read {cache['read'].tolist()} tokens\n  rule: a "
                "linear layer's state takes no token back\n  fix: give length 0 to a row that starts anew"
            )
        if "pages" in cache:
            check_pages(cache, cache["lengths"] + lengths, share_of(mesh, form).groups)
        extent = Extent.of(held, new, T)
    return lengths, extent, writable(cache, plain_leaf(params), donate)


def check_served(params: Any, config: Config, mesh, form: str) -> None:
    """Raise ValueError unless these are this rank's params, and the model can be served."""
    if config.moe and config.capacity is not None:
        raise ValueError(
            f"{config.name}: experts with a capacity drop tokens depending on what else is in the batch\n"
            "  fix: serve config.with_(capacity=None)"
        )
    embed = params.get("embed") if isinstance(params, dict) else None
    stored = embed.format if isinstance(embed, Scaled) else None
    types = _types(config, tuple(mesh.sizes.items()), form, stored)
    tree.check(params, types, config.sizes, mesh, fix="tree.shard(params, serve.specs(config, mesh, form=...), mesh)")
    if stored is None:
        tree.check_floats(params)
    else:
        check_dtypes(params)


def check_room(held: Sequence[int], new: Sequence[int], T: int, room: int, least: int) -> None:
    """Raise ValueError unless each row has from `least` to T new tokens, and the cache has room for them."""
    low, high = min(new), max(new)
    if low < least:
        raise ValueError(f"row {new.index(low)} is empty: a prompt has at least one token\n  fix: leave it out")
    if low < 0 or high > T:
        raise ValueError(
            f"lengths must lie in {least}..{T}, where T = {T} tokens are given; got {low} to {high}\n"
            "  fix: give the number of real tokens of each row"
        )
    if min(held) < 0:
        raise ValueError(f"the cache's lengths are {held}\n  fix: give 0 for an empty row")
    after = [a + b for a, b in zip(held, new, strict=True)]
    if max(after) > room:
        row = after.index(max(after))
        raise ValueError(
            f"row {row}: {held[row]} tokens are held and {new[row]} more come, but the cache "
            f"has room for {room} in all\n  fix: call init_cache with a greater length, or give a shorter prompt"
        )


@lru_cache(maxsize=256)
def _types(config: Config, sizes: tuple, form: str, stored: Format | None) -> dict:
    return specs(config, AbstractMesh(dict(sizes)), form=form, format=stored)


def check_pages(cache: dict, after: Tensor, groups: int) -> None:
    """Raise ValueError unless each row has a page for every token that it will hold, and shares no page that it writes.

    A page that is written to must be in no other row, and only once in its row. The rows are split over `groups` groups
    of ranks, and each group numbers its pages from 0.
    """
    pages, page, held = cache["pages"], cache["KV"].shape[3], cache["KV"].shape[2]
    m = torch.arange(pages.shape[1], device=pages.device)
    needed = m * page < after[:, None]
    if bool((bad := needed & ((pages < 0) | (pages >= held))).any()):
        row, place = (int(i[0]) for i in bad.nonzero(as_tuple=True))
        raise ValueError(
            f"row {row}: no page for its tokens from {place * page} on: pages[{row}, {place}] is "
            f"{int(pages[row, place])}, of {held} pages\n  fix: give the row a page of the pool"
        )
    rank = torch.arange(len(pages), device=pages.device) * groups // len(pages)
    page_of = (pages + held * rank[:, None])[needed]
    writes = (needed & ((m + 1) * page > cache["lengths"][:, None]))[needed]
    holders = torch.bincount(page_of, minlength=held * groups)
    if bool((shared := writes & (holders[page_of] > 1)).any()):
        found = int(page_of[shared][0]) % held
        raise ValueError(
            f"page {found} is written to, but stands in more than one place of pages\n"
            "  rule: rows may share the pages of a prefix that is full; the others are each row's own\n"
            "  fix: give each row pages of its own from its last full page on"
        )
