"""Caches of keys and values: pytrees, contiguous or in pages (Part 7, "What about memory?" and "Tricks").

    {"KV": KV[2, L, B_Z, S, K_Y, H], "lengths": lengths[B]}                             contiguous
    {"KV": KV[2, L, P_Z, page, K_Y, H], "pages": pages[B, M], "lengths": lengths[B]}    in pages
and, of int8, "scale"[2, L, B_Z, S, K_Y], one a token and head. Of latent attention KV[I, L, B_Z, S, J, M], I = J = 1.
The types are `cache_specs`. A cache is data: fewer lengths roll it back, other rows of pages and lengths are another
batch on the same pool.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives.buffers import overlaps_itself
from scaling.common.arguments import whole
from scaling.configs import Config
from scaling.models.inputs import IDS
from scaling.serve.types import ONE, SPLIT_ROWS, cache_specs, row_axes, shards_of_places
from scaling.spec import ShardingError, Spec, block_index, parse


class CacheLayout(NamedTuple):
    """How a form lays the rows of a batch out on a mesh: worked out once, not at each step.

    `KV`: the type of the cache, `one` the local shape of one row and one place. Of the `groups` of ranks that rows are
    split over this rank is in `group`, of the `shards` of a row's places it has `shard`, of the vocabulary `block`.
    """

    KV: Spec
    one: tuple[int, ...]
    groups: int
    group: int
    shards: int
    shard: int
    block: int

    def rows(self, batch: int) -> slice:
        """Those of a batch whose keys and values this rank holds."""
        own = batch // self.groups
        return slice(self.group * own, (self.group + 1) * own)


def cache_layout(config: Config, mesh, form: str, paged: bool = False) -> CacheLayout:
    """ShardingError for a form or a mesh that does not fit."""
    key = "served", config, form, paged
    if key not in mesh.lines:
        rows, shards = row_axes(form, mesh), shards_of_places(form, mesh)
        vocabulary = [axis for axis in ("Y" if form in SPLIT_ROWS else "YZ") if axis in mesh.sizes]
        KV = parse(cache_specs(config, mesh, form=form, page=1 if paged else None)["KV"])
        groups = mesh.size(rows)
        sizes = config.sizes | {"B": groups, "P": groups, "S": shards, "page": 1} | held_sizes(config, mesh)
        mesh.lines[key] = CacheLayout(
            KV, KV.local_shape(sizes, mesh), groups, block_index(rows, mesh.coord, mesh.sizes),
            shards, mesh.coord["Z"] if shards > 1 else 0, block_index(vocabulary, mesh.coord, mesh.sizes),
        )  # fmt: skip
    return mesh.lines[key]


def held_sizes(config: Config, mesh) -> dict[str, int]:
    """Of the dims that a cache has beside the model's own."""
    return {"L": config.L, "R": mesh.sizes.get("Y", 1), "I": 1, "J": 1}


