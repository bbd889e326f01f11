"""A cache moves from the mesh that prefills to the mesh that decodes (Part 7, "Designing an ... Inference Engine").

This is a planned reshard between two sets of ranks, which may differ. Each rank of the target receives the heads, rows
and positions that its type says, each once, and only positions that hold tokens. If Y has more ranks than there are KV
heads, the copies of a head are replicas along an axis R of their own: Y then has the size K, and R the rest.
"""

import torch
from torch import Tensor

from scaling.collectives import transfer
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.serve.cache import capacity, check_cache, held_sizes, page_table, share_of
from scaling.serve.types import ONE, ROWS, cache_specs, cache_type, check_mesh
from scaling.spec import parse, present


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
        length: The room of a row on the target, by default the source's.
        page: Tokens of a page, if the target's cache is in pages.

    Raises:
        ShardingError: Forms and meshes do not suit each other.
        ValueError: `length` has no room for the longest row.
    """
    to = form if target_form is None else target_form
    check_mesh(config, source_mesh, form)
    if config.linear:
        what = f"{config.name}: states of linear layers are not moved from mesh to mesh"
        raise ValueError(f"{what}\n  fix: prefill and decode on one mesh")
    cache_specs(config, target_mesh, form=to, page=page)
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
    S = held if length is None else length
    S = S if page is None else -(-S // page) * page
    if used > S:
        raise ValueError(f"length={S} has no room for the longest row, of {used} tokens\n  fix: give a greater length")
    views, new = (refined(source_mesh, config), refined(target_mesh, config)), {}
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
    if moved is None:
        return None
    new["lengths"] = moved[2:]
    return new if page is None else new | {"pages": page_table(new["KV"], rows, S // page)}


def contiguous(cache: dict, name: str, mesh, form: str) -> Tensor:
    """KV[2, L, B_Z, S, K_Y, H], or scale[2, L, B_Z, S, K_Y], of a cache that may be in pages."""
    if "pages" not in cache:
        return cache[name]
    table = present(f"pages[{ROWS[form]}, M]", mesh).slices(cache["pages"].shape, mesh, mesh.coord)
    return cache[name][:, :, cache["pages"][table]].flatten(3, 4)


def refined(mesh, config: Config) -> AbstractMesh:
    """Return a view of the same ranks, with Y as the KV heads that it has, and R as their copies."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.sizes.items():
        sizes |= {"Y": config.K, "R": size // config.K} if axis == "Y" and config.K % size else {axis: size}
    view = AbstractMesh(sizes)
    view.ranks, view.device = mesh.ranks, mesh.device
    return view
