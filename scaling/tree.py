"""Shard, unshard, initialise and check pytrees of tensors by the types of their leaves.

A tree is nested dicts, lists and tuples of tensors (optree's nodes; None is an empty tree, as in JAX). Its specs are a
tree of the same structure whose leaves are types: `{"W_in": "W_in[L, D_X, F_Y]", "W_out": Spec(...)}`. A mesh is
anything with `.sizes`, `.coord` and `.device`; on an AbstractMesh, whose device is meta, `init` only makes shapes.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.common.torch_private import note_shard
from scaling.spec import ShardingError, Spec, dtype_bytes, mesh_sizes, parse

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
CHUNK = 1 << 18  # elements that `init` generates at a time, which bounds its extra memory


map: Callable[..., Any] = optree.tree_map  # map(f, tree, *trees): the tree of f(leaf, *leaves) at each position
leaves: Callable[..., list] = optree.tree_leaves  # in the order of sorted dict keys, so equal on every rank
structure: Callable[..., Any] = optree.tree_structure  # equal for trees with leaves at equal positions


def named_leaves(tree, name: str = "params") -> dict[str, Any]:
    """Return each leaf under the expression that would fetch it: {'params["blocks"]["W_in"]': leaf}."""
    accessors, found, _ = optree.tree_flatten_with_accessor(tree)
    return {a.codify(name).replace("'", '"'): leaf for a, leaf in zip(accessors, found, strict=True)}


def paired(tree, specs, name: str = "params") -> list[tuple[str, Any, Spec]]:
    """Return (where, leaf, spec) for every leaf; ShardingError names the leaves by which the structures differ."""
    found, wanted = named_leaves(tree, name), named_leaves(specs, name)
    if missing := [where for where in wanted if where not in found]:
        what = f"{missing[0]}: missing: the specs have {wanted[missing[0]]} there{_more(missing)}"
        raise ShardingError(f"{what}\n  fix: add it, or leave its type out of the specs; there are {list(found)}")
    if extra := [where for where in found if where not in wanted]:
        fix = f"give each leaf its type in the specs, or leave it out; the specs have {list(wanted)}"
        raise ShardingError(f"{extra[0]}: has no spec{_more(extra)}\n  fix: {fix}")
    return [(where, found[where], parse(spec)) for where, spec in wanted.items()]


def for_each(types, tree, what: str, open_ends: bool = False) -> list:
    """Return a type for each leaf of a tree; one type may cover a whole subtree, as may None with `open_ends`."""
    try:
        is_leaf = lambda node: isinstance(node, Spec) or (open_ends and node is None)  # noqa: E731
        return optree.broadcast_prefix(types, tree, is_leaf=is_leaf)
    except ValueError as error:
        none = "; None leaves a result open" if open_ends else ""
        raise ShardingError(
            f"{what}: {types}\n  {str(error).splitlines()[0]}\n"
            f"  rule: {what} are a tree of the same structure as what they type, or of its upper levels{none}\n"
            "  fix: a tuple with a type for each argument; of one argument the type alone, or one type for all of them"
        ) from None


def shard(tree, specs, mesh) -> Any:
    """Cut this rank's shards from whole arrays, as contiguous copies (the originals can be freed), without messages."""
    name = "array" if isinstance(tree, Tensor) else "params"
    return unflatten(specs, [_shard(where, leaf, spec, mesh) for where, leaf, spec in paired(tree, specs, name)])


def unshard(tree, specs, mesh) -> Any:
    """Return the whole arrays on every rank from each rank's shards, by `collectives.unshard` of every leaf."""
    from scaling.collectives import unshard  # imported here, so that plain trees need no torch.distributed

    return unflatten(specs, [unshard(str(spec), leaf, mesh) for _, leaf, spec in paired(tree, specs)])


@dataclass(frozen=True)
class Normal:
    """Random initial values with mean 0 and this standard deviation."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements."""

    value: float = 0.0


