"""`shard_map`: turn a program for one device into a function of whole arrays (Part 10, "Manual sharding mode").

@partial(shard_map, mesh=mesh, in_specs=("A[B_X, D_Y]", "W[D_Y, F]"), out_specs="Out[B_X, F]")
def product(A, W):
    return psum(A @ W, "Y")

Out = product(A, W)      # whole arrays, the same on every rank
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from zlib import crc32

import optree
import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from scaling.collectives.checked import alike
from scaling.collectives.linear import who_watches
from scaling.common.torch_private import constant, level_of, noted_shard, unwrapped_by_all, without_transforms
from scaling.interop import from_partition_spec
from scaling.mesh import AbstractMesh
from scaling.shard_map.calls import Bound, Call, apply_stacked
from scaling.shard_map.names import bound_here, tensor_of
from scaling.shard_map.types import PLAIN, Checks, described_type, marked, marks, memory_of, vary, varying
from scaling.spec import ShardingError, Spec, format_axes, parse, refuse
from scaling.tree import for_each


def shard_map(fn: Callable, mesh, in_specs: Any, out_specs: Any, *, in_process: bool = False) -> Callable:
    """Turn `fn`, written for one device's shards, into a function of whole arrays to whole arrays.

    The returned function is pure, and goes under torch.func's grad, vjp, jvp and vmap, and under torch.compile if its
    result is a tensor or a tuple or list of tensors. It refuses arrays that `tree.shard`, explicit mode or the judge
    knows to be shards. The ranks of a checked mesh compare the arrays' checksums at the first call with their shapes.

    Args:
        fn: a function of shards. The collectives of this package that it calls run on `mesh`.
        mesh: the mesh; with `in_process` it may be an AbstractMesh, or its sizes {"X": 4}.
        in_specs: for each argument a type ("A[B_X, D_Y]"), JAX's text ("P('X', 'Y')"), or a tree of them, in which a
            leaf covers everything below it. A single type covers all arguments. Along an axis that an in_spec does not
            name, every device gets equal shards.
        out_specs: types for the result, in the form of `in_specs`. Over an axis that an out_spec does not name, the
            result must be *invariant*, which is checked. With `{U_X}` in an out_spec the result is the sum over X.
        in_process: whether all shards are computed in this process. Otherwise each rank of the mesh calls with equal
            whole arrays, and gets the whole result.

    Raises:
        ShardingError: specs do not fit, or JAX's check_vma would refuse the program.
    """
    if not callable(fn):
        what = f"shard_map of a {type(fn).__name__}"
        raise ShardingError(f"{what}\n  rule: what is mapped is a function of shards\n  fix: shard_map(fn, mesh, ...)")
    mesh = AbstractMesh(mesh) if isinstance(mesh, Mapping) else mesh
    if not hasattr(mesh, "sizes"):
        raise ShardingError(f"shard_map on {mesh!r:.60}, which is no mesh\n  fix: give a Mesh, or the sizes of one")
    in_specs = in_specs if isinstance(in_specs, (tuple, str, Spec)) else (in_specs,)
    compared: set[Any] = set()  # shapes and dtypes of arrays that the ranks of a checked mesh have found alike

    def traced(*args):
        outer, args = Bound(mesh, in_process), _plain(args)
        specs = for_each(in_specs, args, "in_specs")
        leaves, treedef = optree.tree_flatten(args)
        leaves = [tensor_of(leaf) for leaf in leaves]
        given = frozenset(map(memory_of, leaves))
        for leaf in leaves if not in_process else ():
            _check_device(leaf, mesh)
        _check_whole(leaves, mesh)
        if not in_process and mesh.checked and not torch.compiler.is_compiling():
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if shapes not in compared:
                compared.add(shapes)
                alike(mesh, "shard_map", arrays=[described_array(leaf) for leaf in leaves])
        typed = [_read(spec, leaf, outer, "in_specs") for spec, leaf in zip(specs, leaves, strict=True)]
        stacked = [entered(leaf, spec, outer) for leaf, spec in zip(leaves, typed, strict=True)]
        made = {}

        def program(places, *shards):
            levels = {level_of(place): axis for place, axis in zip(places, mesh.sizes, strict=True)}
            bound = Bound(mesh, in_process, places, levels)
            token = bound_here.set(bound)
            try:
                with Checks(bound, given):
                    result = fn(*optree.tree_unflatten(treedef, shards))
                    found, made["tree"] = optree.tree_flatten(result)
                    found = [tensor_of(leaf) for leaf in found]
                    specs = zip(for_each(out_specs, result, "out_specs"), found, strict=True)
                    made["specs"] = [_read(spec, leaf, bound, "out_specs") for spec, leaf in specs]
                    return tuple(leaving(leaf, spec, bound) for leaf, spec in zip(found, made["specs"], strict=True))
            finally:
                bound_here.reset(token)

        found = levels_of_axes(program, outer, stacked, typed)
        results = [left(leaf, spec, outer) for leaf, spec in zip(found, made["specs"], strict=True)]
        results = [x.clone() if memory_of(x) in given else x for x in results]
        return optree.tree_unflatten(made["tree"], results)

    @constant
    def in_graph():  # a compiler keeps the call unopened, and sees through it later
        torch.compiler.allow_in_graph(traced)

    def mapped(*args):
        if torch.compiler.is_compiling():
            in_graph()
        return traced(*args)

    return wraps(fn)(mapped) if hasattr(fn, "__name__") else mapped


def _check_device(x: Tensor, mesh) -> None:
    """Raise ShardingError unless the mesh's ranks can send x."""
    if x.device.type != mesh.device.type:
        fix = "shard_map(..., in_process=True)" if mesh.device.type == "meta" else f".to({str(mesh.device)!r}) first"
        what = f"an array is on {x.device}, the mesh on {mesh.device}"
        refuse(f"shard_map on {mesh}", what, "a mesh moves what is on its own device", fix)