def init_cache(
    config: Config,
    batch: int,
    length: int,
    *,
    mesh=None,
    dtype: torch.dtype | None = None,
    page: int | None = None,
    form: str = "heads",
) -> dict:
    """An empty cache for `batch` rows of `length` tokens: this rank's part of it, typed as `cache_specs`.

    `dtype`: of keys and values; torch.int8 stores them with a scale a token and head. None: the params' that first fill
    it; until then the zeros take no memory. `page`: the cache is a pool of pages of so many tokens, of which each
    row has enough for `length` in the table "pages". ValueError for sizes that are no sizes, ShardingError for a batch
    or a length that does not divide over the mesh.
    """
    whole(batch=batch, length=length, page=1 if page is None else page)
    mesh = ONE if mesh is None else mesh
    if dtype is not None:
        _check_dtype(dtype)
    int8, pages = dtype == torch.int8, 0 if page is None else -(-length // page)
    types = cache_specs(config, mesh, form=form, page=page, int8=int8)
    sizes = config.sizes | {"B": batch, "S": length, "P": batch * pages, "page": page or 0}
    sizes |= held_sizes(config, mesh)
    device = "cpu" if mesh is ONE else mesh.device

    def zeros(name: str, dtype: torch.dtype | None) -> Tensor:
        shape = parse(types[name]).local_shape(sizes, mesh)
        if dtype is None:
            return torch.zeros((), device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    cache = {"KV": zeros("KV", dtype), "lengths": torch.zeros(batch, dtype=torch.int64, device=device)}
    if page is not None:
        cache["pages"] = page_table(cache["KV"], batch, pages)
    return cache | ({"scale": zeros("scale", torch.float32)} if int8 else {})


def page_table(KV: Tensor, batch: int, pages: int) -> Tensor:
    """pages[B, M] of rows that have so many pages each, one after another on the ranks that hold the row."""
    return torch.arange(batch * pages, device=KV.device).view(batch, pages) % KV.shape[2]


def _check_dtype(dtype: Any) -> None:
    """ValueError unless keys and values can be held in it."""
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype == torch.int8):
        raise ValueError(f"a cache is of floating point or int8, not {dtype}\n  fix: give torch.bfloat16, say")


def untouched(cache: dict) -> bool:
    """Whether nothing has been written to it yet: its zeros take no memory, and have no dtype of their own."""
    return not any(cache["KV"].stride())


def capacity(cache: dict, shards: int = 1) -> int:
    """How many tokens a row has room for; `shards`: the ranks that S is split over."""
    times = cache["KV"].shape[3]
    return cache["pages"].shape[1] * times if "pages" in cache else times * shards


def writable(cache: dict, like: Tensor, donate: bool) -> dict:
    """The cache in memory of its own, unless it is donated; an untouched one gets the dtype and device of `like`."""
    if untouched(cache):
        return cache | {"KV": torch.zeros(cache["KV"].shape, dtype=like.dtype, device=like.device)}
    held = {name: x for name, x in cache.items() if name in ("KV", "scale")}
    return cache | {name: x.to(like.device, copy=not donate) for name, x in held.items()}


def check_cache(cache: dict, config: Config, mesh, form: str, batch: int) -> CacheLayout:
    """Its layout. ValueError or ShardingError unless the cache is one of this model and form for `batch` rows."""
    made = "a cache is what init_cache makes: a dict of tensors KV, lengths, and perhaps pages and scale"
    if not isinstance(cache, dict) or not {"KV", "lengths"} <= set(cache):
        raise ValueError(f"{made}\n  fix: init_cache(config, {batch}, length)")
    for name in ("lengths", "pages"):
        if name in cache and (not isinstance(cache[name], Tensor) or cache[name].dtype not in IDS):
            raise ValueError(f"{made}; {name} is {_kind(cache[name])}\n  fix: give int64, .long()")
    KV, lengths = cache["KV"], cache["lengths"]
    _check_dtype(getattr(KV, "dtype", type(KV).__name__))
    if KV.dtype == torch.int8 and "scale" not in cache:
        raise ValueError("an int8 cache without its scales: the numbers are lost\n  fix: keep cache['scale'] beside KV")
    if KV.dim() != 6 or lengths.dim() != 1:
        what = f"KV{list(KV.shape)} and lengths{list(lengths.shape)}"
        raise ValueError(f"{what} must have 6 dims and one dim\n  fix: init_cache(config, {batch}, length)")
    if not untouched(cache) and not KV.is_contiguous() and overlaps_itself(KV):
        raise ValueError("KV has elements that share their memory\n  fix: give it as .contiguous()")
    if len(lengths) != batch:
        raise ValueError(
            f"the cache has {len(lengths)} rows, the tokens {batch}\n  fix: make it by init_cache(config, {batch}, ...)"
        )
    if "scale" in cache and (KV.dtype != torch.int8 or cache["scale"].shape != KV.shape[:-1]):
        scale = list(cache["scale"].shape)
        raise ValueError(
            f"scale{scale} beside {KV.dtype} KV{list(KV.shape)}: int8 needs one scale for each token and head\n"
            "  fix: keep KV and scale together as init_cache makes them"
        )
    page = KV.shape[3] if "pages" in cache else None
    if page is not None and (cache["pages"].dim() != 2 or len(cache["pages"]) != batch):
        what = f"pages{list(cache['pages'].shape)} of a batch of {batch}"
        raise ValueError(f"{what}\n  rule: pages[B, M], a row for each row\n  fix: init_cache(..., page=...)")
    at = cache_layout(config, mesh, form, page is not None)
    lead, L, _, _, *head = at.one
    own = KV.shape[2] if page is not None else batch / at.groups
    if tuple(KV.shape) != (lead, L, own, KV.shape[3], *head):
        sizes = config.sizes | {"B": batch, "S": KV.shape[3] * at.shards, "P": KV.shape[2] * at.groups}
        wanted = at.KV.local_shape(sizes | {"page": KV.shape[3]} | held_sizes(config, mesh), mesh)
        raise ShardingError(
            f"{at.KV}: a cache of {config.name} is {wanted} on each rank; found {tuple(KV.shape)}\n"
            f'  fix: init_cache(config, {batch}, length, mesh=mesh, form="{form}")'
        )
    return at


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
