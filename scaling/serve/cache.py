"""Caches of keys and values: pytrees, contiguous or in pages (Part 7, "What about memory?" and "Tricks").

    {"KV": KV[2, L, B_Z, S, K_Y, H], "lengths": lengths[B]}                             contiguous
    {"KV": KV[2, L, P_Z, page, K_Y, H], "pages": pages[B, M], "lengths": lengths[B]}    in pages

A cache in int8 or FP8 also has "scale"[2, L, B_Z, S, K_Y], one scale for each token and head. Latent attention's cache
has KV[I, L, B_Z, S, J, M] with I = J = 1. `cache_specs` returns the types. A cache is data: smaller lengths roll it
back, and other rows of pages and lengths make another batch on the same pool. `slots.Slots` finds where a call writes
its new tokens in the cache, and which places their queries see.

`move` takes a cache from the mesh that prefills to the mesh that decodes (Part 7, "Designing an ... Inference Engine"),
by a planned reshard between two sets of ranks, which may differ. Each rank of the target receives the heads, rows and
positions that its type says, each once, and only positions that hold tokens. If Y has more ranks than there are KV
heads, the copies of a head are replicas along a further axis R: Y then has the size K, and R the rest.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import transfer
from scaling.collectives.operands import overlaps_itself
from scaling.common.arguments import whole
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.inputs import IDS
from scaling.scaled.rounding import rounded, scales_of
from scaling.serve.types import ONE, ROWS, SPLIT_ROWS, cache_specs, cache_type, check_mesh
from scaling.spec import FORMATS, block_index, parse, present

SCALED = {torch.int8: FORMATS["int8"], torch.float8_e4m3fn: FORMATS["fp8-row"]}  # dtypes of caches with scales


class Share(NamedTuple):
    """The part of a cache, and of the vocabulary, that this rank holds under a form.

    Attributes:
        groups: The number of groups of ranks that a batch's rows are split over.
        group: This rank's group.
        shards: The number of ranks that the places of a row are split over.
        shard: This rank's shard of them.
        block: This rank's block of the vocabulary.
    """

    groups: int
    group: int
    shards: int
    shard: int
    block: int

    def rows(self, batch: int) -> slice:
        """Return the slice of a batch's rows whose keys and values this rank holds."""
        own = batch // self.groups
        return slice(self.group * own, (self.group + 1) * own)


def share_of(mesh, form: str) -> Share:
    """Return this rank's share under a form, computed once per mesh."""
    key = "served", form
    if key not in mesh.lines:
        rows = present(f"rows[{ROWS[form]}]", mesh).dims[0][1]
        shards = mesh.sizes.get("Z", 1) if form == "sequence" else 1
        vocabulary = [axis for axis in ("Y" if form in SPLIT_ROWS else "YZ") if axis in mesh.sizes]
        group, block = (block_index(axes, mesh.coord, mesh.sizes) for axes in (rows, vocabulary))
        mesh.lines[key] = Share(mesh.size(rows), group, shards, mesh.coord["Z"] if shards > 1 else 0, block)
    return mesh.lines[key]


def divisible(batch: int, length: int, form: str, mesh) -> tuple[int, int]:
    """Return the smallest (rows, places per row) that divide over the mesh and are at least these."""
    share = share_of(mesh, form)
    return batch + -batch % share.groups, length + -length % share.shards


def held_sizes(config: Config, mesh) -> dict[str, int]:
    """Return the sizes of a cache's dims, except the sizes that depend on its batch and length."""
    return config.sizes | {"L": len(config.attending), "R": mesh.sizes.get("Y", 1), "I": 1, "J": 1}