def _check_whole(leaves: list[Tensor], mesh) -> None:
    """Raise ShardingError if one of the arrays is known to be split or unreduced over axes of the mesh."""
    watch = who_watches()
    for i, x in enumerate(leaves):
        spec = noted_shard(x)
        if spec is None and watch is not None:
            spec = watch.held(x).type
        if spec is not None and any(mesh.sizes.get(axis, 1) > 1 for axis in spec.named_axes):
            what = f"array {i + 1} of {len(leaves)}, of shape {list(x.shape)}, is a shard of {spec}"
            rule = "shard_map takes whole arrays, the same on every rank, and cuts them itself"
            refuse(f"shard_map on {mesh}", what, rule, f'give the whole array, unshard("{spec}", x, mesh)')


def described_array(x: Tensor) -> str:
    """Return an array's dtype, shape and a checksum of its bits, which ranks with equal arrays have in common."""
    x, shape = unwrapped_by_all(x), list(x.shape)
    with without_transforms():
        bits = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{str(x.dtype).removeprefix('torch.')}{shape} of checksum {crc32(bits.data):08x}"


def _plain(tree: Any) -> Any:
    """Return the tree in plain dicts, lists and tuples; the containers of a compiler's graph cannot be changed."""
    if isinstance(tree, immutable_dict):
        return {key: _plain(below) for key, below in tree.items()}
    if isinstance(tree, immutable_list):
        return [_plain(below) for below in tree]
    return tuple(map(_plain, tree)) if type(tree) is tuple else tree


def levels_of_axes(program: Callable, bound: Bound, stacked: list[Tensor], specs: list[Spec]) -> tuple[Tensor, ...]:
    """Run the program under a level of vmap for each mesh axis; results have a dim in front for each."""
    device = stacked[0].device if stacked else bound.mesh.device
    sizes, coord = bound.mesh.sizes, bound.mesh.coord
    places = [torch.arange(sizes[axis]) if bound.in_process else torch.tensor([coord[axis]]) for axis in sizes]
    for axis in reversed(sizes):
        at = tuple(0 if axis == other else None for other in sizes)
        dims = (at, *(0 if axis in spec.axes else None for spec in specs))
        program = torch.func.vmap(program, in_dims=dims)
    return program(tuple(place.to(device) for place in places), *stacked)


