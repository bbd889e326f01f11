"""Caches of keys and values: pytrees, contiguous or in pages (Part 7, "What about memory?" and "Tricks").

    {"KV": KV[2, L, B_Z, S, K_Y, H], "lengths": lengths[B]}                             contiguous
    {"KV": KV[2, L, P_Z, page, K_Y, H], "pages": pages[B, M], "lengths": lengths[B]}    in pages
and, of int8, "scale"[2, L, B_Z, S, K_Y], one a token and head. Of latent attention KV[I, L, B_Z, S, J, M], I = J = 1.
The types are `cache_specs`. A cache is data: fewer lengths roll it back, other rows of pages and lengths are another
batch on the same pool.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaling.arguments import whole
from scaling.collectives.buffers import overlaps_itself
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.inputs import IDS
from scaling.serve.types import ONE, cache_specs
from scaling.spec import ShardingError, Spec, parse

PAGED_SEQUENCE = (
    'form="sequence" splits S over Z, which a cache in pages cannot do\n  fix: give page=None, or choose another form'
)


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
    if page is not None and form == "sequence":
        raise ShardingError(PAGED_SEQUENCE)
    if dtype is not None:
        _check_dtype(dtype)
    int8, pages = dtype == torch.int8, 0 if page is None else -(-length // page)
    types = cache_specs(config, mesh, form=form, page=page, int8=int8)
    sizes = config.sizes | {"B": batch, "S": length, "P": batch * pages, "page": page or 0}
    sizes |= {"L": config.L, "R": mesh.sizes.get("Y", 1), "I": 1, "J": 1}
    device = "cpu" if mesh is ONE else mesh.device

    def zeros(name: str, dtype: torch.dtype | None) -> Tensor:
        shape = parse(types[name]).local_shape(sizes, mesh)
        if dtype is None:
            return torch.zeros((), device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    cache = {"KV": zeros("KV", dtype), "lengths": torch.zeros(batch, dtype=torch.int64, device=device)}
    if page is not None:
        own = cache["KV"].shape[2] // pages  # rows on this rank, which have their pages one after another
        table = torch.arange(batch * pages, device=device).view(batch, pages)
        cache["pages"] = table % (own * pages)
    return cache | ({"scale": zeros("scale", torch.float32)} if int8 else {})


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


def check_cache(cache: dict, config: Config, mesh, form: str, batch: int) -> None:
    """ValueError or ShardingError unless the cache is one of this model and form for `batch` rows."""
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
    if page is not None and form == "sequence":
        raise ShardingError(PAGED_SEQUENCE)
    spec = _held(config, tuple(mesh.sizes.items()), form, page is not None)
    rows = KV.shape[2] * mesh.size(spec.dims[2][1])
    times = KV.shape[3] * mesh.size(spec.dims[3][1])
    sizes = config.sizes | {"B": batch, "S": times, "P": rows, "page": times}
    sizes |= {"L": config.L, "R": mesh.sizes.get("Y", 1), "I": 1, "J": 1}
    if tuple(KV.shape) != (wanted := spec.local_shape(sizes, mesh)):
        raise ShardingError(
            f"{spec}: a cache of {config.name} is {wanted} on each rank; found {tuple(KV.shape)}\n"
            f'  fix: init_cache(config, {batch}, length, mesh=mesh, form="{form}")'
        )


@lru_cache(maxsize=256)
def _held(config: Config, sizes: tuple, form: str, paged: bool) -> Spec:
    """The type of the keys and values: decided once, not at each step."""
    return parse(cache_specs(config, AbstractMesh(dict(sizes)), form=form, page=1 if paged else None)["KV"])


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