def init(inits, specs, sizes, mesh, seed: int = 0, dtype=torch.float32, device=None, *, padded=None) -> Any:
    """Initialise params as shards, so that no device ever holds a whole array.

    `inits` has the structure of `specs`, with leaves `Normal(std)` or `Constant(value)`; `sizes` is {"D": 8, "F": 16}.
    An element depends only on (seed, position in the tree, index in the whole array), so all meshes, and CPU and CUDA,
    give bitwise equal values. `device` defaults to the mesh's. `padded` has the stored sizes, if some are larger, with
    zeros as padding.
    """
    device = torch.device(mesh.device if device is None else device)
    if not dtype.is_floating_point:
        raise ShardingError(f"init: {dtype} would cut the values off\n  fix: give a dtype of floats")
    if getattr(mesh, "checked", False):
        from scaling.collectives.checked import alike  # imported here, so that plain trees need no torch.distributed

        alike(mesh, "init", seed=seed, dtype=dtype, sizes=sizes, specs=specs)
    stored, made = sizes if padded is None else padded, []
    for where, how, spec in paired(inits, specs):
        _no_partial_sums(where, spec)
        local, whole = spec.local_shape(stored, mesh), spec.global_shape(sizes)
        ranges = tuple(map(unpadded, spec.slices(stored, mesh, mesh.coord), whole))
        if isinstance(how, Constant):
            x = torch.full([s.stop - s.start for s in ranges], how.value, dtype=dtype, device=device)
        elif not isinstance(how, Normal):
            what = f"{where}: an init is Normal(std) or Constant(value); got {how!r}"
            raise ShardingError(f"{what}\n  fix: give one of the two")
        elif device.type == "meta":
            x = torch.empty(local, dtype=dtype, device=device)
        else:
            x = _normal(whole, ranges, how.std, key(seed, where), dtype, device)
        zeros = [n - size for n, size in zip(local, x.shape, strict=True)]  # the number to append along each dim
        x = torch.nn.functional.pad(x, [k for n in reversed(zeros) for k in (0, n)]) if any(zeros) else x
        made.append(declare(x, spec, mesh, where))
    return unflatten(specs, made)


def unpadded(held: slice, size: int) -> slice:
    """Return the part of a range that lies in a dim of this size, without the padding at its end."""
    return slice(min(held.start, size), min(held.stop, size))


def check(tree, specs, sizes, mesh, dtype=None, name: str = "params", fix: str = "") -> None:
    """Raise ShardingError, which names the leaf, unless every leaf is a tensor of its spec's local shape (and dtype).

    All leaves must be on one device. `fix` is the call that would have made the tree (for whole leaves `tree.shard`).
    """
    found = leaves(tree)
    wanted = _local_shapes(tuple(leaves(specs)), tuple(sizes.items()), tuple(mesh_sizes(mesh).items()))
    device = found[0].device if found and isinstance(found[0], Tensor) else None
    alike = (_is_like(leaf, shape, dtype, device) for leaf, shape in zip(found, wanted, strict=False))
    if structure(tree) == structure(specs) and all(alike):
        return
    for where, leaf, spec in paired(tree, specs, name):
        if not isinstance(leaf, Tensor):
            raise ShardingError(_no_tensor(where, leaf, spec))
        what = change = ""
        if tuple(leaf.shape) != (wanted := spec.local_shape(sizes, mesh)):
            whole = spec.global_shape(sizes)
            what = f"has the shape {wanted} on each device ({whole} in all); found {tuple(leaf.shape)}"
            shard = "tree.shard(tree, specs, mesh)" if tuple(leaf.shape) == whole else "give an array of that shape"
            change = fix or shard
        elif dtype is not None and leaf.dtype != dtype:
            what, change = f"must have the dtype {dtype}; found {leaf.dtype}", f"convert it, .to({dtype})"
        elif leaf.layout is not torch.strided:
            what, change = f"must be dense; found {leaf.layout}", ".to_dense()"
        elif leaf.device != device:
            what, change = f"is on {leaf.device}, another leaf on {device}", f"move it, .to({str(device)!r})"
        if what:
            raise ShardingError(f"{where}: {spec} {what}\n  fix: {change}")


@lru_cache(maxsize=1024)
def _local_shapes(specs: tuple, sizes: tuple, mesh: tuple) -> list[tuple[int, ...]]:
    """Return the specs' local shapes, cached because each step of training or decoding checks its params."""
    return [parse(spec).local_shape(dict(sizes), dict(mesh)) for spec in specs]


def _is_like(leaf: Any, shape: tuple[int, ...], dtype, device) -> bool:
    dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
    return dense and leaf.shape == shape and leaf.device == device and (dtype is None or leaf.dtype == dtype)


def check_floats(tree, name: str = "params") -> None:
    """Raise ValueError, which names the leaf, if one is not a dense tensor of floats, since ints cannot be trained."""
    if all(map(_is_floats, leaves(tree))):
        return
    where, leaf = next((path, leaf) for path, leaf in named_leaves(tree, name).items() if not _is_floats(leaf))
    found = f"{leaf.layout} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
    what = f"{where} is {found}: params, gradients and moments are dense tensors of floats"
    raise ValueError(f"{what}\n  fix: convert it, .to(torch.float32), or leave it out of the tree")


def _is_floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in FLOATS and leaf.layout is torch.strided