def entered(x: Tensor, spec: Spec, bound: Bound) -> Tensor:
    """Return a whole array's shards, stacked over the axes of its type."""
    lead = ()
    for dim, (_, axes) in enumerate(spec.dims):
        if axes:
            call = Call("slice", axes, dim, lead=lead)
            x = apply_stacked(x, bound, call)
            lead = call.lead_after(bound.mesh.sizes)
    return x


def leaving(x: Tensor, spec: Spec, bound: Bound) -> Tensor:
    """Return a result on its way out, or raise ShardingError if its type is not the out_spec's."""
    found, summed = varying(x, bound), {*spec.unreduced}
    fixes = {
        "is reduced over {}, which no out_spec says of {}": marks(x).reduced,
        "varies over {}, and its out_spec says that all devices along {} hold the same": found - {*spec.axes} - summed,
        "is unreduced over {}, and its out_spec does not say so of {}": marks(x).unreduced - summed,
        "is invariant over {}, and its out_spec says that the devices along {} hold terms of a sum": summed - found,
    }
    for what, axes in fixes.items():
        if axes:
            over = format_axes(bound.in_order(axes))
            raise ShardingError(
                f"out_specs: {spec}: the result is {described_type(x, bound)}\n  it {what.format(over, over)}\n"
                f"  rule: an axis that an out_spec does not name is one over which the result is invariant\n"
                f"  fix: psum or pmean over {over} before it is returned (of what is gathered: all_gather with "
                f'to="invarying"; of what is reduced: pcast(x, ..., to="varying") first), or name {over} in the '
                f"out_spec, as in A[I_{over}] or A[I] {{U_{over}}}"
            )
    return vary(marked(x, PLAIN), spec.axes, bound)


def left(x: Tensor, spec: Spec, bound: Bound) -> Tensor:
    """Return the whole array of shards that are stacked over all mesh axes."""
    names = {*spec.named_axes}
    for at, axis in reversed(list(enumerate(bound.mesh.sizes))):
        if axis not in names:
            x = x.select(at, 0)
    lead = tuple(axis for axis in bound.mesh.sizes if axis in names)
    calls = [Call("gather", axes, dim) for dim, (_, axes) in enumerate(spec.dims) if axes]
    calls += [Call("psum", spec.unreduced)] if spec.unreduced else []
    for call in calls:
        x = apply_stacked(x, bound, call._replace(lead=lead))
        lead = tuple(axis for axis in lead if axis not in call.axes)
    return x


def _read(spec: Any, x: Tensor, bound: Bound, what: str) -> Spec:
    """Read the type that a spec gives to x: a whole array (in_specs), or one device's result (out_specs)."""
    if isinstance(spec, str) and spec.strip().removeprefix("jax.").startswith(("P(", "PartitionSpec(")):
        spec = from_partition_spec(spec, [f"D{i}" for i in range(x.dim())])
    spec = parse(spec)
    spec.check_axes(bound.mesh)
    if x.dim() != len(spec.dims):
        refuse(
            f"{what}: {spec}",
            f"it has {len(spec.dims)} dims, the array {list(x.shape)}",
            "a type names each dim",
            "name as many",
        )
    if what == "in_specs":
        if spec.unreduced:
            rule = "a whole array has no shards that are partial sums"
            refuse(f"{what}: {spec}", "it is unreduced", rule, "give the type without {U}")
        spec.local_shape(x.shape, bound.mesh)
        return spec
    for size, (dim, axes) in zip(x.shape, spec.dims, strict=True):
        if dim.isdigit() and int(dim) != size * bound.mesh.size(axes):
            what = f"{what}: {spec}"
            refuse(
                what,
                f"dim {dim} of the result has size {size * bound.mesh.size(axes)}",
                "a number is a size",
                "give the size, or a name",
            )
    return spec