def init_cache(
    config: Config,
    batch: int,
    length: int,
    *,
    mesh=None,
    dtype: torch.dtype | None = None,
    page: int | None = None,
    form: str = "heads",
    layers: int | None = None,
) -> dict:
    """Return this rank's part of an empty cache for `batch` rows of `length` tokens, typed as in `cache_specs`.

    Args:
        config: The model.
        batch: The number of rows B of all ranks.
        length: The number of tokens S that each row has room for.
        mesh: The mesh, or None for one device.
        dtype: The dtype of keys and values. torch.int8 and torch.float8_e4m3fn store them with one scale for each token
            and head. None takes the dtype of the params that first fill the cache; until then its zeros take no memory.
        page: If given, the cache is a pool of pages with this number of tokens. The table "pages" gives each row
            enough of them for `length`.
        form: How the cache is sharded, one of `serve.types.FORMS`.
        layers: The number of layers with attention that it holds, by default all.

    Raises:
        ValueError: A size that is not a positive whole number, or a dtype that cannot hold keys and values.
        ShardingError: A batch or a length that does not divide over the mesh.
    """
    whole(batch=batch, length=length, page=1 if page is None else page)
    mesh = ONE if mesh is None else mesh
    if dtype is not None:
        _check_dtype(dtype)
    scaled, pages = dtype in SCALED, 0 if page is None else -(-length // page)
    types = cache_specs(config, mesh, form=form, page=page, scaled=scaled)
    sizes = held_sizes(config, mesh) | {"B": batch, "S": length, "P": batch * pages, "page": page or 0}
    sizes |= {} if layers is None else {"L": layers}
    device = "cpu" if mesh is ONE else mesh.device

    def zeros(name: str, dtype: torch.dtype | None) -> Tensor:
        shape = parse(types[name]).local_shape(sizes, mesh)
        if dtype is None:
            return torch.zeros((), device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    cache = {"KV": zeros("KV", dtype), "lengths": torch.zeros(batch, dtype=torch.int64, device=device)}
    if page is not None:
        cache["pages"] = page_table(cache["KV"], batch, pages)
    if config.linear:
        tail = torch.float32 if dtype is None or scaled else dtype
        cache |= {"S": zeros("S", torch.float32), "tail": zeros("tail", tail), "read": cache["lengths"].clone()}
    return cache | ({"scale": zeros("scale", torch.float32)} if scaled else {})


def page_table(KV: Tensor, batch: int, pages: int) -> Tensor:
    """pages[B, M] of rows with M = `pages` pages each, numbered in sequence on the ranks that hold the row."""
    return torch.arange(batch * pages, device=KV.device).view(batch, pages) % KV.shape[2]


def _check_dtype(dtype: Any) -> None:
    """Raise ValueError unless the dtype can hold keys and values."""
    if dtype not in tree.FLOATS and dtype not in SCALED:
        names = ", ".join(str(each).removeprefix("torch.") for each in (*tree.FLOATS, *SCALED))
        raise ValueError(f"a cache is of {names}, not {dtype}\n  fix: give torch.bfloat16, say")


def with_scale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x[..., H] in int8 or FP8, and scale[...] float32, one for each token and head."""
    scale, inverse = scales_of(x.abs().amax(-1), SCALED[dtype])
    return rounded(x.to(torch.float32) * inverse[..., None], SCALED[dtype]), scale


def is_empty(cache: dict) -> bool:
    """Return whether nothing has been written to the cache yet.

    The zeros of an empty cache take no memory, and their dtype is not fixed.
    """
    return not any(cache["KV"].stride())


def capacity(cache: dict, shards: int = 1) -> int:
    """Return how many tokens a row has room for, if S is split over `shards` ranks."""
    times = cache["KV"].shape[3]
    return cache["pages"].shape[1] * times if "pages" in cache else times * shards


def writable(cache: dict, like: Tensor, donate: bool) -> dict:
    """Return a cache to write to: a copy, or if donated itself. An empty one gets `like`'s dtype and device."""
    if "S" in cache:
        S, tail = (cache[name].to(like.device, copy=not donate) for name in ("S", "tail"))
        cache = cache | {"S": S.to(torch.promote_types(like.dtype, torch.float32)), "tail": tail.to(like.dtype)}
    if is_empty(cache):
        return cache | {"KV": torch.zeros(cache["KV"].shape, dtype=like.dtype, device=like.device)}
    held = {name: x for name, x in cache.items() if name in ("KV", "scale")}
    return cache | {name: x.to(like.device, copy=not donate) for name, x in held.items()}


def check_cache(cache: Any, config: Config, mesh, form: str, batch: int) -> None:
    """Raise ValueError or ShardingError unless the cache is one of this model and form for `batch` rows."""
    made, fix = "a cache is what init_cache makes", f'init_cache(config, {batch}, length, mesh=mesh, form="{form}")'
    if not isinstance(cache, dict) or not {"KV", "lengths", *(("S", "tail", "read") if config.linear else ())} <= {
        *cache
    }:
        raise ValueError(f"{made}: a dict of tensors KV, lengths, and perhaps pages and scale\n  fix: {fix}")
    KV, paged = cache["KV"], "pages" in cache
    _check_dtype(getattr(KV, "dtype", type(KV).__name__))
    if (scaled := KV.dtype in SCALED) != ("scale" in cache):
        what = f"a cache of {KV.dtype} without its scales" if scaled else f"scales beside a cache of {KV.dtype}"
        raise ValueError(f"{what}: int8 and FP8 need one for each token and head\n  fix: keep them together")
    for name in ("lengths", "pages")[: 1 + paged]:
        x, dims = cache[name], 1 + (name == "pages")
        if not isinstance(x, Tensor) or x.dtype not in IDS or x.dim() != dims or len(x) != batch:
            found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            text = f"{name}[B{', M' * (dims - 1)}] are int64 of {batch} rows, as the tokens; found {found}"
            raise ValueError(f"{made}: {text}\n  fix: {fix}")
    types = _held_types(config, tuple(mesh.sizes.items()), form, paged, scaled)
    share, (rows, times) = share_of(mesh, form), KV.shape[2:4] if KV.dim() == 6 else (1, 1)
    sizes = {"B": batch, "S": times * share.shards, "P": rows * share.groups, "page": times}
    tree.check({name: cache[name] for name in types}, types, held_sizes(config, mesh) | sizes, mesh, None, "cache", fix)
    if not is_empty(cache) and not KV.is_contiguous() and overlaps_itself(KV):
        raise ValueError("KV has elements that share their memory\n  fix: give it as .contiguous()")


@lru_cache(maxsize=256)
def _held_types(config: Config, sizes: tuple, form: str, paged: bool, scaled: bool) -> dict[str, str]:
    types = cache_specs(config, AbstractMesh(dict(sizes)), form=form, page=1 if paged else None, scaled=scaled)
    return {name: type for name, type in types.items() if name not in ("lengths", "pages")}


def move(
    cache: dict | None,
    config: Config,
    source_mesh,
    target_mesh,
    *,
    form: str = "heads",
    target_form: str | None = None,
    length: int | None = None,
    page: int | None = None,
) -> dict | None:
    """Return this rank's part of the cache on the target mesh, in `target_form`; None outside of the target mesh.

    All ranks of both meshes call it, ranks outside the source with None. The new cache is bitwise the old one where
    that holds tokens, and zero elsewhere.

    Args:
        cache: This rank's part of the cache on the source mesh.
        config: The model.
        source_mesh: The mesh that has the cache.
        target_mesh: The mesh that receives it.
        form: The form of the cache on the source.
        target_form: Its form on the target, by default the same.
        length: The room of a row on the target, by default the source's, or a little more where that does not divide.
        page: Tokens of a page, if the target's cache is in pages.

    Raises:
        ShardingError: Forms and meshes do not suit each other.
        ValueError: `length` has no room for the longest row.
    """
    to = form if target_form is None else target_form
    check_mesh(config, source_mesh, form)
    types = cache_specs(config, source_mesh, form=form), cache_specs(config, target_mesh, form=to, page=page)
    if cache is not None:
        check_cache(cache, config, source_mesh, form, len(cache["lengths"]))
    info = own = None
    if cache is not None:
        own = capacity(cache, share_of(source_mesh, form).shards), int("scale" in cache)
        info = torch.cat([cache["lengths"].new_tensor(own), cache["lengths"]])
    moved = transfer("n[I] -> n[I]", info, source_mesh, target_mesh)
    info = moved if info is None else info
    if info is None:
        return None
    held, quantized = own or map(int, info[:2])
    rows, used = len(info) - 2, int(info[2:].max())
    S = held + -held % (target_mesh.sizes.get("Z", 1) if to == "sequence" else 1) if length is None else length
    S = S if page is None else -(-S // page) * page
    if used > S:
        raise ValueError(f"length={S} has no room for the longest row, of {used} tokens\n  fix: give a greater length")
    views, new = (split_kv_heads(source_mesh, config), split_kv_heads(target_mesh, config)), {}
    for name in ("KV", "scale")[: 1 + quantized]:
        ends = [
            present(cache_type(config, name, ROWS[f], "S_Z" if f == "sequence" else "S"), view)
            for f, view in zip((form, to), views, strict=True)
        ]
        whole = parse(cache_type(config, name, "B", "S", "K"))
        into = whole.local_shape(held_sizes(config, ONE) | {"B": rows, "S": S}, ONE)
        x = None if cache is None else contiguous(cache, name, source_mesh, form)
        part = transfer(f"{ends[0]} -> {ends[1]}", x, *views, into=into, below=(*into[:3], used, *into[4:]))
        if part is not None:
            new[name] = part if page is None else part.unflatten(3, (-1, page)).flatten(2, 3)
    for name in ("S", "tail") if config.linear else ():
        x = None if cache is None else cache[name]
        new[name] = transfer(f"{types[0][name]} -> {types[1][name]}", x, source_mesh, target_mesh)
    if moved is None:
        return None
    new |= {"lengths": moved[2:]} | ({"read": moved[2:]} if config.linear else {})
    return new if page is None else new | {"pages": page_table(new["KV"], rows, S // page)}


def contiguous(cache: dict, name: str, mesh, form: str) -> Tensor:
    """KV[2, L, B_Z, S, K_Y, H], or scale[2, L, B_Z, S, K_Y], of a cache that may be in pages."""
    if "pages" not in cache:
        return cache[name]
    table = present(f"pages[{ROWS[form]}, M]", mesh).slices(cache["pages"].shape, mesh, mesh.coord)
    return cache[name][:, :, cache["pages"][table]].flatten(3, 4)


def split_kv_heads(mesh, config: Config) -> AbstractMesh:
    """Return a view of the same ranks, with Y as the KV heads that it has, and R as their copies."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.sizes.items():
        sizes |= {"Y": config.K, "R": size // config.K} if axis == "Y" and config.K % size else {axis: size}
    view = AbstractMesh(sizes)
    view.ranks, view.device = mesh.ranks, mesh.device
    return view