def nbytes(tree) -> int:
    """Return the bytes of all tensors of the tree that this rank holds."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def local_nbytes(specs, sizes, mesh, dtype) -> float:
    """Return the bytes that one device would hold of arrays of these specs, without tensors; dtype as `Spec.nbytes`."""
    dtype_bytes(dtype)
    return sum(parse(spec).nbytes(sizes, mesh, dtype) for spec in leaves(specs))


def unstacked(layers) -> list[Any]:
    """Split arrays that are stacked over L into a list of L trees."""
    return [unflatten(layers, each) for each in zip(*map(Tensor.unbind, leaves(layers)), strict=True)]


def unflatten(like, new_leaves) -> Any:
    """Return a tree of the structure of `like` with these leaves."""
    return optree.tree_unflatten(optree.tree_structure(like), new_leaves)


def _shard(where: str, whole: Tensor, spec: Spec, mesh) -> Tensor:
    _no_partial_sums(where, spec)
    if not isinstance(whole, Tensor):
        raise ShardingError(_no_tensor(where, whole, spec))
    try:
        ranges = spec.slices(whole.shape, mesh, mesh.coord)
    except ShardingError as error:
        raise ShardingError(f"{where}: {error}") from None
    return declare(whole[ranges].clone(memory_format=torch.contiguous_format), spec, mesh, where)


def declare(x: Tensor, spec: "Spec | str", mesh, where: str = "x") -> Tensor:
    """Return x, noted as this rank's shard of that type: the judge and shard_map then know it, as after `shard`."""
    x, spec = note_shard(x, parse(spec), mesh), parse(spec)
    if x.is_meta or mesh.device.type == "meta":
        from scaling.collectives.linear import who_watches  # imported here, as above

        if (watch := who_watches()) is not None:
            return watch.typed(x, spec, where, mesh)
    return x


def _no_tensor(where: str, leaf: Any, spec: Spec) -> str:
    return f"{where}: must be a tensor typed {spec}; found {type(leaf).__name__}\n  fix: torch.as_tensor(...)"


def _no_partial_sums(where: str, spec: Spec) -> None:
    if spec.unreduced:
        what = f"{where}: {spec} is unreduced: a whole array has no shards that are partial sums"
        raise ShardingError(f"{what}\n  fix: give the type without {{U}}")


def _more(places: list) -> str:
    return f" (and {len(places) - 1} more)" if len(places) > 1 else ""


# Random numbers are made from counters. An element's 64-bit counter is hashed twice (by splitmix64's finaliser: Steele,
# Lea and Flood 2014), and the sum of the eight 16-bit fields is a bell within 4.9 standard deviations, excess kurtosis
# -0.15. All is integer up to the last scaling, so any device and slice gives the same bits, unlike with erfinv and log.


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


GOLDEN, MIX1, MIX2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
FIELDS = 0x0000FFFF0000FFFF
MEAN, SIGMA = 8 * 65535 / 2, math.sqrt(8 * (65536**2 - 1) / 12)


def key(seed: int, where: str) -> int:
    """Return the first counter of one array; ValueError unless the seed is a whole number."""
    try:
        seed = index(seed)
    except TypeError:
        raise ValueError(f"seed = {seed!r}: must be a whole number\n  fix: give an int") from None
    return int.from_bytes(hashlib.sha256(f"{seed} {where}".encode()).digest()[:8], "little", signed=True)


def hashed(counter: Tensor) -> Tensor:
    """Hash int64 counters to int64 values whose 64 bits all look random."""
    x = (counter ^ ((counter >> 30) & ((1 << 34) - 1))) * MIX1  # the masks make the shifts logical
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _bell(index: Tensor, start: int) -> Tensor:
    """Return float64 values of mean 0 and variance 1 from global linear indices."""
    counter = index * _signed(2 * GOLDEN % (1 << 64)) + start
    a, b = hashed(counter), hashed(counter + GOLDEN)
    pairs = (a & FIELDS) + ((a >> 16) & FIELDS) + (b & FIELDS) + ((b >> 16) & FIELDS)
    return ((pairs & 0xFFFFFFFF) + (pairs >> 32)).double().sub_(MEAN).div_(SIGMA)


def _normal(shape: tuple, ranges: tuple, std: float, key: int, dtype, device) -> Tensor:
    """Return the part `ranges` of an array of this shape: `std` times the bell at each element's linear index."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, part in list(zip(shape, ranges, strict=True))[:-1]:  # makes the linear index of each row's first element
        index = (index * size)[..., None] + torch.arange(part.start, part.stop, device=device)
    rows = (index * shape[-1]).reshape(-1, 1) if shape else index.reshape(1, 1)
    columns = torch.arange(ranges[-1].start, ranges[-1].stop, device=device) if shape else index.reshape(1)
    out = torch.empty(rows.numel(), columns.numel(), dtype=dtype, device=device)
    step = max(1, CHUNK // max(1, columns.numel()))
    for start in range(0, rows.numel(), step):
        out[start : start + step] = _bell(rows[start : start + step] + columns, key) * std
    return out.reshape([part.stop - part.start for part in ranges])
